# SPDX-License-Identifier: Apache-2.0
"""Linear maps and RMS norms, with products and gradients of their own on CPUs where PyTorch's are slow.

PyTorch gives float32 matrix products to MKL, which leaves AVX-512 unused on processors of other makers than Intel;
oneDNN uses it, and takes half the time there. On Intel's, MKL is the faster one. The processor decides, not a
measurement, so that every process of a run and every resumed one rounds alike. Everywhere else, and for half precision,
a product is ``torch.nn.functional.linear``.
"""

import platform
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = 1e-6
SMALL = 1 << 20  # multiply-adds below which the call costs more than it saves


class Linear(nn.Linear):
    """nn.Linear by ``product``, unless it has a bias.

    One that ``widens`` computes in the precision of its input where that is higher than its own; otherwise a wider
    input is an error.
    """

    widens = False

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.has_bias = bias

    def forward(self, input: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if self.widens and input.dtype.itemsize > weight.dtype.itemsize:
            weight = weight.to(input.dtype)
            bias = None if bias is None else bias.to(input.dtype)
        return F.linear(input, weight, bias) if self.has_bias else product(input, weight)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, for x (..., K) and weight (N, K)."""
    if x.numel() * weight.shape[0] < SMALL or not is_for_onednn(x, weight):
        return F.linear(x, weight)
    out = cast(Tensor, _Product.apply(_dense(x.reshape(-1, x.shape[-1])), _dense(weight)))
    return out.view(*x.shape[:-1], weight.shape[0])


def is_for_onednn(*tensors: Tensor) -> bool:
    """True if products of these run through oneDNN here, when they are large enough."""
    return _USES_ONEDNN and are_plain_float32(*tensors)


def are_plain_float32(*tensors: Tensor) -> bool:
    """True for float32 tensors of a CPU that PyTorch's own kernels work on, one call after the other."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False  # the compiler has kernels of its own
    return all(x.is_cpu and x.dtype == torch.float32 and type(x) in (Tensor, nn.Parameter) for x in tensors)


def _dense(matrix: Tensor) -> Tensor:
    """The matrix without gaps in memory, transposed or not: with gaps oneDNN is a thousand times slower."""
    return matrix if matrix.is_contiguous() or matrix.t().is_contiguous() else matrix.contiguous()


class _Product(torch.autograd.Function):
    """x (M, K) and weight (N, K) to (M, N); both without gaps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad  # a frozen weight needs no input, and keeps none
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return _onednn(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        grad, (x, weight) = _dense(grads[0]), ctx.saved_tensors
        multiply = product if torch.is_grad_enabled() else _onednn  # enabled: for a second derivative
        grad_x = multiply(grad, weight.t()) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        if grad.shape[1] <= x.shape[1]:  # the first operand is copied, so it is the smaller one
            return grad_x, multiply(grad.t(), x.t())
        return grad_x, multiply(x.t(), grad.t()).t()


def _onednn(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = _linear_pointwise(x, weight, None, "none", [], "")
    return out


def uses_onednn(processor: str, capability: str) -> bool:
    """True if oneDNN has the faster float32 products on a processor of this maker with these vector units."""
    has_linear = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_linear and "AVX512" in capability and "Intel" not in processor


def processor_name() -> str:
    """Maker, model and generation as the system reports them: "AuthenticAMD AMD EPYC (family 25, model 17)"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    names = [fields[key] for key in ("vendor_id", "model name") if key in fields]
    if "cpu family" in fields and "model" in fields:  # the name alone is often that of several generations
        names.append(f"(family {fields['cpu family']}, model {fields['model']})")
    return " ".join(names) or platform.machine()


_USES_ONEDNN = uses_onednn(processor_name(), torch.backends.cpu.get_cpu_capability())
_linear_pointwise: Any = torch.ops.mkldnn._linear_pointwise.default if _USES_ONEDNN else None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32 or better, cast to the dtype of x.

    On CPUs it has a gradient of its own: PyTorch has no kernel there and makes twice as many passes.
    """

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
