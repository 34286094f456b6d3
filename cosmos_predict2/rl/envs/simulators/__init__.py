# SPDX-License-Identifier: Apache-2.0
"""Simulators: single environments that `WorkerEnv` runs in processes of their own. Importing this imports no torch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy
from numpy import float32, uint8
from numpy.typing import NDArray

Floats = NDArray[float32]
Pictures = NDArray[uint8]

ROBOSUITE_CAMERAS = ("agentview", "robot0_eye_in_hand")  # of LIBERO and of Lift


class TaskEnv(Protocol):
    """One environment of a simulator, with one episode at a time.

    An observation has ``full_image`` uint8 [H, W, 3] and ``wrist_image`` uint8 [V, H, W, 3], both upright, ``state``
    float32 [S] and ``task_description``. The same task, trial, seed and actions lead to the same. Pictures may be drawn
    when they are looked at, which is before the next step.
    """

    num_tasks: int
    num_trials: int  # starts of a task; where the class says it, a suite of the class plays no more of each
    max_steps: int
    action_dim: int
    metadata: Mapping[str, Any]  # suite, and chunk where policies decide on several actions at once

    def reset(self, task_id: int, trial_id: int, seed: int) -> Mapping[str, Any]: ...

    def step(self, action: Floats) -> tuple[Mapping[str, Any], float, bool]:
        """Observation, reward and success after one action in [-1, 1]."""

    def close(self) -> None: ...


class Seen(Mapping[str, Any]):
    """An observation whose pictures are drawn when they are looked at: nine tenths of a step's time go into drawing,
    and of a chunk of actions a policy sees the last picture alone."""

    def __init__(self, drawn: Mapping[str, Callable[[], Pictures]], rest: Mapping[str, Any]) -> None:
        self._drawn, self._rest = drawn, rest

    def __getitem__(self, name: str) -> Any:
        return self._drawn[name]() if name in self._drawn else self._rest[name]

    def __iter__(self) -> Iterator[str]:
        yield from (*self._drawn, *self._rest)

    def __len__(self) -> int:
        return len(self._drawn) + len(self._rest)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, NumPy's global numbers, from which some simulators draw, are those of the seed."""
    before: Any = numpy.random.get_state()
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        numpy.random.set_state(before)


def robosuite_state(raw: Mapping[str, Any]) -> Floats:
    """Position of the hand (3), its rotation as axis times angle (3), and both fingers (2)."""
    parts = [raw["robot0_eef_pos"], axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"]]
    return numpy.concatenate(parts).astype(numpy.float32)


def axis_angle(quaternion: NDArray[Any]) -> NDArray[numpy.float64]:
    """The rotation of (x, y, z, w). The sign is not made unique: published statistics have both."""
    xyz, w = numpy.asarray(quaternion[:3], dtype=numpy.float64), float(numpy.clip(quaternion[3], -1.0, 1.0))
    sine = numpy.sqrt(1.0 - w * w)
    return numpy.zeros(3) if sine == 0 else xyz * (2.0 * numpy.arccos(w) / sine)
