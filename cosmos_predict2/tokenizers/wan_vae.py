# SPDX-License-Identifier: Apache-2.0
"""The Wan2.1 video tokenizer: pixels to normalised latents and back, in bounded memory.

Clips stream through the network in time, a window at a time; the window changes memory and speed, not the result.
Where a single window does not fit, pictures are cut into overlapping tiles as well, which does change the result a
little, and therefore is never used for training.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import Tensor

from cosmos_predict2.tokenizers.sizes import LatentGrid
from cosmos_predict2.tokenizers.wan_network import LATENTS_MEAN, LATENTS_STD, Past, WanConfig, WanVAE, to_diffusers_name
from imaginaire import storage
from imaginaire.checkpoint import weights
from imaginaire.errors import CheckpointError, ConfigError, near, raised_as
from imaginaire.findings import CheckContext, Finding, error
from imaginaire.training.memory import free_memory

log = logging.getLogger(__name__)

EXPECTED_PATH = "checkpoints/nvidia/Cosmos-Predict2-2B-Video2World/tokenizer/tokenizer.pth"
DOWNLOAD = "python -m scripts.download_checkpoints --model_types video2world --model_sizes 2B"
# Frames of full resolution and ``dim`` channels that are alive at once, as measured: so many for each frame of the
# window, and so many that the convolutions remember of the frames before it.
LIVE_FRAMES = {"encode": (5.3, 21), "decode": (5.3, 31)}
AUTO_TILE = 512  # pixels
OVERLAP = 0.25  # of a tile's side


class WanTokenizer(LatentGrid):
    """`VideoTokenizer` with the public weights, from ``tokenizer.pth``, safetensors, or a diffusers ``vae`` folder.

    ``temporal_window`` is the number of pixel frames in work at a time. With 4 the latents of a prefix are those
    of the clip to the last bit; with more they may differ by rounding.
    ``tile_size`` is the side of a spatial tile in pixels: None never tiles, "auto" does where memory is short.
    ``normalisation="module"`` keeps the latents' constants and the arithmetic in the weights' dtype, as upstream does;
    with bfloat16 weights that moves latents by about as much as bfloat16 itself.
    """

    is_causal = True
    is_chunk_overlap = False
    spatial_resolution = 512  # for callers of the upstream interface; nothing reads it

    def __init__(
        self,
        vae_pth: str = "",
        *,
        chunk_duration: int = 81,
        load_mean_std: bool = False,
        name: str = "tokenizer",
        temporal_window: int = 4,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tile_size: int | Literal["auto"] | None = None,
        channels_last: bool = True,
        normalisation: Literal["float32", "module"] = "float32",
        config: WanConfig | Mapping[str, Any] | None = None,
        latents_mean: Sequence[float] = LATENTS_MEAN,
        latents_std: Sequence[float] = LATENTS_STD,
        allow_random: bool = False,
    ) -> None:
        del load_mean_std  # of the upstream interface, as is chunk_duration, which never cut a clip
        self.config = config if isinstance(config, WanConfig) else _sizes(config or {})
        self.name = name
        self.latent_ch = self.config.z_dim
        self.spatial_compression_factor = self.config.spatial_factor
        self.temporal_compression_factor = self.config.temporal_factor
        self.pixel_chunk_duration = chunk_duration
        self.latent_chunk_duration = 1 + (chunk_duration - 1) // self.temporal_compression_factor
        self.temporal_window = temporal_window
        self.tile_size = tile_size
        self.normalisation = normalisation
        self._check_options(len(latents_mean), len(latents_std))
        self.net = _load(vae_pth, self.config, allow_random).requires_grad_(False).eval()
        self.channels_last = channels_last  # measured on CPUs; cuDNN's bfloat16 kernels want it too
        for parameter in self.net.parameters() if self.channels_last else ():
            if parameter.ndim == 5:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last_3d)
            elif parameter.ndim == 4 and parameter.shape[1] > 1:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        self._given_dtype = dtype
        self.to(device or "cpu", dtype)
        self._mean = torch.tensor(latents_mean, dtype=torch.float64)
        self._std = torch.tensor(latents_std, dtype=torch.float64)

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """Problems of loading the weights, with their cures; compares names and shapes, and loads nothing."""
        path, config = arguments.get("vae_pth", ""), arguments.get("config")
        try:
            if path or not arguments.get("allow_random"):
                net, source = _open(path, config if isinstance(config, WanConfig) else _sizes(config or {}))
                weights.account(net.state_dict(), source).require(source=str(path))
        except CheckpointError as problem:
            yield error(context.key, str(problem))

    def _check_options(self, *num_constants: int) -> None:
        factor = self.temporal_compression_factor
        if self.temporal_window < factor or self.temporal_window % factor:
            raise ConfigError(f"tokenizer.temporal_window={self.temporal_window} must be a multiple of {factor}.")
        step = self.spatial_compression_factor
        if isinstance(self.tile_size, int) and (self.tile_size < 4 * step or self.tile_size % step):
            raise ConfigError(
                f"tokenizer.tile_size={self.tile_size} must be a multiple of {step}, and at least {4 * step}."
            )
        if self.normalisation not in ("float32", "module"):
            raise ConfigError(f"tokenizer.normalisation='{self.normalisation}' must be 'float32' or 'module'.")
        if any(num != self.latent_ch for num in num_constants):
            raise ConfigError(f"tokenizer.latents_mean and latents_std must have {self.latent_ch} numbers each.")

    @property
    def dtype(self) -> torch.dtype:
        return self.net.conv2.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.net.conv2.weight.device

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "WanTokenizer":
        """Move the weights; gives itself. Unless a dtype was asked for, they become bfloat16 on their first GPU."""
        if dtype is None and self._given_dtype is None and device is not None and torch.device(device).type != "cpu":
            dtype = torch.bfloat16
        self.net.to(device=device, dtype=dtype)
        return self

    def reset_dtype(self) -> None:
        """Does nothing; for callers of the upstream interface."""

    # ---- encode and decode -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, video_B_C_F_H_W: Tensor) -> Tensor:
        """Latents of RGB in [-1, 1], in the dtype of the video; the posterior's mean, normalised per channel."""
        mean_B_C_T_H_W = self.encode_moments(video_B_C_F_H_W)[0]
        centre, inverse_std = self.constants()
        return ((mean_B_C_T_H_W.to(centre.dtype) - centre) * inverse_std).to(video_B_C_F_H_W.dtype)

    @torch.no_grad()
    def encode_moments(self, video_B_C_F_H_W: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the posterior, before normalisation, in the dtype of the weights."""
        self.check_video(video_B_C_F_H_W)
        window, size = self._plan(video_B_C_F_H_W.shape, "encode")
        if size is None:
            return self._encode_whole(video_B_C_F_H_W, window)
        step = self.spatial_compression_factor
        both = in_tiles(lambda tile: torch.cat(self._encode_whole(tile, window), dim=1), video_B_C_F_H_W, size, step, 1)
        mean_B_C_T_H_W, log_variance_B_C_T_H_W = both.chunk(2, dim=1)
        return mean_B_C_T_H_W, log_variance_B_C_T_H_W

    @torch.no_grad()
    def decode(self, latent_B_C_T_H_W: Tensor) -> Tensor:
        """RGB of latents, not clamped, in the dtype of the latents."""
        self.check_latent(latent_B_C_T_H_W)
        batch, _, num_frames, height, width = latent_B_C_T_H_W.shape
        step = self.spatial_compression_factor
        pixel_shape = (batch, 3, self.get_pixel_num_frames(num_frames), height * step, width * step)
        window, size = self._plan(pixel_shape, "decode")
        if size is None:
            return self._decode_whole(latent_B_C_T_H_W, window)
        return in_tiles(lambda tile: self._decode_whole(tile, window), latent_B_C_T_H_W, size // step, 1, step)

    def _encode_whole(self, video_B_C_F_H_W: Tensor, window: int) -> tuple[Tensor, Tensor]:
        past: Past = {}
        pieces = [self.net.encode(self._entering(chunk), past) for chunk in _split_first(video_B_C_F_H_W, window)]
        mean_B_C_T_H_W, log_variance_B_C_T_H_W = (torch.cat(parts, dim=2) for parts in zip(*pieces))
        return mean_B_C_T_H_W.contiguous(), log_variance_B_C_T_H_W.contiguous()

    def _decode_whole(self, latent_B_C_T_H_W: Tensor, window: int) -> Tensor:
        batch, _, num_latents, height, width = latent_B_C_T_H_W.shape
        size = (height * self.spatial_compression_factor, width * self.spatial_compression_factor)
        past: Past = {}
        # The pixels of a long clip are large: each chunk goes straight to its place.
        video = latent_B_C_T_H_W.new_empty((batch, 3, self.get_pixel_num_frames(num_latents), *size))
        start = 0
        mean, inverse_std = self.constants()
        for chunk in _split_first(latent_B_C_T_H_W, window // self.temporal_compression_factor):
            chunk = chunk.to(device=mean.device, dtype=mean.dtype) / inverse_std + mean
            pixels = self.net.decode(self._entering(chunk), past)
            video[:, :, start : start + pixels.shape[2]] = pixels
            start += pixels.shape[2]
        return video

    def _entering(self, chunk_B_C_F_H_W: Tensor) -> Tensor:
        layout = torch.channels_last_3d if self.channels_last else torch.contiguous_format
        return chunk_B_C_F_H_W.to(device=self.device, dtype=self.dtype).contiguous(memory_format=layout)

    def constants(self) -> tuple[Tensor, Tensor]:
        """Mean and reciprocal standard deviation of the latents, [C, 1, 1, 1] as the arithmetic uses them."""
        if self.normalisation == "module":
            dtype = self.dtype
        else:
            dtype = torch.promote_types(self.dtype, torch.float32)
        mean, std = (values.to(device=self.device, dtype=dtype).view(-1, 1, 1, 1) for values in (self._mean, self._std))
        return mean, 1.0 / std

    # ---- memory ------------------------------------------------------------------------------------------------------

    def estimate_memory(
        self, shape: Sequence[int], what: Literal["encode", "decode"] = "decode", window: int | None = None
    ) -> int:
        """Estimated bytes that an untiled encode or decode of pixels [B, 3, F, H, W] takes besides the weights."""
        batch, _, num_frames, height, width = shape
        element = torch.empty((), dtype=self.dtype).element_size()
        pixels = batch * height * width * element
        in_work, remembered = LIVE_FRAMES[what]
        window = max(1, min(window or self.temporal_window, num_frames - 1))
        return int(pixels * (self.config.dim * (in_work * window + remembered) + 3 * num_frames))

    def _plan(self, shape: Sequence[int], what: Literal["encode", "decode"]) -> tuple[int, int | None]:
        """Frames at a time, and the side of the tiles, or None where the pictures are taken whole.

        Where memory is short, the window shrinks first, which changes nothing but rounding; then come tiles.
        """
        window, shortest = self.temporal_window, self.temporal_compression_factor
        size = AUTO_TILE if self.tile_size == "auto" else self.tile_size
        if size is None or max(shape[3:]) <= size:
            return window, None
        if self.tile_size == "auto":
            free = free_memory(self.device)
            if self.estimate_memory(shape, what) <= free:
                return window, None
            window, needed = shortest, self.estimate_memory(shape, what, shortest)
            if needed <= free:
                return window, None
            log.info(
                "tokenizer: %s in tiles of %d pixels (%.1f GB needed at once, %.1f GB free)",
                what, size, needed / 1e9, free / 1e9,
            )  # fmt: skip
        return window, size


def _sizes(config: Mapping[str, Any]) -> WanConfig:
    known = [field.name for field in fields(WanConfig)]
    for key in config:
        if key not in known:
            raise ConfigError(f"tokenizer.config has no '{key}'.{near(str(key), known)}")
    with raised_as(ConfigError, "tokenizer.config", ValueError):
        return WanConfig(**config)


def _split_first(x_B_C_F_H_W: Tensor, window: int) -> list[Tensor]:
    """The first frame, then windows; the last may be shorter."""
    first, rest = x_B_C_F_H_W[:, :, :1], x_B_C_F_H_W[:, :, 1:]
    return [first, *(rest.split(window, dim=2) if rest.shape[2] else ())]


# ---- tiles -----------------------------------------------------------------------------------------------------------


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor, size: int, step: int, scale: int) -> Tensor:
    """``function`` of overlapping tiles of ``size`` of ``x``, joined, their seams blended by linear ramps.

    Tiles begin at latent positions: ``step`` of ``x`` make one, and one makes ``scale`` of the result.
    """
    height, width = (side // step for side in x.shape[3:])
    total: Tensor | None = None
    for rows, row_ramp in _spans(height, size // step, scale):
        for columns, column_ramp in _spans(width, size // step, scale):
            part = function(x[..., _times(rows, step), _times(columns, step)])
            if total is None:
                total = part.new_zeros((*part.shape[:3], height * scale, width * scale))
            # The ramps of neighbours add up to one, so no division follows.
            weight = (row_ramp.unsqueeze(1) * column_ramp).to(part)
            total[..., _times(rows, scale), _times(columns, scale)] += part * weight
    assert total is not None
    return total


def _spans(length: int, size: int, scale: int) -> Iterator[tuple[slice, Tensor]]:
    """Places of tiles that cover ``length``, and how much each counts along itself."""
    if length <= size:
        yield slice(0, length), torch.ones(length * scale)
        return
    num_tiles = -(-(length - int(size * OVERLAP)) // (size - int(size * OVERLAP)))
    starts = [round(i * (length - size) / (num_tiles - 1)) for i in range(num_tiles)]
    for i, start in enumerate(starts):
        ramp = torch.ones(size * scale)
        if i > 0:
            shared = (starts[i - 1] + size - start) * scale
            ramp[:shared] = _rise(shared)
        if i + 1 < num_tiles:
            shared = (start + size - starts[i + 1]) * scale
            ramp[-shared:] = 1 - _rise(shared)
        yield slice(start, start + size), ramp


def _rise(length: int) -> Tensor:
    return (torch.arange(length) + 0.5) / length


def _times(span: slice, factor: int) -> slice:
    return slice(span.start * factor, span.stop * factor)


# ---- weights ---------------------------------------------------------------------------------------------------------


def _load(vae_pth: str, config: WanConfig, allow_random: bool) -> WanVAE:
    if not vae_pth and allow_random:
        log.info("tokenizer: random weights, as asked for")
        return WanVAE(config)
    net, source = _open(vae_pth, config)
    net.to_empty(device="cpu")
    weights.load_into(net.state_dict(), source).require(source=str(vae_pth))
    log.info("tokenizer: %s", vae_pth)
    return net


def _open(vae_pth: str, config: WanConfig) -> tuple[WanVAE, Mapping[str, Tensor]]:
    """The network without memory, and the tensors for it by its own names."""
    if not vae_pth:
        raise CheckpointError(
            f"The tokenizer has no weights: its vae_pth is empty. It is expected at {EXPECTED_PATH}; fetch it with\n"
            f"  {DOWNLOAD}\n"
            "For random weights, as in a test, set tokenizer.allow_random=True."
        )
    if not storage.is_remote(vae_pth) and vae_pth.endswith((".pth", ".pt")) and not storage.exists(vae_pth):
        raise CheckpointError(f"There is no tokenizer at {vae_pth}. Fetch it with {DOWNLOAD}")
    source = weights.read(vae_pth)
    with torch.device("meta"):
        net = WanVAE(config)
    if any(name.startswith(("encoder.conv_in.", "decoder.conv_in.")) for name in source):
        ours = {to_diffusers_name(name, config.num_res_blocks): name for name in net.state_dict()}
        source = weights.renamed(source, lambda name: ours.get(name, name))
    return net, source
