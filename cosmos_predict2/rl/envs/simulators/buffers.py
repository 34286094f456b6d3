# SPDX-License-Identifier: Apache-2.0
"""Observations in memory that the workers of an environment share with it: written there, read here, never sent."""

from collections.abc import Mapping, Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy
from numpy.typing import NDArray

from imaginaire.errors import DataError

DTYPES = {"full_image": numpy.uint8, "wrist_image": numpy.uint8, "state": numpy.float32}
_DIMENSIONS = {"full_image": 3, "wrist_image": 4, "state": 1}

Shapes = dict[str, tuple[int, ...]]


def arrays_of(observed: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The arrays of an observation of one environment, checked."""
    arrays = {}
    for name, dtype in DTYPES.items():
        value = numpy.asarray(observed[name])
        is_picture = dtype is numpy.uint8
        if value.ndim != _DIMENSIONS[name] or (is_picture and (value.dtype != dtype or value.shape[-1] != 3)):
            raise DataError(
                f"An observation's {name} is {value.dtype} {list(value.shape)}: {numpy.dtype(dtype)} with"
                f" {_DIMENSIONS[name]} dimensions is expected{', the last of them RGB' if is_picture else ''}."
            )
        arrays[name] = value.astype(dtype, copy=False)
    return arrays


class Buffers:
    """One row of each array for each environment. Without ``name`` the memory is new, and `remove` frees it."""

    def __init__(self, num_envs: int, shapes: Shapes, name: str | None = None) -> None:
        sizes = {key: num_envs * int(numpy.prod(shape)) * DTYPES[key]().itemsize for key, shape in shapes.items()}
        offsets = numpy.cumsum([0, *(-(-size // 64) * 64 for size in sizes.values())]).tolist()
        self.memory = SharedMemory(name, create=name is None, size=max(offsets[-1], 1))
        self.about = (num_envs, shapes, self.memory.name)
        self._shapes = shapes
        self._arrays = {
            key: numpy.ndarray((num_envs, *shape), DTYPES[key], self.memory.buf, offset)
            for (key, shape), offset in zip(shapes.items(), offsets)
        }

    def write(self, env: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        for key, value in arrays.items():
            if value.shape != self._shapes[key]:
                raise DataError(
                    f"An observation's {key} has shape {list(value.shape)}, others had {list(self._shapes[key])}: all"
                    " of an environment are alike."
                )
            self._arrays[key][env] = value

    def read(self, env_ids: Sequence[int]) -> dict[str, NDArray[Any]]:
        return {key: array[env_ids] for key, array in self._arrays.items()}

    def detach(self) -> None:
        self._arrays = {}  # which hold on to the memory
        self.memory.close()

    def remove(self) -> None:
        self.detach()
        self.memory.unlink()
