# SPDX-License-Identifier: Apache-2.0
"""BEHAVIOR-1K: household tasks of a robot with two arms, in OmniGibson, in this process.

    env = BehaviorEnv(num_envs=4, tasks=["turning_on_radio"], height=256, width=256)

Scenes of OmniGibson move together. One that is to stay as it is, since a call does not name it, is saved before the
others move and set back before it moves again, so that episodes do not disturb each other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.rl.envs.first_frames import whole_pictures
from cosmos_predict2.rl.envs.scoring import Book, Chunk, Ids
from cosmos_predict2.rl.envs.simulators.omnigibson import BehaviorTask, OmniGibson, read_tasks, simulator
from cosmos_predict2.rl.interfaces import EnvDefaults, Info, Observation
from imaginaire.errors import ConfigError, DataError

ACTION_DIM = 23  # base 3, trunk 4, left arm 7, left gripper, right arm 7, right gripper
CONTROL_HZ = 30
HEAD, WRISTS = "zed_link:Camera:0", ("left_realsense_link:Camera:0", "right_realsense_link:Camera:0")
JOINTS = ("base_qvel", "trunk_qpos", "arm_left_qpos", "arm_right_qpos")
SETTLING_CHUNKS = 4  # by the steps of physics and pictures of a reset; scenes of another task take minutes
GRIPPERS = ("gripper_left_qpos", "gripper_right_qpos")  # two fingers each
_OBSERVED = ("full_image", "wrist_image", "state")


class BehaviorEnv(EnvDefaults):
    """``num_envs`` scenes, each with an episode of its own; see `VecEnv`.

    ``tasks`` are names of the challenge's tasks, all 50 by default, and trials its starts for evaluations, or
    ``instances`` of each task. An episode has twice the steps that humans took, at most ``max_steps``. It earns 1 where
    it succeeds; with ``shaped_reward`` for the share of the goal that a step fulfils or undoes. Pictures are
    ``height`` times ``width``, both or neither; by default as published, 720 of the head and 480 of the wrists. Each
    step is rendered ``renders`` times: with 1, as published, pictures are two or three steps old. What an environment
    draws does not matter here. Several of these in one process share the simulator: the episodes of one are over when
    another is reset.
    """

    def __init__(
        self,
        num_envs: int = 1,
        tasks: Sequence[str] | None = None,
        instances: Sequence[int] | None = None,
        height: int | None = None,
        width: int | None = None,
        max_steps: int | None = None,
        chunk: int = 10,
        shaped_reward: bool = False,
        terminate_on_success: bool = True,
        renders: int = 1,
        keep_frames: bool = False,
        task_table: str = "",
        seed: int = 0,
    ) -> None:
        if (height is None) != (width is None):
            raise ConfigError(f"height={height} and width={width}: give both, or neither.")
        numbers = dict(num_envs=num_envs, height=height, width=width, max_steps=max_steps, chunk=chunk, renders=renders)
        if wrong := {name: number for name, number in numbers.items() if number is not None and number < 1}:
            raise ConfigError(f"{wrong} must be at least 1.")
        self.num_envs, self.size = num_envs, None if height is None or width is None else (height, width)
        self.tasks, self.instances, self.task_table, self.seed = tasks, instances, task_table, seed
        self.max_steps, self.chunk, self.renders = max_steps, chunk, renders
        self.shaped_reward, self.terminate_on_success = shaped_reward, terminate_on_success
        self.keep_frames = keep_frames
        self._book: Book | None = None
        self._tasks: tuple[BehaviorTask, ...] = ()
        self._metadata: dict[str, Any] = {}
        self._seen: dict[int, dict[str, Tensor]] = {}  # the last observation of each environment
        self._held: dict[int, Tensor] = {}  # states of those that others have moved on from

    # --- the contract

    @property
    def metadata(self) -> Mapping[str, Any]:
        self._ready()
        return self._metadata

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[Observation, Info]:
        book, world = self._ready(), self._taken()
        ids = book.begin(seed, options)
        self._hold(world, book, ids)
        for i in ids:
            self._held.pop(int(i), None)
        self._begin(world, book, ids)
        for i in ids.tolist():
            self._seen[i] = self._observed(world, world.observe(i))
        return self._observation(ids), book.info(ids)

    def chunk_step(
        self, actions_E_A_D: Tensor, env_ids: Sequence[int] | None = None, execute: int | None = None
    ) -> tuple[Observation, Tensor, Tensor, Tensor, Info]:
        book = self._ready()
        ids = book.ids(env_ids)
        bounds = (self._metadata["action_low"], self._metadata["action_high"])
        actions, count = book.check_actions(actions_E_A_D, ids, ACTION_DIM, execute, bounds=bounds)
        chunk, film = Chunk.empty(len(ids), actions.shape[1]), []
        for k in range(actions.shape[1]):
            rows = numpy.flatnonzero(~book.is_over[ids])
            if rows.size and k < count:
                self._step(book, ids[rows], actions[rows, k], chunk, rows, k)
            if self.keep_frames:
                seen = {name: torch.stack([self._seen[i][name] for i in ids.tolist()]) for name in _OBSERVED[:2]}
                film.append(whole_pictures(seen, len(self.views)))
        info = book.info(ids, chunk)
        if film:
            info["frames"] = torch.stack(film, dim=1)
        return self._observation(ids), chunk.reward_E_A, chunk.terminated_E_A, chunk.truncated_E_A, info

    def get_state(self) -> bytes:
        book = self._ready()
        states = {i: self._held[i] if i in self._held else simulator().save(i) for i in self._active(book)}
        scenes = {f"scene.{i}": state.numpy() for i, state in states.items()}
        seen = {f"{name}.{i}": one[name].numpy() for i, one in self._seen.items() for name in _OBSERVED}
        return book.to_bytes(self._about, {**scenes, **seen})

    def load_state(self, state: bytes) -> None:
        book, world = self._ready(), self._taken()
        arrays = {name: torch.from_numpy(array) for name, array in book.from_bytes(state, self._about).items()}
        begun = [int(i) for i in numpy.flatnonzero(book.has_begun)]
        self._seen = {i: {name: arrays[f"{name}.{i}"] for name in _OBSERVED} for i in begun}
        active = self._active(book)
        self._begin(world, book, numpy.array(active, dtype=numpy.int64))
        self._held = {i: arrays[f"scene.{i}"] for i in active}

    def close(self) -> None:
        if self._book is not None and simulator().owner is self:
            simulator().stop()
        self._book = None

    # --- episodes

    def _ready(self) -> Book:
        """The book, once the tasks are known; this imports OmniGibson."""
        if self._book is None:
            world = simulator()
            self._tasks = read_tasks(world.data, self.tasks, self.task_table)
            longest = max(self._limit(task) for task in self._tasks)
            low, high = world.bounds
            self._metadata = dict(
                suite="b1k",
                control_hz=CONTROL_HZ,
                action_dim=ACTION_DIM,
                action_low=low,
                action_high=high,
                chunk=min(self.chunk, longest),
                max_steps=longest,
                num_tasks=len(self._tasks),
                reset_chunks=SETTLING_CHUNKS if len(self._tasks) == 1 else longest,
                tasks=[task.name for task in self._tasks],
            )
            trials = len(self.instances or ()) or max(len(task.instances) for task in self._tasks)
            numbers = dict(num_tasks=len(self._tasks), num_trials=trials, max_steps=longest)
            self._book = Book(self.num_envs, **numbers, seed=self.seed)
        return self._book

    def _limit(self, task: BehaviorTask) -> int:
        return min(task.max_steps, self.max_steps or task.max_steps)

    def _taken(self) -> OmniGibson:
        """The simulator, for episodes of this environment."""
        world = simulator()
        if world.owner is not self:
            if isinstance(world.owner, BehaviorEnv):
                world.owner._lose()
            world.owner = self
        return world

    def _lose(self) -> None:
        self._held, self._seen = {}, {}
        if self._book is not None:
            self._book.has_begun[:] = False

    def _begin(self, world: OmniGibson, book: Book, ids: Ids) -> None:
        """Set scenes to the starts that the book has."""
        if not len(ids):
            return
        tasks = [self._tasks[i] for i in book.task_ids]
        idle = self._tasks[book.task_ids[ids[0]]]  # of scenes without an episode
        world.load([task if book.has_begun[i] else idle for i, task in enumerate(tasks)])
        instances = {}
        for i in ids.tolist():
            known = self.instances or tasks[i].instances
            instances[i] = int(known[book.trial_ids[i] % len(known)])
            book.limits[i] = self._limit(tasks[i])
        world.begin(instances, self.size)

    def _step(self, book: Book, ids: Ids, actions: Tensor, chunk: Chunk, rows: Ids, k: int) -> None:
        world = simulator()
        self._hold(world, book, ids)
        if held := {i: self._held.pop(i) for i in ids.tolist() if i in self._held}:
            world.restore(held)
        results = world.step(dict(zip(ids.tolist(), actions)), self.renders)
        book.steps[ids] += 1
        for i, (raw, _, _) in results.items():
            self._seen[i] = self._observed(world, raw)
        success = numpy.array([is_done for _, _, is_done in results.values()])
        earned = [own if self.shaped_reward else float(is_done) for _, own, is_done in results.values()]
        chunk.put(rows, k, earned, book.end(ids, success, self.terminate_on_success))

    def _hold(self, world: OmniGibson, book: Book, ids: Ids) -> None:
        """Save the scenes of other episodes, before those of ``ids`` move."""
        for i in self._active(book):
            if i not in ids and i not in self._held:
                self._held[i] = world.save(i)

    def _active(self, book: Book) -> list[int]:
        """The environments with an episode that is not over, and that has an observation."""
        return [int(i) for i in numpy.flatnonzero(book.has_begun & ~book.is_over)]

    # --- observations

    def _observed(self, world: OmniGibson, raw: Mapping[str, Any]) -> dict[str, Tensor]:
        """The view of policies: RGB of the head, RGB of the left and the right wrist, 23 numbers."""
        sensors = {name: value for part in raw.values() if isinstance(part, Mapping) for name, value in part.items()}
        own, slices = _found(sensors, "proprio").to(torch.float32), world.slices
        if len(own) < (needed := max(slices[name].stop for name in (*JOINTS, *GRIPPERS))):
            raise DataError(f"The robot measures {len(own)} numbers, but {needed} are expected: is it an R1Pro?")
        fingers = [own[slices[name]].sum(dim=0, keepdim=True) for name in GRIPPERS]
        return {
            "full_image": _picture(sensors, HEAD),
            "wrist_image": torch.stack([_picture(sensors, name) for name in WRISTS]),
            "state": torch.cat([*(own[slices[name]] for name in JOINTS), *fingers]),
        }

    def _observation(self, ids: Ids) -> Observation:
        book = self._ready()
        rows = {name: torch.stack([self._seen[i][name] for i in ids.tolist()]) for name in _OBSERVED}
        return {**rows, "task_description": [self._tasks[book.task_ids[i]].language for i in ids]}

    @property
    def _about(self) -> dict[str, Any]:
        about = {"kind": "behavior", "num_envs": self.num_envs, "size": self.size, **self._metadata}
        return {**about, "instances": None if self.instances is None else list(self.instances)}


def _found(sensors: Mapping[str, Any], part: str) -> Tensor:
    for name, value in sensors.items():
        if part in name:
            return torch.as_tensor(value["rgb"] if isinstance(value, Mapping) else value).cpu()
    raise DataError(f"OmniGibson shows no {part}, but {', '.join(sensors)}.")


def _picture(sensors: Mapping[str, Any], camera: str) -> Tensor:
    """RGB of a camera, without its alpha."""
    return _found(sensors, camera)[..., :3].to(torch.uint8).contiguous()
