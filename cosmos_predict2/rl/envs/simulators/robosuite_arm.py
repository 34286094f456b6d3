# SPDX-License-Identifier: Apache-2.0
"""A robot arm in robosuite as policies see it: two cameras, and the hand's pose."""

from collections.abc import Mapping
from typing import Any

import numpy
from numpy.typing import NDArray

from cosmos_predict2.rl.envs.simulators import Floats

CAMERAS = ("agentview", "robot0_eye_in_hand")


def state_of(raw: Mapping[str, Any]) -> Floats:
    """Position of the hand (3), its rotation as axis times angle (3), and both fingers (2)."""
    parts = [raw["robot0_eef_pos"], axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"]]
    return numpy.concatenate(parts).astype(numpy.float32)


def axis_angle(quaternion: NDArray[Any]) -> NDArray[numpy.float64]:
    """The rotation of (x, y, z, w). The sign is not made unique: published statistics have both."""
    xyz, w = numpy.asarray(quaternion[:3], dtype=numpy.float64), float(numpy.clip(quaternion[3], -1.0, 1.0))
    sine = numpy.sqrt(1.0 - w * w)
    return numpy.zeros(3) if sine == 0 else xyz * (2.0 * numpy.arccos(w) / sine)
