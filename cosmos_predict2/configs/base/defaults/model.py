# SPDX-License-Identifier: Apache-2.0
"""Group ``model``: a model with its size, resolution and frame rate, and the weights that it starts from."""

from collections.abc import Iterator
from typing import Any

from hydra.core.config_store import ConfigStore

from cosmos_predict2.configs.base.config_video2world import get_cosmos_predict2_video2world_pipeline, get_dit_path
from cosmos_predict2.models.validation import RELEASED_SIGMAS, TINY_SIGMAS
from cosmos_predict2.models.video2world_model import (
    Predict2ModelManagerConfig,
    Predict2Video2WorldModel,
    Predict2Video2WorldModelConfig,
)
from imaginaire.config.lazy_config import LazyCall as L

SHARD_SIZE = {"2B": 8, "14B": 32}  # of the groups without resolution and rate in their names; those that have them: 8


def video2world(model_size: str, fsdp_shard_size: int, **variant: Any) -> dict[str, Any]:
    """The group entry of one Video2World variant."""
    is_tiny = model_size == "tiny"
    pipe_config = get_cosmos_predict2_video2world_pipeline(model_size=model_size, **variant)
    pipe_config.guardrail_config.enabled = False
    pipe_config.text_encoder = None  # training reads embeddings from its data
    if not is_tiny:
        pipe_config.tokenizer.tile_size = None  # tiles change latents a little, which training must never see
    config = Predict2Video2WorldModelConfig(
        fsdp_shard_size=fsdp_shard_size,
        high_sigma_ratio=0.05,
        precision=pipe_config.precision,
        validation_sigmas=list(TINY_SIGMAS if is_tiny else RELEASED_SIGMAS),
        # The tiny twins of full training begin at random weights: they show that training works from there.
        model_manager_config=Predict2ModelManagerConfig(
            dit_path="" if is_tiny else get_dit_path(model_size=model_size, **variant)
        ),
        pipe_config=pipe_config,
    )
    return dict(
        trainer=dict(distributed_parallelism="ddp" if is_tiny else "fsdp"),
        model=L(Predict2Video2WorldModel)(config=config, _recursive_=False),
    )


def entries() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "predict2_video2world_fsdp_tiny", video2world("tiny", 0)
    for size in ("2B", "14B"):
        yield f"predict2_video2world_fsdp_{size.lower()}", video2world(size, SHARD_SIZE[size])
        for resolution in ("480", "720"):
            for fps in (10, 16):
                name = f"predict2_video2world_fsdp_{size.lower()}_{resolution}p_{fps}fps"
                yield name, video2world(size, 8, resolution=resolution, fps=fps)


def register() -> None:
    for name, node in entries():
        ConfigStore.instance().store(group="model", package="_global_", name=name, node=node)
