# SPDX-License-Identifier: Apache-2.0
"""The network of the Wan2.1 video VAE, run in chunks of time; parameter names are those of the released file.

A clip is its first frame alone and then groups of frames. Every causal convolution remembers the last frames of its
input in a `Past`, so a clip may be fed in pieces of any length, and the pieces do not change the result. The first
frame is one of its own in all that changes the length: it is neither merged with others on the way down nor doubled on
the way up. For inference: nothing here keeps what a gradient would need.

Inside, tensors are [B, C, T, H, W] and lie channels-last in memory where the caller asked for it: the convolutions of
oneDNN and cuDNN want it so, the norm over channels reads contiguously, and frames become a batch without a copy.
Here T is the number of frames at the resolution in time that the layer works at.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Past = dict[nn.Module, Tensor]  # per causal convolution: the frames before the chunk; empty before the first frame

# Mean and standard deviation of the latent channels of the released weights.
LATENTS_MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
                0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)  # fmt: skip
LATENTS_STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
               3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)  # fmt: skip


@dataclass(frozen=True)
class WanConfig:
    """Sizes of the network; the defaults are those of the released weights. "temperal" is how upstream spells it."""

    dim: int = 96
    z_dim: int = 16
    dim_mult: Sequence[int] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    attn_scales: Sequence[float] = ()
    temperal_downsample: Sequence[bool] = (False, True, True)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if len(self.temperal_downsample) != len(self.dim_mult) - 1:
            raise ValueError(
                f"temperal_downsample={list(self.temperal_downsample)} needs one entry less than "
                f"dim_mult={list(self.dim_mult)}."
            )
        if self.attn_scales:
            raise ValueError(f"attn_scales={list(self.attn_scales)}: attention inside the stages is not supported.")

    @property
    def spatial_factor(self) -> int:
        return int(2 ** (len(self.dim_mult) - 1))

    @property
    def temporal_factor(self) -> int:
        return int(2 ** sum(self.temperal_downsample))


class WanVAE(nn.Module):
    """Encoder and decoder; both take one chunk of a clip and the past of the chunks before it."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.conv1 = CausalConv3d(2 * config.z_dim, 2 * config.z_dim, 1)
        self.conv2 = CausalConv3d(config.z_dim, config.z_dim, 1)
        self.decoder = Decoder(config)

    def encode(self, video_B_C_F_H_W: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of a chunk: the first frame, or a multiple of the temporal factor."""
        moments = self.conv1(self.encoder(video_B_C_F_H_W, past), past)
        mean_B_C_T_H_W, log_variance_B_C_T_H_W = moments.chunk(2, dim=1)
        return mean_B_C_T_H_W, log_variance_B_C_T_H_W

    def decode(self, latent_B_C_T_H_W: Tensor, past: Past) -> Tensor:
        """Pixels of a chunk: of the first latent frame, or of any number of later ones."""
        return self.decoder(self.conv2(latent_B_C_T_H_W, past), past)


class Encoder(nn.Module):
    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        widths = [config.dim * mult for mult in (1, *config.dim_mult)]
        self.conv1 = CausalConv3d(3, widths[0], 3)
        stages: list[nn.Module] = []
        for i, (width_in, width) in enumerate(pairwise(widths)):
            for j in range(config.num_res_blocks):
                stages.append(ResidualBlock(width_in if j == 0 else width, width))
            if i < len(config.temperal_downsample):
                stages.append(Downsample(width, merges_frames=config.temperal_downsample[i]))
        self.downsamples = nn.ModuleList(stages)
        self.middle = _middle(widths[-1])
        self.head = _head(widths[-1], 2 * config.z_dim)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        x = self.conv1(x, past)
        for layer in (*self.downsamples, *self.middle):
            x = layer(x, past)
        return self.head[2](self.head[0](x), past)


class Decoder(nn.Module):
    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        mults = list(config.dim_mult)[::-1]
        widths = [config.dim * mult for mult in (mults[0], *mults)]
        doubles = list(config.temperal_downsample)[::-1]
        self.conv1 = CausalConv3d(config.z_dim, widths[0], 3)
        self.middle = _middle(widths[0])
        stages: list[nn.Module] = []
        for i, (width_in, width) in enumerate(pairwise(widths)):
            if i > 0:
                width_in //= 2  # the upsampling before it halved them
            for j in range(config.num_res_blocks + 1):
                stages.append(ResidualBlock(width_in if j == 0 else width, width))
            if i < len(doubles):
                stages.append(Upsample(width, doubles_frames=doubles[i]))
        self.upsamples = nn.ModuleList(stages)
        self.head = _head(widths[-1], 3)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        x = self.conv1(x, past)
        for layer in (*self.middle, *self.upsamples):
            x = layer(x, past)
        return self.head[2](self.head[0](x), past)


def _middle(width: int) -> nn.ModuleList:
    return nn.ModuleList([ResidualBlock(width, width), FrameAttention(width), ResidualBlock(width, width)])


def _head(width: int, width_out: int) -> nn.ModuleList:
    return nn.ModuleList([NormSiLU(width), nn.Identity(), CausalConv3d(width, width_out, 3)])


# ---- layers ----------------------------------------------------------------------------------------------------------


class CausalConv3d(nn.Conv3d):
    """A convolution that sees the present and past frames; before the first frame lie zeros."""

    def __init__(self, width_in: int, width_out: int, kernel: int) -> None:
        super().__init__(width_in, width_out, kernel, padding=(0, kernel // 2, kernel // 2))

    def forward(self, x: Tensor, past: Past) -> Tensor:  # type: ignore[override]
        num_past = self.kernel_size[0] - 1
        if num_past == 0:
            return convolve(x, self)
        if self not in past and x.shape[2] == 1:
            # All that the earlier taps would see is zero, so the frame needs the last one only: a third of the work.
            past[self] = join_frames(torch.zeros_like(x).expand(-1, -1, num_past - 1, -1, -1), x)
            sides = (self.kernel_size[1] // 2, self.kernel_size[2] // 2)
            frame = _convolve(as_frames(x), self.weight[:, :, -1], self.bias, sides, (1, 1))
            return as_clips(frame, x.shape[0])
        before = past.get(self)
        if before is None:
            before = torch.zeros_like(x[:, :, :1]).expand(-1, -1, num_past, -1, -1)
        joined = join_frames(before, x)
        past[self] = last_frames(joined, num_past)
        return convolve(joined, self)


class NormSiLU(nn.Module):
    """SiLU of x / |x| * sqrt(C) * gamma, with the length taken over the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(_rms_norm(x, self.gamma), inplace=True)


class Norm(nn.Module):
    """x / |x| * sqrt(C) * gamma of frames [N, C, H, W]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.gamma)


def _rms_norm(x: Tensor, gamma: Tensor) -> Tensor:
    length = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min_(1e-12)
    return (x / length).mul_(gamma * x.shape[1] ** 0.5)


class ResidualBlock(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        # The released names count SiLU (1, 4) and dropout (5) too: they have no weights.
        self.residual = nn.ModuleDict(
            {
                "0": NormSiLU(width_in),
                "2": CausalConv3d(width_in, width, 3),
                "3": NormSiLU(width),
                "6": CausalConv3d(width, width, 3),
            }
        )
        self.shortcut = CausalConv3d(width_in, width, 1) if width_in != width else None

    def forward(self, x: Tensor, past: Past) -> Tensor:
        y = self.residual["2"](self.residual["0"](x), past)
        y = self.residual["6"](self.residual["3"](y), past)
        return y.add_(x if self.shortcut is None else self.shortcut(x, past))


class FrameAttention(nn.Module):
    """One head over the positions of each frame alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.to_qkv = nn.Conv2d(width, 3 * width, 1)
        self.proj = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        frames = as_frames(x)
        # One frame at a time: where no kernel takes so wide a head, the scores of a whole clip would not fit.
        attended = torch.cat([self._attend(frame) for frame in frames.split(1)])
        return as_clips(convolve(attended, self.proj).add_(frames), x.shape[0])

    def _attend(self, frame: Tensor) -> Tensor:
        height, width = frame.shape[-2:]
        qkv = convolve(self.norm(frame), self.to_qkv).flatten(2).transpose(1, 2)  # [1, H*W, 3C]
        q, k, v = (part.unsqueeze(1) for part in qkv.chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v).squeeze(1)
        return out.transpose(1, 2).unflatten(2, (height, width))


class Downsample(nn.Module):
    """Half the height and width, and half the frames (but for the first) where ``merges_frames``."""

    def __init__(self, width: int, merges_frames: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": nn.Conv2d(width, width, 3, stride=2)})
        self.time_conv = nn.Conv3d(width, width, (3, 1, 1), stride=(2, 1, 1)) if merges_frames else None

    def forward(self, x: Tensor, past: Past) -> Tensor:
        frames = F.pad(as_frames(x), (0, 1, 0, 1))
        x = as_clips(convolve(frames, self.resample["1"]), x.shape[0])
        if self.time_conv is None:
            return x
        before = past.get(self.time_conv)
        past[self.time_conv] = last_frames(x, 1)
        return x if before is None else convolve(join_frames(before, x), self.time_conv)


class Upsample(nn.Module):
    """Twice the height and width and half the channels, and two frames of each but the first if ``doubles_frames``."""

    def __init__(self, width: int, doubles_frames: bool) -> None:
        super().__init__()
        self.resample = nn.ModuleDict({"1": nn.Conv2d(width, width // 2, 3, padding=1)})
        self.time_conv = nn.Conv3d(width, 2 * width, (3, 1, 1)) if doubles_frames else None

    def forward(self, x: Tensor, past: Past) -> Tensor:
        if self.time_conv is not None:
            x = self._double_frames(x, past, self.time_conv)
        return as_clips(_conv_of_doubled(as_frames(x), self.resample["1"]), x.shape[0])

    def _double_frames(self, x: Tensor, past: Past, time_conv: nn.Conv3d) -> Tensor:
        if time_conv not in past:  # the first frame stays one, and later ones do not see it
            past[time_conv] = torch.zeros_like(x).expand(-1, -1, 2, -1, -1)
            return x
        joined = join_frames(past[time_conv], x)
        past[time_conv] = last_frames(joined, 2)
        pairs = convolve(joined, time_conv).unflatten(1, (2, x.shape[1]))  # [B, 2, C, T, H, W]
        return as_clips(pairs.permute(0, 3, 1, 2, 4, 5).flatten(0, 2), x.shape[0])


def _conv_of_doubled(frames: Tensor, conv: nn.Module) -> Tensor:
    """The 3x3 convolution of frames [N, C, H, W] magnified twice by repetition.

    A doubled pixel meets two taps of the kernel in a row, so each of the four positions inside a doubled pixel is a 2x2
    convolution of the small frame with summed taps: 16 multiplications instead of 36. In half precision the sums
    would be rounded, so there the frames are really magnified.
    """
    assert isinstance(conv, nn.Conv2d) and conv.bias is not None
    weight, bias = conv.weight, conv.bias
    if weight.dtype in (torch.bfloat16, torch.float16):
        large = F.interpolate(frames, scale_factor=2.0, mode="nearest-exact")
        return convolve(large, conv)
    num, _, height, width = frames.shape
    w0, w1, w2 = weight.unbind(2)
    rows = (torch.stack([w0, w1 + w2], 2), torch.stack([w0 + w1, w2], 2))
    kernels = []
    for row in rows:
        w0, w1, w2 = row.unbind(3)
        kernels += [torch.stack([w0, w1 + w2], 3), torch.stack([w0 + w1, w2], 3)]
    kernel = torch.cat(kernels)
    is_last = frames.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if is_last else torch.contiguous_format
    if is_last:
        kernel = kernel.contiguous(memory_format=layout)
    together = _convolve(frames, kernel, bias.repeat(4), (1, 1), (1, 1))
    quarters = together.chunk(4, dim=1)  # [N, C/2, H + 1, W + 1] each
    size = (num, weight.shape[0], 2 * height, 2 * width)
    out = torch.empty(size, dtype=frames.dtype, device=frames.device, memory_format=layout)
    for i, quarter in enumerate(quarters):
        down, right = divmod(i, 2)
        out[:, :, down::2, right::2] = quarter[:, :, down : down + height, right : right + width]
    return out


def convolve(x: Tensor, conv: nn.Module) -> Tensor:
    """``conv`` of frames or clips."""
    assert isinstance(conv, (nn.Conv2d, nn.Conv3d)) and not isinstance(conv.padding, str)
    return _convolve(x, conv.weight, conv.bias, conv.padding, conv.stride)


def _convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    # Of a batch of one small picture, torch takes convolutions away from oneDNN, and is then several times slower.
    if x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.mkldnn_convolution(x, weight, bias, padding, stride, (1,) * len(stride), 1)
    function = F.conv2d if weight.ndim == 4 else F.conv3d
    return function(x, weight, bias, padding=padding, stride=stride)


# ---- layout ----------------------------------------------------------------------------------------------------------


def as_frames(x_B_C_T_H_W: Tensor) -> Tensor:
    """[B*T, C, H, W]; a view where the clip lies channels-last."""
    return x_B_C_T_H_W.transpose(1, 2).flatten(0, 1)


def as_clips(frames: Tensor, batch: int) -> Tensor:
    """[B, C, T, H, W] of [B*T, C, H, W], as a view."""
    return frames.unflatten(0, (batch, -1)).transpose(1, 2)


def join_frames(before_B_C_T_H_W: Tensor, x_B_C_T_H_W: Tensor) -> Tensor:
    """Both one after the other in time, in the layout of the second."""
    if x_B_C_T_H_W.is_contiguous(memory_format=torch.channels_last_3d):
        # torch.cat takes a slow way for this layout unless it is shown as an ordinary one.
        pieces = [piece.permute(0, 2, 3, 4, 1) for piece in (before_B_C_T_H_W, x_B_C_T_H_W)]
        return torch.cat(pieces, 1).permute(0, 4, 1, 2, 3)
    return torch.cat([before_B_C_T_H_W, x_B_C_T_H_W], 2)


def last_frames(x_B_C_T_H_W: Tensor, num_frames: int) -> Tensor:
    """A copy, so that what it was cut from can be freed."""
    return x_B_C_T_H_W[:, :, -num_frames:].clone()


# ---- names -----------------------------------------------------------------------------------------------------------

_TOP = {"conv1.": "quant_conv.", "conv2.": "post_quant_conv."}
_INSIDE = {
    "conv1.": "conv_in.",
    "head.0.": "norm_out.",
    "head.2.": "conv_out.",
    "middle.0.": "mid_block.resnets.0.",
    "middle.1.": "mid_block.attentions.0.",
    "middle.2.": "mid_block.resnets.1.",
}
_BLOCK = {
    "residual.0.": "norm1.",
    "residual.2.": "conv1.",
    "residual.3.": "norm2.",
    "residual.6.": "conv2.",
    "shortcut.": "conv_shortcut.",
}


def to_diffusers_name(name: str, num_res_blocks: int = 2) -> str:
    """The name in diffusers' AutoencoderKLWan of a parameter of the released file."""
    part, _, rest = name.partition(".")
    if part not in ("encoder", "decoder"):
        return _replace_start(name, _TOP)
    kind, _, tail = rest.partition(".")
    if kind == "downsamples":
        index, _, tail = tail.partition(".")
        return f"{part}.down_blocks.{index}.{_replace_start(tail, _BLOCK)}"
    if kind == "upsamples":
        index, _, tail = tail.partition(".")
        stage, place = divmod(int(index), num_res_blocks + 2)
        layer = "upsamplers.0" if place == num_res_blocks + 1 else f"resnets.{place}"
        return f"{part}.up_blocks.{stage}.{layer}.{_replace_start(tail, _BLOCK)}"
    for start, replacement in _INSIDE.items():
        if rest.startswith(start):
            return f"{part}.{replacement}{_replace_start(rest.removeprefix(start), _BLOCK)}"
    return name


def _replace_start(name: str, table: dict[str, str]) -> str:
    for start, replacement in table.items():
        if name.startswith(start):
            return replacement + name.removeprefix(start)
    return name
