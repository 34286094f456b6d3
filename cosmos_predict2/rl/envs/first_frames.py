# SPDX-License-Identifier: Apache-2.0
"""Starts of a world model's episodes: pictures, the task's sentence, and what else is known of a start.

`SimulatedStarts` asks a simulator, `recorded_starts.RecordedStarts` reads them, `GivenStarts` are pictures at hand, and
`starts.ToyStarts` lays tables of the toy world, which nothing here imports.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.actions.transforms import UNKNOWN, ActionContract
from cosmos_predict2.conditioner import STATE_KEY
from cosmos_predict2.data.views import stacked
from cosmos_predict2.rl.interfaces import Observation, VecEnv
from imaginaire.errors import ConfigError

NUM_TRIALS = 2**40  # of a task: starts are taken modulo what there is


@dataclass(frozen=True)
class FirstFrames:
    """The starts of E episodes, each F pictures, of which the last one is the present, and what happened between."""

    pictures_E_F_H_W_C: Tensor  # uint8
    actions_E_A_D: Tensor | None  # the F - 1 raw actions between the pictures; None where F is 1
    task_description: list[str]
    context: Mapping[str, Tensor] = field(default_factory=dict)  # by name, a row for each: goal, ...


@dataclass(frozen=True)
class RecordedFacts:
    """Facts of the recordings that starts are of: the median number of actions, and the range of each of their numbers,
    outside of which a world model of them has seen nothing."""

    num_actions: int
    low: Sequence[float]
    high: Sequence[float]
    contract: Mapping[str, Any] = field(default_factory=dict)  # an `ActionContract` as plain data

    @classmethod
    def of(cls, actions: Sequence[NDArray[Any]], contract: ActionContract = UNKNOWN) -> "RecordedFacts":
        """Those of recordings with these actions, a table [L, D] each."""
        rows, length = numpy.concatenate(actions), float(numpy.median([len(table) for table in actions]))
        return cls(round(length), rows.min(axis=0).tolist(), rows.max(axis=0).tolist(), contract.to_dict())


def whole_pictures(observation: Observation, num_views: int, fit: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """uint8 [E, V * H, W, 3]: full_image and below it the first of wrist_image, each brought to size by ``fit``."""
    if num_views == 1 and fit is None:
        return observation["full_image"]
    wrists = observation["wrist_image"].unbind(1)[: num_views - 1] if num_views > 1 else ()
    views = [observation["full_image"], *wrists]
    if len(views) < num_views:
        found = f"The world model has {num_views} views, but the environment shows {len(views)}"
        raise ConfigError(f"{found}: one with a wrist camera is needed (of gym:ID ?wrist=CAMERA).")
    pictures = [view.permute(3, 0, 1, 2) for view in views]
    return stacked([picture if fit is None else fit(picture) for picture in pictures]).permute(1, 2, 3, 0).contiguous()


class StartPictures(Protocol):
    """Starts by task and trial, both modulo what there is. ``history`` is the number of pictures of each.

    Optional: ``recorded``, the facts of the recordings that they are of, ``size``, (height, width) to which
    each view is stretched, and ``views``, those of the pictures, where that is known.
    """

    num_tasks: int
    history: int

    @property
    def recorded(self) -> RecordedFacts | None: ...

    @property
    def views(self) -> Sequence[str] | None: ...

    def __len__(self) -> int: ...

    def starts(self, task_ids: Sequence[int], trial_ids: Sequence[int]) -> FirstFrames: ...


class StartsDefaults:
    recorded: RecordedFacts | None = None
    size: tuple[int, int] | None = None
    views: Sequence[str] | None = None


class GivenStarts(StartsDefaults):
    """Pictures with their sentences as the starts of one task, by number."""

    history = num_tasks = 1

    def __init__(
        self,
        pictures_E_H_W_C: Tensor,
        sentences: Sequence[str] = (),
        recorded: RecordedFacts | None = None,
        states_E_S: Tensor | None = None,
    ) -> None:
        self.states_E_S = states_E_S
        self.pictures_E_H_W_C, self.recorded = pictures_E_H_W_C, recorded
        self.sentences = sentences or [""] * len(pictures_E_H_W_C)

    def __len__(self) -> int:
        return len(self.pictures_E_H_W_C)

    def starts(self, task_ids: Sequence[int], trial_ids: Sequence[int]) -> FirstFrames:
        rows = [trial % len(self) for trial in trial_ids]
        known = {} if self.states_E_S is None else {STATE_KEY: self.states_E_S[rows]}
        return FirstFrames(self.pictures_E_H_W_C[rows][:, None], None, [self.sentences[i] for i in rows], known)


class SimulatedStarts(StartsDefaults):
    """The starts of a simulator: the pictures and sentences that it shows after a reset to them; ``fit`` brings each
    view to the size of a world model, which has ``num_views``."""

    history = 1

    def __init__(
        self, env: VecEnv, num_tasks: int, fit: Callable[[Tensor], Tensor] | None = None, num_views: int = 1
    ) -> None:
        self.env, self.num_tasks, self.fit, self.num_views = env, num_tasks, fit, num_views

    def __len__(self) -> int:
        return NUM_TRIALS

    def starts(self, task_ids: Sequence[int], trial_ids: Sequence[int]) -> FirstFrames:
        pictures, sentences, states = [], [], []
        for first in range(0, len(trial_ids), self.env.num_envs):
            part = slice(first, first + self.env.num_envs)
            options = dict(task_ids=task_ids[part], trial_ids=trial_ids[part], env_ids=range(len(trial_ids[part])))
            observed, _ = self.env.reset(options=options)
            pictures.append(whole_pictures(observed, self.num_views, self.fit).cpu())
            sentences += list(observed["task_description"])
            states.append(observed[STATE_KEY].cpu())
        known = {STATE_KEY: torch.cat(states)} if states and states[0].shape[1] else {}
        return FirstFrames(torch.cat(pictures)[:, None], None, sentences, known)
