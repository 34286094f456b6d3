# SPDX-License-Identifier: Apache-2.0
"""Group ``model``, the part of Predict2.5: captions are encoded in training, equal ones once."""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.config_predict2p5 import (
    TINY_SHIFT,
    get_cosmos_predict2p5_video2world_pipeline,
    get_predict2p5_dit_path,
    predict2p5_text_encoder,
)
from cosmos_predict2.configs.base.defaults.model import SHARD_SIZE, training_entry
from cosmos_predict2.models.config import Predict2p5Video2WorldModelConfig
from cosmos_predict2.models.text import TrainingTextConfig
from cosmos_predict2.models.video2world_model import Video2WorldModel
from imaginaire.config import register_group


def predict2p5_video2world(
    model_size: str,
    fsdp_shard_size: int,
    config_class: type[Predict2p5Video2WorldModelConfig] = Predict2p5Video2WorldModelConfig,
    model: type[Video2WorldModel] = Video2WorldModel,
) -> dict[str, Any]:
    """The group entry of one size; training goes on from the pre-trained weights."""
    is_tiny = model_size == "tiny"
    pipe_config = get_cosmos_predict2p5_video2world_pipeline(model_size=model_size)
    pipe_config.prompt_refiner_config.enabled = False
    return training_entry(
        config_class,
        pipe_config,
        is_tiny=is_tiny,
        dit_path="" if is_tiny else get_predict2p5_dit_path(model_size=model_size, release="pre-trained"),
        model=model,
        fsdp_shard_size=fsdp_shard_size,
        train_time_shift=TINY_SHIFT if is_tiny else 5.0,
        text=TrainingTextConfig(encoder=predict2p5_text_encoder(model_size)),
    )


def register() -> None:
    sizes = {"tiny": 0, **SHARD_SIZE}
    entries = {
        f"predict2p5_video2world_fsdp_{size.lower()}": partial(predict2p5_video2world, size, shard_size)
        for size, shard_size in sizes.items()
    }
    register_group("model", entries, package="_global_")
