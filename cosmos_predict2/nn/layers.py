# SPDX-License-Identifier: Apache-2.0
"""The layers below the blocks: linear maps and norms, how their parameters start, embeddings of latents, times, places.

Linear maps and RMS norms have products and gradients of their own on CPUs where PyTorch's are slow.
PyTorch gives float32 matrix products to MKL, which leaves AVX-512 unused on processors of other makers than Intel;
oneDNN uses it, and takes half the time there. On Intel's, MKL is the faster one. The processor decides, not a
measurement, so that every process of a run and every resumed one rounds alike. Everywhere else, and for half precision,
a product is ``torch.nn.functional.linear``.
"""

import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from einops.layers.torch import Rearrange
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


# Starts of the parameters that no file gives --------------------------------------------------------------------------


CUT = 3.0  # standard deviations beyond which nothing is drawn


@dataclass(frozen=True)
class Start:
    """A constant where ``std`` is 0, else numbers around zero: normal, cut at three standard deviations, or uniform."""

    value: float = 0.0
    std: float = 0.0
    is_uniform: bool = False

    @torch.no_grad()
    def draw_(self, tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The tensor, written anew."""
        if not self.std:
            return tensor.fill_(self.value)
        if self.is_uniform:
            return tensor.uniform_(-1, 1, generator=generator).mul_(self.std * 3**0.5)
        tensor.normal_(generator=generator)
        beyond = tensor.abs() > CUT  # one in 370: inverting the distribution for these alone is ten times faster
        again = tensor.new_empty(int(beyond.sum()))
        tensor[beyond] = nn.init.trunc_normal_(again, a=-CUT, b=CUT, generator=generator)
        return tensor.mul_(self.std)


@runtime_checkable
class HasStarts(Protocol):
    """A module with parameters of its own, whose starts it gives by their names in it."""

    def starts(self) -> dict[str, Start]: ...


@runtime_checkable
class HasBuffers(Protocol):
    """A module with buffers that are a function of its arguments, which it writes."""

    def reset_buffers(self) -> None: ...


def starts(net: nn.Module) -> dict[str, Start]:
    """The start of each parameter by its name: a matrix has the variance 1 / (numbers that it sums), the last matrix of
    a modulation is zero, and norms are one. Whatever lies inside a Linear's place counts as that Linear. What reads
    actions begins as torch's layers do, and with no effect. A module with other parameters is a `HasStarts`."""
    zeros = tuple(
        f"{name}.{len(module) - 1}."
        for name, module in net.named_modules()
        if isinstance(module, nn.Sequential) and "adaln_modulation" in name
    )
    found: dict[str, Start] = {}
    for prefix, module in net.named_modules():
        own: dict[str, Start] = module.starts() if isinstance(module, HasStarts) else {}
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if (last := name.rpartition(".")[2]) in own:
                found[name] = own[last]
            elif isinstance(module, RMSNorm):
                found[name] = Start(1.0)
            elif isinstance(module, nn.Linear) and name.startswith("action_embedder_"):
                is_first = ".fc1." in name
                found[name] = Start(std=(3 * module.in_features) ** -0.5, is_uniform=True) if is_first else Start()
            elif isinstance(module, nn.Linear):
                is_zero = name.startswith(zeros) or parameter.ndim == 1
                found[name] = Start() if is_zero else Start(std=module.in_features**-0.5)
            else:
                kind = type(module).__name__
                raise ValueError(
                    f"{name}: there is no rule for how a parameter of a {kind} begins. Give {kind} a method starts()"
                    f" that returns {{'{last}': Start(...)}} (cosmos_predict2.nn.layers)."
                )
    return found


# Embeddings of latents, times and places ------------------------------------------------------------------------------


RopePrecision = Literal["float32", "module", "float64"]
BASE_FPS = 24  # frame rate at which fps modulation leaves positions as they are
MAX_PERIOD = 10000.0


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums and angles of a tensor: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class PatchEmbed(nn.Module):
    """Latents cut into patches of (temporal, spatial, spatial), one token each; features run c, t, h, w, c slowest."""

    def __init__(self, in_channels: int, model_channels: int, patch_spatial: int, patch_temporal: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            Rearrange("b c (t r) (h m) (w n) -> b t h w (c r m n)", r=patch_temporal, m=patch_spatial, n=patch_spatial),
            Linear(in_channels * patch_spatial**2 * patch_temporal, model_channels, bias=False),
        )

    def forward(self, x_B_C_T_H_W: Tensor) -> Tensor:
        tokens_B_T_H_W_D: Tensor = self.proj(x_B_C_T_H_W)
        return tokens_B_T_H_W_D


class Timesteps(nn.Module):
    """Sinusoidal features of times in [0, 1]: [cos(t f_i), sin(t f_i)], f_i = 10000^(-2i / width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_frequencies = width // 2

    def forward(self, timesteps_B_T: Tensor) -> Tensor:
        """(B, T, width) in the dtype of the times; the angles are float32 or better."""
        dtype = at_least_float32(timesteps_B_T.dtype)
        exponent = -math.log(MAX_PERIOD) * torch.arange(self.num_frequencies, dtype=dtype, device=timesteps_B_T.device)
        angle = timesteps_B_T.to(dtype).unsqueeze(-1) * torch.exp(exponent / self.num_frequencies)
        return torch.cat([torch.cos(angle), torch.sin(angle)], dim=-1).to(timesteps_B_T.dtype)


class TimestepEmbedding(nn.Module):
    """Features of the time to what the blocks are modulated with.

    With AdaLN-LoRA: the features themselves and a second tensor (B, T, 3D) that all blocks share. Without: the MLP of
    the features and None. One that ``widens`` keeps features that are wider than its weights, and its Linears do too.
    """

    widens = False

    def __init__(self, width: int, use_adaln_lora: bool) -> None:
        super().__init__()
        self.use_adaln_lora = use_adaln_lora
        self.linear_1 = Linear(width, width, bias=not use_adaln_lora)
        self.activation = nn.SiLU()
        self.linear_2 = Linear(width, 3 * width if use_adaln_lora else width, bias=False)

    def forward(self, feature_B_T_D: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.widens:
            feature_B_T_D = feature_B_T_D.to(self.linear_1.weight.dtype)  # timestep_precision="float32" gives it wider
        hidden = self.linear_2(self.activation(self.linear_1(feature_B_T_D)))
        return (feature_B_T_D, hidden) if self.use_adaln_lora else (hidden, None)


class RotaryPositions(nn.Module):
    """Angles of the rotary embedding over time, height and width, with NTK extrapolation per axis.

    The three buffers exist because released files hold them; the angles are computed from the sizes. Precision
    "float32" keeps buffers and angles out of any cast below float32, and "float64" computes angles there. "module"
    rounds where a network that was cast as a whole rounds: released weights were trained so.
    """

    seq: Tensor
    dim_spatial_range: Tensor
    dim_temporal_range: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        max_size: tuple[int, int, int],
        ratios: tuple[float, float, float],
        enable_fps_modulation: bool = False,
        precision: RopePrecision = "float32",
    ) -> None:
        """``max_size`` and ``ratios`` are of (time, height, width); sizes count tokens, not latents."""
        super().__init__()
        for axis, ratio in zip("thw", ratios):
            if not 0 < ratio < math.inf:
                raise ValueError(f"rope_{axis}_extrapolation_ratio={ratio} must be a finite number above 0.")
        spatial = head_dim // 6 * 2
        self.dims = (head_dim - 2 * spatial, spatial, spatial)
        self.thetas = tuple(MAX_PERIOD * r ** (dim / (dim - 2)) for r, dim in zip(ratios, self.dims))
        self.max_size = max_size
        self.enable_fps_modulation = enable_fps_modulation
        self.precision = precision
        self.register_buffer("seq", torch.empty(max(max_size)))
        self.register_buffer("dim_spatial_range", torch.empty(self.dims[1] // 2))
        self.register_buffer("dim_temporal_range", torch.empty(self.dims[0] // 2))
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Write the buffers anew, as functions of the sizes."""
        if self.seq.is_meta:
            return
        self.seq.copy_(torch.arange(len(self.seq), dtype=torch.float32))
        self.dim_temporal_range.copy_(self._range(self.dims[0]))
        self.dim_spatial_range.copy_(self._range(self.dims[1]))

    @staticmethod
    def _range(dim: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
        return torch.arange(0, dim, 2, dtype=dtype, device=device) / dim

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self.precision != "module" and self.seq.dtype.itemsize < torch.float32.itemsize:
            for name in ("seq", "dim_spatial_range", "dim_temporal_range"):
                self._buffers[name] = torch.empty_like(getattr(self, name), dtype=torch.float32)
            self.reset_buffers()
        return self

    def axis_angles(self, size: tuple[int, int, int], fps_B: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Angles per axis, (T', dim_t / 2), (H', dim_h / 2) and (W', dim_w / 2), in float32 or better."""
        device = self.seq.device
        dtype = torch.float64 if self.precision == "float64" else at_least_float32(self.seq.dtype)
        low = self.seq.dtype if self.precision == "module" else dtype
        angles = []
        for axis, (length, dim, theta) in enumerate(zip(size, self.dims, self.thetas)):
            position = torch.arange(length, dtype=dtype, device=device).to(low)
            if axis == 0 and fps_B is not None and self.enable_fps_modulation:
                position = position / fps_B[:1].to(device) * BASE_FPS  # a float32 frame rate widens the product
            frequency = 1.0 / theta ** self._range(dim, dtype, device).to(low)
            angles.append((position[:, None] * frequency).to(dtype))
        return angles[0], angles[1], angles[2]

    def forward(self, size: tuple[int, int, int], fps_B: Tensor | None = None) -> Tensor:
        """Angles (T' * H' * W', head_dim / 2), time slowest: half of the angle vector, whose two halves are equal."""
        if self.enable_fps_modulation and size[0] > 1:
            _check_fps(fps_B)
        angles = self.axis_angles(size, fps_B)
        grids = (
            angles[0][:, None, None, :].expand(*size, -1),
            angles[1][None, :, None, :].expand(*size, -1),
            angles[2][None, None, :, :].expand(*size, -1),
        )
        return torch.cat(grids, dim=-1).flatten(0, 2)


def _check_fps(fps_B: Tensor | None) -> None:
    if fps_B is None:
        raise ValueError("fps_B is None, but rope_enable_fps_modulation needs the frame rate of each clip.")
    if fps_B.numel() > 1 and not bool((fps_B == fps_B[0]).all()):
        raise ValueError(
            f"fps_B has different frame rates, from {fps_B.min():g} to {fps_B.max():g}, and rope_enable_fps_modulation "
            "takes one for the whole batch: group clips by frame rate, or use batch size 1."
        )


def rotate(x_B_L_N_K: Tensor, cos_L_K: Tensor, sin_L_K: Tensor) -> Tensor:
    """Each pair (x_i, x_{i + K/2}) turned by its angle; tables hold K/2 columns in float32 or better."""
    if torch.compiler.is_compiling():
        return _rotated(x_B_L_N_K, cos_L_K, sin_L_K)
    return cast(Tensor, _Rotation.apply(x_B_L_N_K, cos_L_K, sin_L_K))


def rotate_pairs(x_B_L_N_K: Tensor, cos_L_K: Tensor, sin_L_K: Tensor) -> Tensor:
    """Each pair (x_{2i}, x_{2i + 1}) turned by its angle; the first of all pairs come first, then the second.

    Queries and keys are reordered alike, so that their products are those of pairs left in their places.
    """
    return rotate(x_B_L_N_K.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos_L_K, sin_L_K)


class _Rotation(torch.autograd.Function):
    """The gradient of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x_B_L_N_K: Tensor, cos_L_K: Tensor, sin_L_K: Tensor) -> Tensor:
        ctx.save_for_backward(cos_L_K, sin_L_K)
        return _rotated(x_B_L_N_K, cos_L_K, sin_L_K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_L_K, sin_L_K = ctx.saved_tensors
        return rotate(grads[0], cos_L_K, -sin_L_K), None, None


def _rotated(x_B_L_N_K: Tensor, cos_L_K: Tensor, sin_L_K: Tensor) -> Tensor:
    cos, sin = cos_L_K.unsqueeze(1), sin_L_K.unsqueeze(1)
    first, second = x_B_L_N_K.to(torch.promote_types(x_B_L_N_K.dtype, cos.dtype)).chunk(2, dim=-1)
    turned = torch.cat(
        [torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)], dim=-1
    )
    return turned.to(x_B_L_N_K.dtype)


class LearnedPositions(nn.Module):
    """Learned tables of the three axes, summed and scaled to a root mean square of one; added in every block."""

    def __init__(self, model_channels: int, max_size: tuple[int, int, int]) -> None:
        super().__init__()
        max_t, max_h, max_w = max_size
        self.pos_emb_h = nn.Parameter(torch.empty(max_h, model_channels))
        self.pos_emb_w = nn.Parameter(torch.empty(max_w, model_channels))
        self.pos_emb_t = nn.Parameter(torch.empty(max_t, model_channels))

    def starts(self) -> dict[str, Start]:
        return {f"pos_emb_{axis}": Start(std=self.pos_emb_h.shape[-1] ** -0.5) for axis in "hwt"}

    def forward(self, size: tuple[int, int, int]) -> Tensor:
        """(1, T', H', W', D)."""
        t, h, w = size
        pos_1_T_1_1_D = self.pos_emb_t[None, :t, None, None]
        sum_1_T_H_W_D = pos_1_T_1_1_D + self.pos_emb_h[:h, None] + self.pos_emb_w[:w]
        dtype = at_least_float32(sum_1_T_H_W_D.dtype)
        norm = torch.linalg.vector_norm(sum_1_T_H_W_D, dim=-1, keepdim=True, dtype=dtype)
        scaled: Tensor = sum_1_T_H_W_D / (1e-6 + norm * sum_1_T_H_W_D.shape[-1] ** -0.5)
        return scaled.to(sum_1_T_H_W_D.dtype)
