# SPDX-License-Identifier: Apache-2.0
"""Processes and their collectives: NCCL on GPUs, gloo on CPUs, and nothing at all in a single process.

Every function works without `init`: one process is a group of one. This module is the only one that knows the device.
"""

import logging
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def init(timeout_s: float | None = None) -> None:
    """Join the process group that torchrun announced in the environment; without torchrun there is none to join."""
    if dist.is_initialized() or "RANK" not in os.environ:
        return
    if torch.cuda.is_available():
        if local_rank() >= torch.cuda.device_count():
            raise ConfigError(
                f"--nproc_per_node asks for GPU {local_rank()}, but this machine shows {torch.cuda.device_count()}. "
                "Start at most one process per GPU (CUDA_VISIBLE_DEVICES limits what is seen)."
            )
        torch.cuda.set_device(local_rank())
        torch.backends.cuda.matmul.allow_tf32 = True
    seconds = timeout_s if timeout_s is not None else float(os.environ.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "1800"))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds))


def shutdown() -> None:
    """Leave the process group; groups made from it go with it."""
    _cpu_groups.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if is_initialized() else 1


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_rank0() -> bool:
    return rank() == 0


def device() -> torch.device:
    """Where models and batches live: this process's GPU, else the CPU."""
    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def barrier(name: str) -> None:
    """Wait for all ranks; a rank that does not come makes an error that says which barrier was waited at."""
    if not is_initialized():
        return
    try:
        dist.all_reduce(torch.zeros(1))  # a CPU tensor: gloo answers it on every backend
    except RuntimeError as error:
        raise RuntimeError(f"rank {rank()} waited in vain at the barrier '{name}': {error}") from error


def broadcast_object(value: Any, src: int = 0) -> Any:
    """The value of rank ``src``, on every rank."""
    if not is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=src, device=torch.device("cpu"))
    return box[0]


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's value, in rank order."""
    if not is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=cpu_group())
    return values


def all_reduce_(tensor: Tensor, op: str = "sum", group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce in place over all ranks (or a group); ``op`` is sum, mean, max or min."""
    if not is_initialized():
        return tensor
    dist.all_reduce(tensor, op=_OPERATIONS["sum" if op == "mean" else op], group=group)
    if op == "mean":
        tensor /= dist.get_world_size(group)
    return tensor


_cpu_groups: dict[str, dist.ProcessGroup] = {}


def cpu_group(name: str = "objects") -> dist.ProcessGroup | None:
    """A gloo group of all ranks of its own for ``name`` (all ranks must ask for it at the same point)."""
    if not is_initialized():
        return None
    key = f"{id(dist.group.WORLD)}/{name}"
    if key not in _cpu_groups:
        _cpu_groups[key] = dist.new_group(backend="gloo")
    return _cpu_groups[key]


def broadcast_tensors_(tensors: Sequence[Tensor], src: int = 0) -> None:
    """Give every rank the tensors of rank ``src``, in place, packed by dtype and device."""
    if not is_initialized() or not tensors:
        return
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for same in by_kind.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in same])
        dist.broadcast(flat, src)
        for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(part.view_as(tensor))
