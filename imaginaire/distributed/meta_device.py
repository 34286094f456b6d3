# SPDX-License-Identifier: Apache-2.0
"""Modules that are built without memory (device "meta") and get it once they are sharded."""

import torch
from torch import Tensor, nn

from imaginaire.errors import TrainingError, listed


def has_meta(module: nn.Module) -> bool:
    """True if any parameter or buffer has no memory yet."""
    return any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()])


def move_to(module: nn.Module, device: torch.device, memory_format: torch.memory_format) -> None:
    """Move whatever has memory, in place; what has none stays as it is."""
    if not has_meta(module):
        module.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]
        return

    def moved(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        has_format = tensor.dim() in (4, 5) and memory_format != torch.preserve_format
        return tensor.to(device, memory_format=memory_format) if has_format else tensor.to(device)

    module._apply(moved)


def require_memory(module: nn.Module) -> None:
    """Raise where a parameter or buffer has no memory, and so was never initialised or loaded."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    if not (lacking := [name for name, tensor in tensors if tensor.is_meta]):
        return

    raise TrainingError(
        f"{len(lacking)} of the {len(tensors)} parameters and buffers of {type(module).__name__} have no memory (device"
        f" meta) after parallelize(), so nothing initialised or loaded them: {listed(lacking)}. What"
        " is built on the meta device gets memory there: to_empty(device=...), then weights or a start of its own."
    )
