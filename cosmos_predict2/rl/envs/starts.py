# SPDX-License-Identifier: Apache-2.0
"""Starts of the toy world: tables by task and trial, and their pictures."""

from collections.abc import Sequence

import torch

from cosmos_predict2.data.toy.videos import SPLITS
from cosmos_predict2.rl.envs.first_frames import NUM_TRIALS, FirstFrames, StartsDefaults
from cosmos_predict2.toy_world.physics import GOAL, Floats, episode_generator, find_setting, find_tasks, lay_table
from cosmos_predict2.toy_world.rendering import render
from imaginaire.errors import ConfigError, near


class ToyStarts(StartsDefaults):
    """The starts that `ToyEnv` has with the same arguments; ``goal`` and ``states`` are known.

    For one task they are the first states of `make_episodes` by number: an endless series, of which each split has a
    part (`SPLITS`), so that no start of "val" is one of "train".
    """

    history = 1

    def __init__(
        self,
        setting: str = "default",
        tasks: Sequence[str] = ("push_puck",),
        size: int | None = None,
        split: str = "train",
        seed: int = 0,
    ) -> None:
        if split not in SPLITS:
            raise ConfigError(f"The toy world has no split '{split}'.{near(split, SPLITS)}")
        try:
            self.setting, self.side = find_setting(setting, size)
            self.tasks = find_tasks(tasks)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.seed, self._first, self.num_tasks = seed, SPLITS[split], len(self.tasks)
        self.about = dict(setting=setting, tasks=list(tasks), size=self.side, split=split, seed=seed)

    def __len__(self) -> int:
        return NUM_TRIALS

    def states(self, task_ids: Sequence[int], trial_ids: Sequence[int]) -> Floats:
        """First states [N, 10]."""
        generators = [episode_generator(self.seed, self._first + int(trial) % NUM_TRIALS) for trial in trial_ids]
        chosen = [self.tasks[int(task) % self.num_tasks] for task in task_ids]
        return lay_table(generators, chosen, self.setting, self.side)

    def sentences(self, task_ids: Sequence[int]) -> list[str]:
        return [self.tasks[int(task) % self.num_tasks].sentence for task in task_ids]

    def starts(self, task_ids: Sequence[int], trial_ids: Sequence[int]) -> FirstFrames:
        states = self.states(task_ids, trial_ids)
        pictures = torch.from_numpy(render(states, self.side, self.setting.cover))[:, None]
        known = {"goal": torch.from_numpy(states[:, GOAL].copy()), "states": torch.from_numpy(states)}
        return FirstFrames(pictures, None, self.sentences(task_ids), known)
