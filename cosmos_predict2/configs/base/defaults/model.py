# SPDX-License-Identifier: Apache-2.0
"""Group ``model``: a model with its size, resolution and frame rate, and the weights that it starts from."""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.config_video2world import get_cosmos_predict2_video2world_pipeline, get_dit_path
from cosmos_predict2.models.config import (
    RELEASED_SIGMAS,
    TINY_SIGMAS,
    Predict2ModelManagerConfig,
    Predict2Video2WorldModelConfig,
)
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from imaginaire.config import L, register_group

SHARD_SIZE = {"2B": 8, "14B": 32}  # of the groups without resolution and rate in their names; those that have them: 8


def training_entry(
    config_class: type[Predict2Video2WorldModelConfig],
    pipe_config: Video2WorldPipelineConfig,
    *,
    is_tiny: bool,
    dit_path: str,
    model: type[Video2WorldModel] = Video2WorldModel,
    **options: Any,
) -> dict[str, Any]:
    """The group entry of a model that trains from these weights, its pipeline without what only inference uses.

    The tiny models begin at random weights: they show that training works from there.
    """
    pipe_config.guardrail_config.enabled = False
    pipe_config.text_encoder = None  # training reads embeddings from its data, or has an encoder of its own
    if not is_tiny:
        pipe_config.tokenizer.tile_size = None  # tiles change latents a little, which training must never see
    config = config_class(
        precision=pipe_config.precision,
        validation_sigmas=list(TINY_SIGMAS if is_tiny else RELEASED_SIGMAS),
        model_manager_config=Predict2ModelManagerConfig(dit_path="" if is_tiny else dit_path),
        pipe_config=pipe_config,
        **options,
    )
    return dict(
        trainer=dict(distributed_parallelism="ddp" if is_tiny else "fsdp"),
        model=L(model)(config=config, _recursive_=False),
    )


def video2world(model_size: str, fsdp_shard_size: int, **variant: Any) -> dict[str, Any]:
    """The group entry of one Video2World variant."""
    return training_entry(
        Predict2Video2WorldModelConfig,
        get_cosmos_predict2_video2world_pipeline(model_size=model_size, **variant),
        is_tiny=model_size == "tiny",
        dit_path=get_dit_path(model_size=model_size, **variant),
        fsdp_shard_size=fsdp_shard_size,
        high_sigma_ratio=0.05,
    )


def entries() -> dict[str, Any]:
    name = "predict2_video2world_fsdp"
    found = {f"{name}_tiny": partial(video2world, "tiny", 0)}
    for size in ("2B", "14B"):
        found[f"{name}_{size.lower()}"] = partial(video2world, size, SHARD_SIZE[size])
        for resolution in ("480", "720"):
            for fps in (10, 16):
                variant = partial(video2world, size, 8, resolution=resolution, fps=fps)
                found[f"{name}_{size.lower()}_{resolution}p_{fps}fps"] = variant
    return found


def register() -> None:
    register_group("model", entries(), package="_global_")
