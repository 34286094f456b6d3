# SPDX-License-Identifier: Apache-2.0
"""Processes and their collectives: NCCL on GPUs, gloo on CPUs, and nothing at all in a single process.

Every function works without `init`: one process is a group of one. Only this module chooses the device.
"""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from imaginaire.distributed import places
from imaginaire.errors import ConfigError, UserError

Result = TypeVar("Result")

_DEFAULT_TIMEOUT_S = 1800.0
_timeout_s = _DEFAULT_TIMEOUT_S

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def init(timeout_s: float | None = None, store: Any = None) -> None:
    """Join the process group that torchrun announced in the environment; without torchrun there is none to join.

    ``store``: where to meet, in place of MASTER_ADDR and MASTER_PORT.
    """
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
    global _timeout_s
    _timeout_s = timeout_s if timeout_s is not None else _environment_timeout_s()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        options: dict[str, Any] = {}
        if store is not None:
            options = dict(store=store, rank=rank(), world_size=int(os.environ["WORLD_SIZE"]))
        dist.init_process_group(backend, timeout=timedelta(seconds=_timeout_s), **options)
    except (dist.DistError, ValueError) as error:
        raise ConfigError(why_not_joined(error)) from error
    places.open_board()


def shutdown() -> None:
    """Leave the process group; groups made from it go with it."""
    _cpu_groups.clear()
    places.close_board()
    if dist.is_initialized():
        dist.destroy_process_group()


def timeout_s() -> float:
    """Seconds until a collective is given up."""
    return _timeout_s


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _environment_timeout_s() -> float:
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    text = os.environ.get(name, str(_DEFAULT_TIMEOUT_S))
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} is not a number of seconds, such as 1800.") from error


def why_not_joined(error: BaseException) -> str:
    """The reason that the process group was not formed, and what to change."""
    text = str(error).splitlines()[0]
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if "EADDRINUSE" in text:
        return (
            f"Port {port} of this machine is in use (MASTER_PORT, or torchrun's --master_port): most often another run "
            f"holds it. Take another, {free_port()} is free now, or let torchrun choose: --standalone."
        )
    where = f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE', '?')}"
    return (
        f"The process group cannot be formed ({where}, meeting at MASTER_ADDR={address} MASTER_PORT={port}): {text}. "
        "Start with torchrun, on all machines with the same address and port, or unset RANK for a single process. "
        "python -m scripts.doctor --dist under the same torchrun looks into it."
    )


def is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return dist.get_world_size() if is_initialized() else 1


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def is_rank0() -> bool:
    return rank() == 0


def device() -> torch.device:
    """The device of models and batches: this process's GPU, else the CPU."""
    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def barrier(name: str, timeout_s: float | None = None) -> None:
    """Wait for all ranks; when some do not come, the error reports where each rank is.

    ``timeout_s``: how long to wait, up to the time limit of all collectives, which is the default.
    """
    if not is_initialized():
        return
    place = f"barrier '{name}'"
    with places.at(place):
        try:
            work = dist.all_reduce(torch.zeros(1), async_op=True)  # a CPU tensor: gloo answers it on every backend
            assert work is not None
            _ = work.wait() if timeout_s is None else work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            where = places.report(reached=place)
            limit = _timeout_s if timeout_s is None else timeout_s
            raise RuntimeError(
                f"rank {rank()} waited in vain at the {place} (limit: {limit:g} s): {error}" + (where and f"\n{where}")
            ) from error


def broadcast_object(value: Any) -> Any:
    """The value of rank 0, on every rank."""
    if not is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def from_rank0(work: Callable[[], Result]) -> Result:
    """The result of rank 0's ``work``, on every rank; an error of ours that it raises is raised on all of them."""
    found: Any = None
    if is_rank0():
        try:
            found = work()
        except UserError as error:
            found = error
    found = broadcast_object(found)
    if isinstance(found, UserError):
        raise found
    result: Result = found
    return result


def agreed(work: Callable[[], Result], kind: type[UserError], what: str = "") -> Result:
    """The result of this rank's ``work`` where it succeeds on all ranks. Else its own error, or one of ``kind`` with
    that of another rank, begun by ``what``: none waits for another."""
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    text = str(failure) if isinstance(failure, UserError) else f"{type(failure).__name__}: {failure}"
    texts = all_gather_object(None if failure is None else text)
    if failure is not None:
        raise failure
    if failed := [f"rank {of_rank}: {text}" for of_rank, text in enumerate(texts) if text is not None]:
        raise kind(what + failed[0])
    return result


def all_gather_object(value: Any) -> list[Any]:
    """Every rank's value, in rank order."""
    if not is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=cpu_group())
    return values


def all_reduce_(tensor: Tensor, op: str = "sum", group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce in place over all ranks (or a group); ``op`` is sum, max or min."""
    if not is_initialized():
        return tensor
    dist.all_reduce(tensor, op=_OPERATIONS[op], group=group)
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
