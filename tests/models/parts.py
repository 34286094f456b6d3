# SPDX-License-Identifier: Apache-2.0
"""Small parts to build models and pipelines from."""

import torch
from torch import Tensor
from torch.nn import functional


class PooledPixels:
    """A tokenizer without weights: each latent frame is its last pixel frame, averaged over 8 x 8 pixels."""

    latent_ch = 16
    spatial_compression_factor = 8
    temporal_compression_factor = 4
    dtype = torch.float32

    def encode(self, video_B_C_F_H_W: Tensor) -> Tensor:
        frames = video_B_C_F_H_W[:, :, ::4]
        pooled = functional.avg_pool3d(frames, (1, 8, 8))
        return pooled.repeat(1, 6, 1, 1, 1)[:, : self.latent_ch]

    def decode(self, latent_B_C_T_H_W: Tensor) -> Tensor:
        frames = latent_B_C_T_H_W[:, :3].repeat_interleave(4, dim=2)[:, :, 3:]
        return frames.repeat_interleave(8, dim=3).repeat_interleave(8, dim=4)

    def get_latent_num_frames(self, num_pixel_frames: int) -> int:
        return 1 + (num_pixel_frames - 1) // 4

    def get_pixel_num_frames(self, num_latent_frames: int) -> int:
        return 1 + 4 * (num_latent_frames - 1)

    def to(self, device: torch.device | str) -> "PooledPixels":
        return self
