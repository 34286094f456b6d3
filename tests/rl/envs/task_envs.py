# SPDX-License-Identifier: Apache-2.0
"""Single environments that workers run in tests: the toy world, and ones that do not behave."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from cosmos_predict2.toy_world.physics import (
    GRIPPER,
    advance,
    by_task,
    distance,
    episode_generator,
    find_setting,
    find_tasks,
    lay_table,
    reward,
    success,
)
from cosmos_predict2.toy_world.rendering import render
from imaginaire.errors import DataError
from tests.programs import HANG_S

TASKS = ["touch_puck", "push_puck"]
HANGS, DIES, RAISES = 0.9, 0.8, 0.7  # the last number of an action that does so
DEADLY = 13  # a start in which the worker dies, as long as the file is there


class ToyTask:
    """A table of the toy world."""

    num_tasks, num_trials, action_dim = len(TASKS), 50, 4

    def __init__(self, max_steps: int = 8, breaks: str = "", deadly: str = "") -> None:
        self.max_steps, self.breaks, self.deadly = max_steps, breaks, Path(deadly) if deadly else None
        self.metadata = {"suite": "toy", "chunk": 3}
        if breaks == "building":
            raise DataError("no assets here.")
        self.setting, self.size = find_setting("default", None)

    def reset(self, task_id: int, trial_id: int, seed: int) -> dict[str, Any]:
        if trial_id == DEADLY and self.deadly is not None and self.deadly.exists():
            self.deadly.unlink()
            os.kill(os.getpid(), 9)
        self.task = find_tasks(TASKS)[task_id]
        self.state = self.start = lay_table([episode_generator(0, trial_id)], [self.task], self.setting, self.size)
        return self._observed()

    def step(self, action: NDArray[Any]) -> tuple[dict[str, Any], float, bool]:
        self._misbehave(float(action[-1]))
        self.state = advance(self.state, action[None], self.setting, self.size)
        groups = by_task([self.task])
        left = distance(self.state, self.start, groups)
        is_done = success(self.state, left, groups, self.setting)
        return self._observed(), float(reward(left, is_done)[0]), bool(is_done[0])

    def close(self) -> None:
        """Nothing is held."""

    def _observed(self) -> dict[str, Any]:
        picture = render(self.state, self.size)[0]
        return {
            "full_image": picture,
            "wrist_image": picture[None, ::2, ::2],
            "state": self.state[0, GRIPPER].astype(numpy.float32),
            "task_description": self.task.sentence,
        }

    def _misbehave(self, number: float) -> None:
        if not self.breaks:
            return
        if number == numpy.float32(HANGS):
            time.sleep(HANG_S)
        if number == numpy.float32(DIES):
            os.kill(os.getpid(), 9)
        if number == numpy.float32(RAISES):
            raise RuntimeError("the simulation is unstable")


class TellingTask(ToyTask):
    """Shows what its worker was given as its state, and succeeds with every action."""

    def reset(self, task_id: int, trial_id: int, seed: int) -> dict[str, Any]:
        self.seed = seed
        return super().reset(task_id, trial_id, seed)

    def step(self, action: NDArray[Any]) -> tuple[dict[str, Any], float, bool]:
        observed, _, _ = super().step(action)
        return observed, float(action[0]), True

    def _observed(self) -> dict[str, Any]:
        told = [self.seed, int(os.environ["NUMBER"])]
        return {**super()._observed(), "state": numpy.array(told, dtype=numpy.float32)}


class Stuck(ToyTask):
    """An environment whose code is wrong from the second step of an episode on."""

    def reset(self, task_id: int, trial_id: int, seed: int) -> dict[str, Any]:
        self.num_steps = 0
        return super().reset(task_id, trial_id, seed)

    def step(self, action: NDArray[Any]) -> tuple[dict[str, Any], float, bool]:
        self.num_steps += 1
        return super().step(action)

    def _observed(self) -> dict[str, Any]:
        if self.num_steps > 1:
            raise RuntimeError("motor 3 does not answer")
        return super()._observed()


class Unlicensed(ToyTask):
    """An environment that a library cannot begin."""

    def reset(self, task_id: int, trial_id: int, seed: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads("no license")
        return found
