# SPDX-License-Identifier: Apache-2.0
"""Small models and batches, and parts to build models and pipelines from."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional

from cosmos_predict2.models.config import Predict2Video2WorldModelConfig
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.parallelize import ContextParallel
from cosmos_predict2.world_model.world_model import SamplingOptions
from imaginaire import distributed
from imaginaire.config.lazy_config import LazyCall as L

NET = dict(model_channels=32, num_blocks=2, num_heads=2, adaln_lora_dim=8, crossattn_emb_channels=8)
LIMITS = dict(max_img_h=8, max_img_w=8, max_frames=4)


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


def make_config(
    *,
    family: type[Predict2Video2WorldModelConfig] = Predict2Video2WorldModelConfig,
    pipeline: type[Video2WorldPipelineConfig] = Video2WorldPipelineConfig,
    network: type[nn.Module] = Video2WorldDiT,
    net: Mapping[str, Any] | None = None,
    **options: Any,
) -> Predict2Video2WorldModelConfig:
    """The config of a small model; ``net`` are arguments of its network, and options that ``family`` has no field for
    are those of its pipeline."""
    of_family = {name: options.pop(name) for name in [*options] if name in attrs.fields_dict(family)}
    parts = dict(net=L(network)(**{**LIMITS, **NET, **(net or {})}), tokenizer=L(PooledPixels)())
    return family(pipe_config=pipeline(**{"state_t": 3, **parts, **options}), **{"precision": "float32", **of_family})


def make_model(*more: str, std: float = 0.1, **options: Any) -> Video2WorldModel:
    """A small model of `make_config`, awakened."""
    torch.manual_seed(0)
    model = Video2WorldModel(make_config(**options))
    awaken(model.net, *more, std=std)
    return model


def awaken(net: nn.Module, *more: str, std: float = 0.1) -> None:
    """Draw the last modulation matrices and parameters with these words in their names, which begin at zero: behind
    them nothing learns and nothing shows."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if any(word in name for word in ("adaln_modulation", *more)):
                parameter.normal_(std=std, generator=generator)


def make_batch(
    size: int = 2,
    frames: int = 9,
    positions: Sequence[int] | None = None,
    *,
    picture: tuple[int, int] = (32, 32),
    num_tokens: int = 4,
) -> dict[str, Any]:
    """Random clips with texts; ``positions``: those of the samples in training."""
    generator = torch.Generator().manual_seed(2)
    batch: dict[str, Any] = {
        "video": torch.randint(0, 256, (size, 3, frames, *picture), dtype=torch.uint8, generator=generator),
        "t5_text_embeddings": torch.randn(size, num_tokens, 8, generator=generator),
        "fps": torch.full((size,), 10.0),
        "padding_mask": torch.zeros(size, 1, *picture),
    }
    if positions is not None:
        batch["sample_position"] = torch.tensor(positions)
    return batch


def loss_gradients_and_video(
    model: Video2WorldModel, batch: Mapping[str, Any], num_given: int, text_B_S_E: Tensor
) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss and gradients of a batch, and the video that follows its first frames, by all processes together."""
    count = distributed.world_size()
    model.world.context = ContextParallel(model.net, torch.distributed.group.WORLD if count > 1 else None)
    _, loss = model.training_step(batch, 1)
    loss.backward()
    value = distributed.all_reduce_(loss.detach() / count)
    grads = {name: distributed.all_reduce_(parameter.grad / count) for name, parameter in model.net.named_parameters()}
    options = SamplingOptions(num_steps=3, guidance=2.0)
    return float(value), grads, model.world.generate(batch["video"][:, :, :num_given], text_B_S_E, options=options)


def part(batch: dict[str, Any], index: int) -> dict[str, Any]:
    """One sample of a batch, as a batch."""
    return {key: value[index : index + 1] for key, value in batch.items()}
