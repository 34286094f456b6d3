# SPDX-License-Identifier: Apache-2.0
"""RMS norm, with a gradient of its own on CPUs, where PyTorch has no kernel and makes twice as many passes."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 or better, cast to the dtype of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:  # under autocast, or where a network keeps its embedding of time wide
            dtype = torch.promote_types(x.dtype, self.weight.dtype)
            return F.rms_norm(x.to(dtype), (x.shape[-1],), self.weight.to(dtype), EPS).to(x.dtype)
        if x.dtype.itemsize < 4 or not x.is_cpu or torch.compiler.is_compiling():
            return F.rms_norm(x, (x.shape[-1],), self.weight, EPS)
        return cast(Tensor, _RMSNorm.apply(x, self.weight))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = _scale(x)
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,), (x, weight, scale) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            scale = _scale(x)
        width = x.shape[-1]
        along = (grad * x).reshape(-1, width)  # its sums over rows and over columns are products with a vector
        grad_weight = along.t() @ scale.reshape(-1)
        pull = (along @ weight).view(scale.shape) * scale.pow(3) / width
        return torch.addcmul(grad * weight * scale, x, pull, value=-1), grad_weight


def _scale(x: Tensor) -> Tensor:
    """1 / sqrt(mean(x^2) + eps), with a last axis of one."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.rsqrt(norm.square() / x.shape[-1] + EPS)
