# SPDX-License-Identifier: Apache-2.0
"""Environments of gymnasium as packages have them: a point that is moved to a goal, drawn in pictures."""

from typing import Any

import gymnasium
import numpy
from gymnasium.spaces import Box, Dict, Discrete


class Point(gymnasium.Env[Any, Any]):
    """The point moves by up to .2 of the picture in an action. Variants have what differs between packages."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, render_mode: str | None = None, kind: str = "info", size: int = 48, **drawn: int) -> None:
        height, width = ("render_height", "render_width") if kind == "rendered" else ("height", "width")
        if drawn and (kind not in ("sized", "rendered") or height not in drawn):
            raise TypeError(f"Point.__init__() got an unexpected keyword argument '{next(iter(drawn))}'")
        self.render_mode, self.kind = (None if kind in ("pixels", "nested") else render_mode), kind
        self.shape = (drawn.get(height, size), drawn.get(width, size * 2))
        self.action_space: Any = Box(0.0, 512.0, (2,)) if kind == "absolute" else Box(-1.0, 1.0, (2,))
        if kind == "unbounded":
            self.action_space = Box(-numpy.inf, numpy.inf, (2,))
        if kind == "discrete":
            self.action_space = Discrete(3)
        self.observation_space = Dict({"agent": Box(0, 1, (2,)), "goal": Box(0, 1, (2,))})
        self.place = self.goal = numpy.zeros(2)
        self.is_over, self.num_steps = False, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        draws: Any = self.np_random  # of which some packages draw without asking for the seed
        if self.kind == "global":
            draws = numpy.random
        elif self.kind == "unseeded":
            draws = numpy.random.default_rng()
        elif self.kind != "own":
            super().reset(seed=seed)
            draws = self.np_random
        self.place, self.goal = draws.uniform(0.2, 0.8, 2), draws.uniform(0.2, 0.8, 2)
        self.is_over, self.num_steps = False, 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.is_over:
            raise ValueError("step after the end of an episode")
        moved = (numpy.asarray(action) / 256 - 1) if self.kind == "absolute" else numpy.asarray(action)
        self.place = numpy.clip(self.place + 0.2 * moved, 0, 0.99)
        distance = float(numpy.abs(self.place - self.goal).max())
        is_near = distance < 0.15
        self.is_over = self.kind in ("terminates", "fades") and is_near
        info: dict[str, Any] = {"is_success": numpy.float32(is_near)}
        if self.kind in ("silent", "terminates") or (self.kind == "late" and not self._is_last()):
            info = {}
        if self.kind == "words":
            info = {"is_success": "yes" if is_near else "no"}
        if self.kind == "late" and info:
            info = {"is_success": numpy.array([is_near])}
        return self._observed(), -distance, self.is_over, False, info

    def _is_last(self) -> bool:
        self.num_steps += 1
        return self.num_steps >= 12

    def render(self) -> Any:
        picture = self._picture()
        if self.kind == "floats":
            return (picture / 255).astype(numpy.float32).transpose(2, 0, 1)
        return numpy.pad(picture, ((0, 0), (0, 0), (0, 1))) if self.kind == "alpha" else picture

    def _picture(self) -> Any:
        picture = numpy.zeros((*self.shape, 3), numpy.uint8)
        is_black = self.kind == "black" or (self.kind == "fades" and self.is_over)
        places = () if is_black else (self.place, self.goal)
        for channel, (row, column) in enumerate(places):
            top, left = int(row * self.shape[0]), int(column * self.shape[1])
            picture[top : top + 8, left : left + 16, channel] = 255
        return picture

    def _observed(self) -> Any:
        found = {"agent": self.place.astype(numpy.float32), "goal": self.goal.astype(numpy.float32)}
        if self.kind == "nested":
            return found | {"pixels": {"top": self._picture(), "hand": self._picture()[::-1]}}
        return found | {"pixels": self._picture()} if self.kind == "pixels" else found


gymnasium.register("OurPoint-v0", entry_point="tests.rl.envs.gym_worlds:Point", max_episode_steps=12)
gymnasium.register("OurPointMade-v0", entry_point=lambda **more: Point(**more), max_episode_steps=12)
gymnasium.register("OurPointEndless-v0", entry_point="tests.rl.envs.gym_worlds:Point")
gymnasium.register("OurPointVector-v0", vector_entry_point="tests.rl.envs.gym_worlds:Point", max_episode_steps=12)
