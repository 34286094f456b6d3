# SPDX-License-Identifier: Apache-2.0
"""The toy world as an environment: its simulator, with indexed calls and episodes of their own."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.rl.envs.first_frames import NUM_TRIALS
from cosmos_predict2.rl.envs.scoring import Book, Chunk, Ids
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.interfaces import EnvDefaults, Info, Observation
from cosmos_predict2.toy_world.physics import (
    CLOSED,
    GOAL,
    GRIPPER,
    OBJECTS,
    STATE_SIZE,
    Floats,
    action_layout,
    advance,
    by_task,
    distance,
    episode_generator,
    object_position,
    random_spot,
    reward,
    success,
)
from cosmos_predict2.toy_world.rendering import render, render_wrist
from imaginaire.errors import ConfigError, near, raised_as

CHUNK = 12
REWARD_ON = ("last", "each")
RING_SEED = 1  # of the ring's places in frames; starts have other generators


class ToyEnv(EnvDefaults):
    """``num_envs`` tables, each with an episode of its own; see `VecEnv`.

    The dense reward of `toy_world.physics` is paid for the last step of an episode, or with ``reward_on`` "each" for
    every step. info also has ``distance`` (pixels that are left) and ``states`` [E, 10]. With ``keep_frames`` it has
    ``frames`` [E, A, H, W, 3], the pictures after each action, and ``moved`` [E, A], the actions that moved an object.
    A world model learns from these frames: in the share ``ring_elsewhere`` of the episodes they show the ring at
    another place than the policy saw, since physics knows no ring.
    """

    def __init__(
        self,
        num_envs: int,
        setting: str = "default",
        tasks: Sequence[str] = ("push_puck",),
        action_dim: int = 4,
        size: int | None = None,
        terminate_on_success: bool = False,
        split: str = "train",
        seed: int = 0,
        num_steps: int | None = None,
        reward_on: str = "last",
        sparse: bool = False,
        keep_frames: bool = False,
        ring_elsewhere: float = 0.0,
    ) -> None:
        if reward_on not in REWARD_ON:
            raise ConfigError(f"reward_on is '{reward_on}'.{near(reward_on, REWARD_ON)}")
        self.tables = ToyStarts(setting, tasks, size, split, seed)
        self.setting, self.size = self.tables.setting, self.tables.side
        max_steps = self.setting.num_steps if num_steps is None else num_steps
        numbers = dict(num_tasks=self.tables.num_tasks, num_trials=NUM_TRIALS, max_steps=max_steps, seed=seed)
        self._book = Book(num_envs, **numbers)
        with raised_as(ConfigError, f"action_dim={action_dim}", ValueError):
            action_layout(action_dim)
        self.num_envs, self.action_dim = num_envs, action_dim
        sizes = dict(action_dim=action_dim, chunk=min(CHUNK, max_steps), max_steps=max_steps)
        self.metadata: Mapping[str, Any] = dict(suite="toy", **sizes, num_tasks=self._book.num_tasks)
        self.terminate_on_success, self.reward_on, self.keep_frames = terminate_on_success, reward_on, keep_frames
        self.ring_elsewhere, self.sparse = ring_elsewhere, sparse
        self._states = numpy.zeros((num_envs, STATE_SIZE))
        self._starts = self._states.copy()

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Observation, Info]:
        """Begin episodes; see `VecEnv.reset`. Nothing is drawn inside an episode, so ``seeds`` have no effect."""
        ids = self._book.begin(seed, options)
        self._starts[ids] = self.tables.states(self._book.task_ids[ids].tolist(), self._book.trial_ids[ids].tolist())
        self._states[ids] = self._starts[ids]
        return self._observation(ids), self._info(ids)

    def chunk_step(
        self, actions_E_A_D: Tensor, env_ids: Sequence[int] | None = None, execute: int | None = None
    ) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        book, ids = self._book, self._book.ids(env_ids)
        checked, count = book.check_actions(actions_E_A_D, ids, self.action_dim, execute)
        actions, chunk = checked.numpy(), Chunk.empty(len(ids), checked.shape[1])
        path: list[Floats] = [self._states[ids].copy()]
        for k in range(count):
            rows = numpy.flatnonzero(~book.is_over[ids])
            if rows.size:
                self._step(ids[rows], actions[rows, k], chunk, rows, k)
            path.append(self._states[ids].copy())
        info = self._info(ids, chunk)
        if self.keep_frames:
            path += path[-1:] * (checked.shape[1] - count)
            info["frames"], info["moved"] = self._film(ids, path[1:]), _moved(path)
        return self._observation(ids), chunk.reward_E_A, chunk.terminated_E_A, chunk.truncated_E_A, info

    def _step(self, ids: Ids, actions: Any, chunk: Chunk, rows: Ids, k: int) -> None:
        self._states[ids] = advance(self._states[ids], actions, self.setting, self.size)
        self._book.steps[ids] += 1
        left, is_done = self._judged(ids)
        ends = self._book.end(ids, is_done, self.terminate_on_success)
        is_paid = (ends[0] | ends[1]) | (self.reward_on == "each")
        value = is_done.astype(left.dtype) if self.sparse else reward(left, is_done)
        chunk.put(rows, k, value * is_paid, ends)

    def _judged(self, ids: Ids) -> tuple[Floats, Any]:
        """Pixels that are left, and whether the task is done."""
        states, groups = self._states[ids], by_task([self.tables.tasks[i] for i in self._book.task_ids[ids]])
        left = distance(states, self._starts[ids], groups)
        return left, success(states, left, groups, self.setting)

    def _film(self, ids: Ids, path: Sequence[Floats]) -> Tensor:
        """Pictures [E, F, H, W, 3] of successive states."""
        states = numpy.stack(path, axis=1)
        if self.ring_elsewhere:
            draws = numpy.stack([episode_generator(RING_SEED, int(seed)).random(3) for seed in self._book.seeds[ids]])
            is_elsewhere = draws[:, 0] < self.ring_elsewhere
            spots = random_spot(draws[is_elsewhere, 1:], self.size, self.setting.goal_margin)
            states[is_elsewhere, :, GOAL] = spots[:, None]
        films = [render(states, self.size, self.setting.cover), render_wrist(states, self.size)]
        return torch.from_numpy(numpy.concatenate(films[: len(self.views)], axis=2))

    def _observation(self, ids: Ids) -> Observation:
        states = self._states[ids]
        pictures = torch.from_numpy(render(states, self.size, self.setting.cover))
        wrist = torch.from_numpy(render_wrist(states, self.size))[:, None]
        return {
            "full_image": pictures,
            "wrist_image": wrist[:, : int(self.setting.cover is not None)],
            "state": torch.from_numpy(numpy.concatenate([states[:, GRIPPER], states[:, [CLOSED]]], axis=1)).float(),
            "task_description": self.tables.sentences(self._book.task_ids[ids].tolist()),
        }

    def _info(self, ids: Ids, chunk: Chunk | None = None) -> dict[str, Any]:
        return {
            **self._book.info(ids, chunk),
            "distance": torch.from_numpy(self._judged(ids)[0]),
            "states": torch.from_numpy(self._states[ids]),
            "goal": torch.from_numpy(self._states[ids, GOAL]),
        }

    @property
    def _about(self) -> dict[str, Any]:
        return {"kind": "toy", "num_envs": self.num_envs, **self.tables.about, **self.metadata}

    def get_state(self) -> bytes:
        return self._book.to_bytes(self._about, {"states": self._states, "starts": self._starts})

    def load_state(self, state: bytes) -> None:
        arrays = self._book.from_bytes(state, self._about)
        self._states[:], self._starts[:] = arrays["states"], arrays["starts"]

    def close(self) -> None:
        """Nothing is held."""


def _moved(path: Sequence[Floats]) -> Tensor:
    """True for states that differ from the one before in the place of an object, bool [E, A]."""
    states = numpy.stack(path, axis=1)
    places = numpy.concatenate([states[..., object_position(k)] for k in range(len(OBJECTS))], axis=-1)
    return torch.from_numpy((numpy.diff(places, axis=1) != 0).any(axis=-1))
