# SPDX-License-Identifier: Apache-2.0
"""Bytes that a forward pass leaves behind for its backward pass, added up over the memory that there is."""

import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def kept_bytes(forward: Callable[[], Any], known: Iterable[Tensor]) -> int:
    """Bytes that autograd saves, that checkpoints hold, and of the result, without those of weights and inputs."""
    forward()  # what a first call leaves for good
    before = _storages(list(known))
    saved: list[Tensor] = []
    gc.freeze()  # get_objects leaves out what there is now, which is much
    try:
        with torch.autograd.graph.saved_tensors_hooks(functools.partial(_noted, saved), lambda x: x):
            output = forward()
        after = _storages([*gc.get_objects(), *saved])
        del output
    finally:
        gc.unfreeze()
    return sum(size for place, size in after.items() if place not in before)


def _noted(saved: list[Tensor], tensor: Tensor) -> Tensor:
    saved.append(tensor)
    return tensor


def _storages(objects: list[Any]) -> dict[int, int]:
    """Bytes by address."""
    tensors = (value for value in objects if issubclass(type(value), Tensor) and not value.is_meta)
    return {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
