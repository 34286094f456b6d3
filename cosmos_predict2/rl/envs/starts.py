# SPDX-License-Identifier: Apache-2.0
"""Where the episodes of a world model begin: pictures, the task's sentence, and what else is known of a start.

`ToyStarts` lays the toy world's tables; `recorded_starts.RecordedStarts` reads those of recordings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from cosmos_predict2.rl.envs.toy import NUM_TRIALS, Tables
from cosmos_predict2.toy_world.rendering import render
from cosmos_predict2.toy_world.scene import GOAL


@dataclass(frozen=True)
class FirstFrames:
    """The starts of E episodes, each F pictures, of which the last one is the present, and what happened between."""

    pictures_E_F_H_W_C: Tensor  # uint8
    actions_E_A_D: Tensor | None  # the F - 1 raw actions between the pictures; None where F is 1
    task_description: list[str]
    context: Mapping[str, Tensor] = field(default_factory=dict)  # by name, a row for each: goal, ...


class Starts(Protocol):
    """Starts by task and trial, both modulo what there is. ``history`` is the number of pictures of each."""

    num_tasks: int
    history: int

    def __len__(self) -> int: ...

    def starts(self, task_ids: Sequence[int], trial_ids: Sequence[int]) -> FirstFrames: ...


class ToyStarts:
    """The toy world's starts, those that `ToyEnv` has with the same arguments; ``goal`` and ``states`` are known."""

    history = 1

    def __init__(
        self,
        setting: str = "default",
        tasks: Sequence[str] = ("push_puck",),
        size: int | None = None,
        split: str = "train",
        seed: int = 0,
    ) -> None:
        self.tables = Tables(setting, tasks, size, split, seed)
        self.num_tasks = len(self.tables.tasks)

    def __len__(self) -> int:
        return NUM_TRIALS

    def starts(self, task_ids: Sequence[int], trial_ids: Sequence[int]) -> FirstFrames:
        states = self.tables.states(task_ids, trial_ids)
        return FirstFrames(
            torch.from_numpy(render(states, self.tables.size))[:, None],
            None,
            self.tables.sentences(task_ids),
            {"goal": torch.from_numpy(states[:, GOAL].copy()), "states": torch.from_numpy(states)},
        )
