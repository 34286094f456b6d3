# SPDX-License-Identifier: Apache-2.0
"""Video2World by size, resolution and frame rate: the numbers of the released models, and of the tiny one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.released import (
    NETWORKS,
    get_cosmos_predict2_video2world_checkpoint,
    get_t5_model_dir,
    get_tokenizer_checkpoint,
    tiny_video2world_path,
)
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.t5 import T5Encoder
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from cosmos_predict2.tokenizers.wan_vae import WanTokenizer
from cosmos_predict2.world_model.config import SolverConfig, Video2WorldPipelineConfig
from imaginaire.config import L
from imaginaire.errors import ConfigError

STATE_T = {16: 24, 10: 16}  # latent frames by frame rate: 93 and 61 pixel frames


@dataclass(frozen=True)
class Size:
    """One size of model and its variants; the first resolution, rate and aspect ratio are its defaults."""

    net: dict[str, Any]
    resolutions: tuple[str, ...]
    rates: tuple[int, ...]
    aspect_ratio: str
    sac_mode: str = "none"  # of recomputation in training


TINY_NET = dict(
    model_channels=128,
    num_blocks=4,
    num_heads=2,
    adaln_lora_dim=32,
    crossattn_emb_channels=64,
    rope_t_extrapolation_ratio=1.0,
    rope_h_extrapolation_ratio=1.0,
    rope_w_extrapolation_ratio=1.0,
    max_img_h=16,
    max_img_w=16,
    max_frames=16,
)
SIZES = {
    "2B": Size(NETWORKS["2B Video2World"], ("720", "480"), (16, 10), "16:9", "predict2_2b_720"),
    "14B": Size(NETWORKS["14B Video2World"], ("720", "480"), (16, 10), "16:9", "predict2_14b_720"),
    "tiny": Size(TINY_NET, ("48",), (10,), "1:1"),  # ours: learns the toy world on a CPU, in minutes
}


def get_cosmos_predict2_video2world_pipeline(
    *, model_size: str = "2B", resolution: str = "", fps: int = 0, natten: bool = False
) -> Video2WorldPipelineConfig:
    """The pipeline's config; an empty resolution and a rate of 0 mean the size's defaults (720 and 16)."""
    size = check_variant(model_size, resolution, fps, natten)
    is_tiny = model_size == "tiny"
    text_encoder = L(BytesEncoder)(num_tokens=64, width=64) if is_tiny else L(T5Encoder)(path=get_t5_model_dir())
    return pipeline_config(model_size, size, resolution, fps, natten=natten, text_encoder=text_encoder)


def pipeline_config(
    model_size: str, size: Size, resolution: str, fps: int, *, natten: bool = False, **own: Any
) -> Video2WorldPipelineConfig:
    """The pipeline's config of a variant that there is; ``own`` are the fields that the families do not share."""
    resolution, fps = resolution or size.resolutions[0], fps or size.rates[0]
    is_tiny = model_size == "tiny"
    backend = "natten" if natten else "auto" if is_tiny else "minimal_a2a"
    sac_config = dict(mode=size.sac_mode, every_n_blocks=1)
    if is_tiny:
        tokenizer = L(TinyTokenizer)()
    else:
        vae_pth = get_tokenizer_checkpoint(model_size=model_size)
        tokenizer = L(WanTokenizer)(
            vae_pth=vae_pth, chunk_duration=81, load_mean_std=False, temporal_window=16, tile_size="auto"
        )
    return Video2WorldPipelineConfig(
        net=L(Video2WorldDiT)(**{"atten_backend": backend, **size.net}, sac_config=sac_config),
        tokenizer=tokenizer,
        state_t=4 if is_tiny else STATE_T[fps],
        resolution=resolution,
        fps=fps,
        precision="float32" if is_tiny else "bfloat16",
        # The tiny models are trained near pure noise; they have seen little of levels below 1.
        timestamps=SolverConfig(t_min=1.0) if is_tiny else SolverConfig(),
        **own,
    )


def get_dit_path(*, model_size: str, resolution: str = "", fps: int = 0, natten: bool = False) -> str:
    """The path of a variant's weights: the released ones, or those of the tiny model, which come with the code."""
    size = check_variant(model_size, resolution, fps, natten)
    if model_size == "tiny":
        return tiny_video2world_path()
    return get_cosmos_predict2_video2world_checkpoint(
        model_size=model_size, resolution=resolution or size.resolutions[0], fps=fps or size.rates[0], natten=natten
    )


def check_variant(model_size: str, resolution: str = "", fps: int = 0, natten: bool = False) -> Size:
    """The size, or an error that lists the variants."""
    size = find_size(SIZES, "Predict2 Video2World", model_size, resolution, fps)
    if natten and (model_size == "tiny" or (resolution or size.resolutions[0]) != "720"):
        raise ConfigError("The natten weights exist for the 2B and 14B models at resolution 720 only.")
    return size


def find_size(sizes: Mapping[str, Size], family: str, model_size: str, resolution: str = "", fps: int = 0) -> Size:
    """The size of a family, or an error that lists its variants."""
    if model_size not in sizes:
        raise ConfigError(f"There is no {family} model of size '{model_size}'. There are: {', '.join(sizes)}.")
    size = sizes[model_size]
    if (resolution and resolution not in size.resolutions) or (fps and fps not in size.rates):
        asked = f"resolution {resolution or size.resolutions[0]} and {fps or size.rates[0]} frames per second"
        known = f"Resolutions: {', '.join(size.resolutions)}; rates: {', '.join(map(str, size.rates))}."
        raise ConfigError(f"The {model_size} model of {family} has no variant with {asked}. {known}")
    return size
