# SPDX-License-Identifier: Apache-2.0
"""Many tables stepped together: the simulator as an environment with pictures for observations."""

from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from cosmos_predict2.toy_world.physics import (
    STATE_SIZE,
    Floats,
    Task,
    action_layout,
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
from cosmos_predict2.toy_world.rendering import PAD, Picture, draw_things, table


class ToyWorld:
    """``num_envs`` tables. Observations are uint8 [N, H, W, 3]; what happens follows from seeds and actions alone.

    An episode ends by time (``done``); stepping on is allowed, and `reset` begins the next one.
    """

    def __init__(
        self,
        num_envs: int,
        size: int | None = None,
        action_dim: int = 4,
        setting: str = "default",
        tasks: Sequence[str] = ("push_puck",),
        seed: int = 0,
        num_steps: int | None = None,
    ) -> None:
        self.setting, self.size = find_setting(setting, size)
        self.num_envs = num_envs
        self.action_dim = action_dim
        self.num_steps = self.setting.num_steps if num_steps is None else num_steps
        self.seed = seed
        self._choices = find_tasks(tasks)
        action_layout(action_dim)  # raises for another robot's
        self._next_seed = 0
        self.tasks: list[Task] = []
        self.states: Floats = numpy.empty((num_envs, STATE_SIZE))
        self.reset()

    def reset(self, seeds: Sequence[int] | None = None) -> Picture:
        """First observations. Table i is laid from ``seeds[i]``; without seeds, from the next ones in line."""
        if seeds is None:
            seeds = range(self._next_seed, self._next_seed + self.num_envs)
            self._next_seed += self.num_envs
        if len(seeds) != self.num_envs:
            raise ValueError(f"The toy world has {self.num_envs} environments, but {len(seeds)} seeds were given.")
        generators = [episode_generator(self.seed, seed) for seed in seeds]
        tasks = [self._choices[int(generator.integers(len(self._choices)))] for generator in generators]
        return self.set_states(lay_table(generators, tasks, self.setting, self.size), tasks)

    def set_states(self, states: Floats, tasks: Sequence[Task] | None = None) -> Picture:
        """Begin an episode in these states [N, 10]; gives the observations."""
        if states.shape != (self.num_envs, STATE_SIZE):
            raise ValueError(f"States of shape {states.shape}; expected {(self.num_envs, STATE_SIZE)}.")
        self.states = states.astype(numpy.float64)
        self.tasks = list(tasks) if tasks is not None else self.tasks
        self._start = self.states.copy()
        self._groups = by_task(self.tasks)
        self._steps = 0
        self._ever = numpy.zeros(self.num_envs, dtype=bool)
        self._table = table(self.states, self.size)
        self._canvas = numpy.empty_like(self._table)
        return self.render()

    def step(
        self, actions: NDArray[numpy.floating[Any]]
    ) -> tuple[Picture, Floats, NDArray[numpy.bool_], dict[str, NDArray[Any]]]:
        """Observation, reward, done and info after actions [N, action_dim] in [-1, 1].

        info: ``success`` now, ``ever`` since the reset, and ``distance`` left in pixels.
        """
        if actions.shape != (self.num_envs, self.action_dim):
            raise ValueError(f"Actions of shape {actions.shape}; expected {(self.num_envs, self.action_dim)}.")
        self.states = advance(self.states, actions, self.setting, self.size)
        self._steps += 1
        left = distance(self.states, self._start, self._groups)
        is_done = success(self.states, left, self._groups, self.setting)
        self._ever |= is_done
        ended = numpy.full(self.num_envs, self._steps >= self.num_steps)
        info = {"success": is_done, "ever": self._ever.copy(), "distance": left}
        return self.render(), reward(left, is_done), ended, info

    def render(self) -> Picture:
        """uint8 [N, H, W, 3] of the present states."""
        numpy.copyto(self._canvas, self._table)
        draw_things(self._canvas, self.states, self.size, self.setting.cover)
        return numpy.ascontiguousarray(self._canvas[:, PAD : PAD + self.size, PAD : PAD + self.size])

    @property
    def sentences(self) -> list[str]:
        """The instruction of each environment."""
        return [task.sentence for task in self.tasks]
