# SPDX-License-Identifier: Apache-2.0
"""Small models and batches, and parts to build models and pipelines from."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cosmos_predict2.models.config import Predict2Video2WorldModelConfig
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from imaginaire.config.lazy_config import LazyCall as L

NET = dict(model_channels=32, num_blocks=2, num_heads=2, adaln_lora_dim=8, crossattn_emb_channels=8)
LIMITS = dict(max_img_h=8, max_img_w=8, max_frames=4)
PIPE_OPTIONS = (
    *("state_t", "ema", "video_noise_factor", "resize_online", "objective", "flow"),
    *("min_num_conditional_frames", "max_num_conditional_frames"),
)


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


def make_model(**options: Any) -> Video2WorldModel:
    """A small model with a config of class ``family``; ``network``, ``net`` and PIPE_OPTIONS go to its pipeline's."""
    family = options.pop("family", Predict2Video2WorldModelConfig)
    pipe = {name: options.pop(name) for name in PIPE_OPTIONS if name in options}
    net = {**LIMITS, **NET, **options.pop("net", {})}
    config = family(
        pipe_config=Video2WorldPipelineConfig(
            net=L(options.pop("network", Video2WorldDiT))(**net), tokenizer=L(PooledPixels)(), **{"state_t": 3, **pipe}
        ),
        **{"precision": "float32", **options},
    )
    torch.manual_seed(0)
    model = Video2WorldModel(config)
    awaken(model.net)
    return model


def awaken(net: nn.Module, *more: str, std: float = 0.1) -> None:
    """Draw the last modulation matrices and parameters with these words in their names, which begin at zero: behind
    them nothing learns and nothing shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if any(word in name for word in ("adaln_modulation", *more)):
                parameter.normal_(std=std, generator=generator)


def make_batch(size: int = 2, frames: int = 9, positions: list[int] | None = None) -> dict[str, Any]:
    """Random clips with texts; ``positions``: those of the samples in training."""
    generator = torch.Generator().manual_seed(2)
    batch: dict[str, Any] = {
        "video": torch.randint(0, 256, (size, 3, frames, 32, 32), dtype=torch.uint8, generator=generator),
        "t5_text_embeddings": torch.randn(size, 4, 8, generator=generator),
        "fps": torch.full((size,), 10.0),
        "padding_mask": torch.zeros(size, 1, 32, 32),
    }
    if positions is not None:
        batch["sample_position"] = torch.tensor(positions)
    return batch


def part(batch: dict[str, Any], index: int) -> dict[str, Any]:
    """One sample of a batch, as a batch."""
    return {key: value[index : index + 1] for key, value in batch.items()}
