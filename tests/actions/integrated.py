# SPDX-License-Identifier: Apache-2.0
"""The way back from actions to poses."""

import numpy
from numpy.typing import ArrayLike

from cosmos_predict2.actions.rotations import euler_to_matrix, matrix_to_euler, quaternion_to_matrix, rot6d_to_matrix
from cosmos_predict2.actions.transforms import ACTION_SCALE, Accumulate, Floats, base_frames, relative_pose


def integrate(
    first: ArrayLike,
    actions: ArrayLike,
    *,
    accumulate: Accumulate = None,
    quaternion: bool = False,
    rot6d: str | None = None,
    scale: float = ACTION_SCALE,
    gripper_scale: float = 1.0,
) -> tuple[Floats, Floats]:
    """The N poses [N, 6] that scaled `pose_differences` came from, given the first, and the N - 1 grippers after it."""
    start = numpy.asarray(first, dtype=numpy.float64)[:6]
    transform = relative_pose(scale, gripper_scale, accumulate=accumulate, quaternion=quaternion, rot6d=rot6d)
    raw = transform.undo(actions)
    base = base_frames(len(raw) + 1, accumulate)
    turned = quaternion_to_matrix(raw[:, 3:7]) if quaternion else euler_to_matrix(raw[:, 3:6])
    if rot6d is not None:
        turned = rot6d_to_matrix(raw[:, 3:9], rot6d)
    positions, rotations = [start[:3]], [euler_to_matrix(start[3:])]
    for k in range(len(raw)):
        positions.append(positions[base[k]] + rotations[base[k]] @ raw[k, :3])
        rotations.append(rotations[base[k]] @ turned[k])
    poses = numpy.concatenate([numpy.stack(positions), matrix_to_euler(numpy.stack(rotations))], axis=1)
    return poses, raw[:, -1]
