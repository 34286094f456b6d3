# SPDX-License-Identifier: Apache-2.0
"""Sizes of clips, in pixels and in latents: resolutions by name and aspect ratio, and numbers of frames.

Every video tokenizer promises the same: 1 + 4k frames become 1 + k latent ones, sides an eighth.
"""

from torch import Tensor

from cosmos_predict2.interfaces import TokenizerDefaults
from imaginaire.errors import ConfigError, DataError, near

# (width, height) in pixels, all multiples of 16: 8 of the tokenizer, 2 of the network's patches. "48" is the toy world.
VIDEO_SIZES = {
    "720": {"1:1": (960, 960), "4:3": (960, 704), "3:4": (704, 960), "16:9": (1280, 704), "9:16": (704, 1280)},
    "512": {"1:1": (512, 512), "4:3": (640, 512), "3:4": (512, 640), "16:9": (640, 384), "9:16": (384, 640)},
    "480": {"1:1": (480, 480), "4:3": (640, 480), "3:4": (480, 640), "16:9": (768, 432), "9:16": (432, 768)},
    "48": {"1:1": (48, 48), "4:3": (64, 48), "3:4": (48, 64), "16:9": (80, 48), "9:16": (48, 80)},
}
IMAGE_SIZES = {
    "1024": {"1:1": (1024, 1024), "4:3": (1168, 880), "3:4": (880, 1168), "16:9": (1360, 768), "9:16": (768, 1360)}
}
TOY_RESOLUTION = "48"  # of the tiny models, whose clips are square by default


def size_of(resolution: str, aspect_ratio: str) -> tuple[int, int]:
    """(height, width) in pixels."""
    table = {**VIDEO_SIZES, **IMAGE_SIZES}
    if resolution not in table:
        raise ConfigError(f"There is no resolution '{resolution}'.{near(resolution, table)}")
    if aspect_ratio not in table[resolution]:
        raise ConfigError(f"There is no aspect ratio '{aspect_ratio}'.{near(aspect_ratio, table[resolution])}")
    width, height = table[resolution][aspect_ratio]
    return height, width


def size_problem(name: str, size: object) -> str | None:
    """Problem of a (height, width) in pixels, if any."""
    try:
        sides = [int(side) for side in size]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        sides = []
    if len(sides) != 2 or min(sides) < 16 or any(side % 16 for side in sides):
        return f"{name}={size}: it is (height, width) in pixels, both multiples of 16."
    return None


def small_size(height: int, width: int, longest: int = 64) -> tuple[int, int]:
    """(height, width) for the tiny models: the shape of the pictures with sides that are multiples of 16, at most
    ``longest``; small pictures are not made larger than the next multiple."""
    longest = longest // 16 * 16
    shrink = min(1.0, longest / max(height, width))
    sides = (max(16, min(longest, 16 * round(side * shrink / 16))) for side in (height, width))
    return next(sides), next(sides)


def pixel_frames(num_latent_frames: int) -> int:
    """Frames of a clip with that many latent ones: the first alone, then four for each."""
    return 4 * (num_latent_frames - 1) + 1


def latent_frame(frame: int) -> int:
    """The number of the latent frame that a frame belongs to, both from 0."""
    return (frame + 3) // 4


def latent_frames(num_pixel_frames: int) -> int:
    """Latent frames of a clip; its length must be one more than a multiple of four."""
    if num_pixel_frames < 1 or num_pixel_frames % 4 != 1:
        below = max(1, (num_pixel_frames - 1) // 4 * 4 + 1)
        raise ConfigError(
            f"A clip of {num_pixel_frames} frames has no latent form: it must be 1 + 4k frames."
            f" The nearest are {below} and {below + 4}."
        )
    return (num_pixel_frames - 1) // 4 + 1


def swapped_size(wanted: tuple[int, int], have: tuple[int, int], what: str) -> str | None:
    """A note where a video_size is upright and the pictures of ``what`` are wide, or the other way round, as if it were
    (width, height); else None. Sizes are (height, width)."""
    (height, width), (own_height, own_width) = wanted, have
    if (height - width) * (own_height - own_width) >= 0:
        return None
    kinds = ("upright", "wide") if height > width else ("wide", "upright")
    return (
        f"video_size=[{height}, {width}] is (height, width), {kinds[0]}, but {what} is {kinds[1]}, {own_height} high"
        f" and {own_width} wide: was [{width}, {height}] meant?"
    )


class LatentGrid(TokenizerDefaults):
    """The sizes of a tokenizer's latents, and the checks of what is to be encoded or decoded."""

    latent_ch: int = 16
    spatial_compression_factor: int = 8
    temporal_compression_factor: int = 4

    def get_latent_num_frames(self, num_pixel_frames: int) -> int:
        """Latent frames of a clip; an error unless the clip is one frame and then whole groups."""
        factor = self.temporal_compression_factor
        if num_pixel_frames < 1 or (num_pixel_frames - 1) % factor:
            below = max(1, (num_pixel_frames - 1) // factor * factor + 1)
            raise DataError(
                f"A clip of {num_pixel_frames} frames cannot be encoded: it must have 1 + {factor}k frames. "
                f"The nearest: {below} or {below + factor}."
            )
        return 1 + (num_pixel_frames - 1) // factor

    def get_pixel_num_frames(self, num_latent_frames: int) -> int:
        """Frames that so many latent frames are decoded to."""
        return 1 + (num_latent_frames - 1) * self.temporal_compression_factor

    def check_video(self, video_B_C_F_H_W: Tensor) -> None:
        """Raise unless this is RGB in floating point, of a size and length that has latents."""
        shape = tuple(video_B_C_F_H_W.shape)
        if video_B_C_F_H_W.ndim != 5 or shape[1] != 3:
            raise DataError(f"A video is [batch, 3, frames, height, width]; this tensor is {list(shape)}.")
        if not video_B_C_F_H_W.is_floating_point():
            raise DataError(f"A video is RGB in [-1, 1], but this one is {video_B_C_F_H_W.dtype}: take x / 127.5 - 1.")
        self.get_latent_num_frames(shape[2])
        factor = self.spatial_compression_factor
        for side, length in zip(("height", "width"), shape[3:]):
            if length < factor or length % factor:
                raise DataError(f"The {side} {length} is not a multiple of {factor}.")

    def check_latent(self, latent_B_C_T_H_W: Tensor) -> None:
        """Raise unless this has the form of latents."""
        shape = tuple(latent_B_C_T_H_W.shape)
        if latent_B_C_T_H_W.ndim != 5 or shape[1] != self.latent_ch or 0 in shape[2:]:
            raise DataError(f"Latents are [batch, {self.latent_ch}, frames, height, width]; this one is {list(shape)}.")
        if not latent_B_C_T_H_W.is_floating_point():
            raise DataError(f"Latents are floating-point numbers; this tensor is {latent_B_C_T_H_W.dtype}.")
