# SPDX-License-Identifier: Apache-2.0
"""What policies are told of a robot arm in robosuite."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
from numpy.typing import NDArray

from cosmos_predict2.rl.envs.simulators import Floats, Pictures

CAMERAS = ("agentview", "robot0_eye_in_hand")
STATE_DIM = 8


class Seen(Mapping[str, Any]):
    """An observation whose pictures are drawn when they are looked at: nine tenths of a step's time go into drawing,
    and of a chunk of actions a policy sees the last picture alone."""

    def __init__(self, drawn: Callable[[str], Pictures], rest: Mapping[str, Any]) -> None:
        self._drawn, self._rest = drawn, rest

    def __getitem__(self, name: str) -> Any:
        if name == "full_image":
            return self._drawn(CAMERAS[0])
        return self._drawn(CAMERAS[1])[None] if name == "wrist_image" else self._rest[name]

    def __iter__(self) -> Iterator[str]:
        yield from ("full_image", "wrist_image", *self._rest)

    def __len__(self) -> int:
        return 2 + len(self._rest)


def state_of(raw: Mapping[str, Any]) -> Floats:
    """Position of the hand (3), its rotation as axis times angle (3), and both fingers (2)."""
    parts = [raw["robot0_eef_pos"], axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"]]
    return numpy.concatenate(parts).astype(numpy.float32)


def axis_angle(quaternion: NDArray[Any]) -> NDArray[numpy.float64]:
    """Of (x, y, z, w). The sign is not made unique: published statistics have both."""
    xyz, w = numpy.asarray(quaternion[:3], dtype=numpy.float64), float(numpy.clip(quaternion[3], -1.0, 1.0))
    sine = numpy.sqrt(1.0 - w * w)
    return numpy.zeros(3) if sine == 0 else xyz * (2.0 * numpy.arccos(w) / sine)
