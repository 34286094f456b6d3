# SPDX-License-Identifier: Apache-2.0
"""Tensors that are split over the processes of a context-parallel group: cut, put together, and exchanged.

All three are differentiable. What is differentiated is the sum of what the ranks compute, so the gradient of a part is
the sum over all ranks that used it. A group of None is a group of one.

    q_part = split(q, 1, group)                   # this rank's tokens, all heads
    q_heads = exchange(q_part, 2, 1, group)       # all tokens, this rank's heads
    gather(q_part, 1, group)                      # all tokens, all heads, on every rank
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def split(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's contiguous part along ``dim``, a view."""
    if group is None:
        return x
    size = _part_size(x, dim, group.size())
    return x.narrow(dim, group.rank() * size, size)


def gather(x: Tensor, dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """The parts of all ranks along ``dim``, in rank order, on every rank."""
    if group is None:
        return x
    return cast(Tensor, _Gather.apply(x, dim % x.ndim, group))


def exchange(x: Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup | None) -> Tensor:
    """Cut along one dimension, whole along the other, by one all-to-all: each rank gets its part of ``scatter_dim``
    from every rank, put together along ``gather_dim``."""
    if group is None:
        return x
    scatter_dim, gather_dim = scatter_dim % x.ndim, gather_dim % x.ndim
    if scatter_dim == gather_dim:
        raise ValueError(f"exchange needs two dimensions, found {scatter_dim} twice.")
    _part_size(x, scatter_dim, group.size())
    return cast(Tensor, _Exchange.apply(x, scatter_dim, gather_dim, group))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.scatter_dim, ctx.gather_dim, ctx.group = scatter_dim, gather_dim, group
        return _exchanged(x, scatter_dim, gather_dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(grads[0], ctx.gather_dim, ctx.scatter_dim, ctx.group), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        x = x.contiguous()
        parts = x.new_empty(group.size(), *x.shape)
        dist.all_gather(list(parts.unbind(0)), x, group=group)
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # One all-to-all and a sum: the order of the sum is that of the ranks with every backend.
        return _all_to_all(grads[0], ctx.dim, ctx.group).sum(0), None, None


def _exchanged(x: Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup) -> Tensor:
    return _all_to_all(x, scatter_dim, group).movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1)


def _all_to_all(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: this rank's part along ``dim`` of what each rank has."""
    sent = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def _part_size(x: Tensor, dim: int, num_parts: int) -> int:
    if x.shape[dim] % num_parts:
        raise ValueError(f"Dimension {dim} of {tuple(x.shape)} is not a multiple of the {num_parts} processes.")
    return x.shape[dim] // num_parts
