# SPDX-License-Identifier: Apache-2.0
"""Sizes that every video tokenizer promises: 1 + 4k frames become 1 + k latent ones, sides an eighth."""

from torch import Tensor

from imaginaire.errors import DataError


class LatentGrid:
    """The sizes of latents, and the checks of what is to be encoded or decoded."""

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
