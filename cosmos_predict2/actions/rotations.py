# SPDX-License-Identifier: Apache-2.0
"""Rotations as roll, pitch and yaw, as matrices, as quaternions, as two axes (rot6d) and as turns about an axis; NumPy
float64, batched."""

import numpy
from numpy.typing import ArrayLike, NDArray

from imaginaire.errors import ConfigError, DataError, near

Floats = NDArray[numpy.float64]

# Both are called rot6d in public code: openvla, DROID and GR00T take the first two rows of a matrix, cosmos-framework
# its first two columns, which are the rows of the inverse rotation.
ROT6D = ("rows", "columns")

_SINGULAR = 1e-6  # cos(pitch) below which roll and yaw are one angle
_ORTHONORMAL = 1e-6  # largest element of R Rt - 1 that is rounding


def euler_to_matrix(euler: ArrayLike) -> Floats:
    """R = Rz(yaw) Ry(pitch) Rx(roll), [..., 3, 3], of [..., (roll, pitch, yaw)]."""
    angles = numpy.asarray(euler, dtype=numpy.float64)
    (sr, sp, sy), (cr, cp, cy) = numpy.moveaxis(numpy.sin(angles), -1, 0), numpy.moveaxis(numpy.cos(angles), -1, 0)
    rows = [
        [cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr],
        [sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr],
        [-sp, cp * sr, cp * cr],
    ]
    return numpy.stack([numpy.stack(row, axis=-1) for row in rows], axis=-2)


def matrix_to_euler(matrix: ArrayLike) -> Floats:
    """Roll, pitch and yaw, each in (-pi, pi]; where the pitch is +-pi/2, the yaw is 0."""
    rotation = _rotation(matrix)
    cos_pitch = numpy.hypot(rotation[..., 0, 0], rotation[..., 1, 0])
    is_regular = cos_pitch >= _SINGULAR
    roll = numpy.where(
        is_regular,
        numpy.arctan2(rotation[..., 2, 1], rotation[..., 2, 2]),
        numpy.arctan2(-rotation[..., 1, 2], rotation[..., 1, 1]),
    )
    pitch = numpy.arctan2(-rotation[..., 2, 0], cos_pitch)
    yaw = numpy.where(is_regular, numpy.arctan2(rotation[..., 1, 0], rotation[..., 0, 0]), 0.0)
    return wrap(numpy.stack([roll, pitch, yaw], axis=-1))


def matrix_to_quaternion(matrix: ArrayLike) -> Floats:
    """(w, x, y, z) of [..., 3, 3]; of the two quaternions of a rotation, the one that the largest element gives."""
    rotation = _rotation(matrix)
    flat = rotation.reshape(-1, 3, 3)
    return numpy.stack([_quaternion(r) for r in flat]).reshape(*rotation.shape[:-2], 4)


def quaternion_to_matrix(quaternion: ArrayLike) -> Floats:
    """The rotation [..., 3, 3] of (w, x, y, z), which is normalised first."""
    q = numpy.asarray(quaternion, dtype=numpy.float64)
    length = numpy.linalg.norm(q, axis=-1, keepdims=True)
    if (length < 1e-12).any():
        raise DataError("A quaternion has length 0; it turns nothing.")
    w, x, y, z = numpy.moveaxis(q / length, -1, 0)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return numpy.stack([numpy.stack(row, axis=-1) for row in rows], axis=-2)


def matrix_to_rot6d(matrix: ArrayLike, of: str) -> Floats:
    """The first two rows of [..., 3, 3], one behind the other, or its first two columns: [..., 6]."""
    check_rot6d(of)
    rotation = _rotation(matrix)
    axes = rotation if of == "rows" else numpy.swapaxes(rotation, -1, -2)
    return axes[..., :2, :].reshape(*rotation.shape[:-2], 6)


def rot6d_to_matrix(rot6d: ArrayLike, of: str) -> Floats:
    """The rotation [..., 3, 3] whose first rows or columns are nearest to these [..., 6]: the first keeps its direction
    (Gram-Schmidt)."""
    check_rot6d(of)
    numbers = numpy.asarray(rot6d, dtype=numpy.float64)
    first = _unit(numbers[..., :3])
    second = _unit(numbers[..., 3:] - (first * numbers[..., 3:]).sum(axis=-1, keepdims=True) * first)
    return numpy.stack([first, second, numpy.cross(first, second)], axis=-2 if of == "rows" else -1)


def check_rot6d(of: str) -> None:
    if of not in ROT6D:
        raise ConfigError(
            f"rot6d is {of!r}: the first two of a matrix's rows or columns are meant.{near(str(of), ROT6D)}"
        )


def _unit(vector: Floats) -> Floats:
    length = numpy.linalg.norm(vector, axis=-1, keepdims=True)
    if not (length > 1e-9).all():
        raise DataError("A rot6d has an axis of length 0, or two that are parallel: it is no rotation.")
    return vector / length


def axis_angle_to_matrix(vector: ArrayLike) -> Floats:
    """The rotation [..., 3, 3] about a vector [..., 3] by its length in radians."""
    turn = numpy.asarray(vector, dtype=numpy.float64)
    half = numpy.linalg.norm(turn, axis=-1, keepdims=True) / 2
    # sin(a / 2) / a, which tends to 1 / 2: sinc has no hole at 0
    return quaternion_to_matrix(numpy.concatenate([numpy.cos(half), turn * numpy.sinc(half / numpy.pi) / 2], axis=-1))


def wrap(angles: ArrayLike) -> Floats:
    """The same angles in (-pi, pi]."""
    turned = numpy.asarray(angles, dtype=numpy.float64)
    outside = (turned <= -numpy.pi) | (turned > numpy.pi)
    return numpy.where(outside, numpy.pi - numpy.mod(numpy.pi - turned, 2 * numpy.pi), turned)


def _rotation(matrix: ArrayLike) -> Floats:
    """The matrix, after checking that it is a rotation."""
    rotation = numpy.asarray(matrix, dtype=numpy.float64)
    if rotation.shape[-2:] != (3, 3):
        raise DataError(f"A rotation is a 3x3 matrix; this one has the shape {list(rotation.shape)}.")
    error = numpy.abs(rotation @ numpy.swapaxes(rotation, -1, -2) - numpy.eye(3)).max(initial=0.0)
    if not error <= _ORTHONORMAL or (numpy.linalg.det(rotation) < 0).any():
        raise DataError(
            f"A matrix is no rotation: R Rt differs from 1 by {error:.2g} (most allowed: {_ORTHONORMAL:g}), or it"
            " mirrors. Look for poses that are not finite, or angles that are not radians."
        )
    return rotation


def _quaternion(r: Floats) -> Floats:
    trace = float(numpy.trace(r))
    if trace > 0:
        w = numpy.sqrt(1 + trace) / 2
        return numpy.array([w, *(numpy.array([r[2, 1] - r[1, 2], r[0, 2] - r[2, 0], r[1, 0] - r[0, 1]]) / (4 * w))])
    i = int(numpy.argmax(numpy.diagonal(r)))
    j, k = (i + 1) % 3, (i + 2) % 3
    largest = numpy.sqrt(1 + r[i, i] - r[j, j] - r[k, k]) / 2
    q = numpy.empty(4)
    q[0] = (r[k, j] - r[j, k]) / (4 * largest)
    q[1 + i] = largest
    q[1 + j] = (r[j, i] + r[i, j]) / (4 * largest)
    q[1 + k] = (r[k, i] + r[i, k]) / (4 * largest)
    return q
