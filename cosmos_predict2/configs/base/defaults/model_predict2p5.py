# SPDX-License-Identifier: Apache-2.0
"""Group ``model``, the part of Predict2.5: captions are encoded in training, equal ones once."""

from collections.abc import Iterator
from typing import Any

from hydra.core.config_store import ConfigStore

from cosmos_predict2.configs.base.config_predict2p5 import (
    TINY_SHIFT,
    get_cosmos_predict2p5_video2world_pipeline,
    get_predict2p5_dit_path,
    predict2p5_text_encoder,
)
from cosmos_predict2.configs.base.defaults.model import SHARD_SIZE
from cosmos_predict2.models.flow_model import Predict2p5Video2WorldModel, Predict2p5Video2WorldModelConfig
from cosmos_predict2.models.training_text import TrainingTextConfig
from cosmos_predict2.models.validation import RELEASED_SIGMAS, TINY_SIGMAS
from cosmos_predict2.models.video2world_model import Predict2ModelManagerConfig
from imaginaire.config.lazy_config import LazyCall as L


def predict2p5_video2world(model_size: str, fsdp_shard_size: int) -> dict[str, Any]:
    """The group entry of one size; training goes on from the pre-trained weights."""
    is_tiny = model_size == "tiny"
    pipe_config = get_cosmos_predict2p5_video2world_pipeline(model_size=model_size)
    pipe_config.guardrail_config.enabled = False
    pipe_config.prompt_refiner_config.enabled = False
    pipe_config.text_encoder = None  # training has one of its own, below
    if not is_tiny:
        pipe_config.tokenizer.tile_size = None  # tiles change latents a little, which training must never see
    config = Predict2p5Video2WorldModelConfig(
        fsdp_shard_size=fsdp_shard_size,
        precision=pipe_config.precision,
        train_time_shift=TINY_SHIFT if is_tiny else 5.0,
        validation_sigmas=list(TINY_SIGMAS if is_tiny else RELEASED_SIGMAS),
        model_manager_config=Predict2ModelManagerConfig(
            dit_path="" if is_tiny else get_predict2p5_dit_path(model_size=model_size, release="pre-trained")
        ),
        text=TrainingTextConfig(encoder=predict2p5_text_encoder(model_size)),
        pipe_config=pipe_config,
    )
    return dict(
        trainer=dict(distributed_parallelism="ddp" if is_tiny else "fsdp"),
        model=L(Predict2p5Video2WorldModel)(config=config, _recursive_=False),
    )


def entries() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "predict2p5_video2world_fsdp_tiny", predict2p5_video2world("tiny", 0)
    for size in ("2B", "14B"):
        yield f"predict2p5_video2world_fsdp_{size.lower()}", predict2p5_video2world(size, SHARD_SIZE[size])


def register() -> None:
    for name, node in entries():
        ConfigStore.instance().store(group="model", package="_global_", name=name, node=node)
