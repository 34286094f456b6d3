# SPDX-License-Identifier: Apache-2.0
"""Group ``model``: Wan2.1, with the weights that it starts from."""

from functools import partial
from typing import Any

from cosmos_predict2.configs.base.config_wan2pt1 import NETS, get_wan2pt1_pipeline, wan_folder, wan_text_encoder
from cosmos_predict2.configs.base.defaults.model import SHARD_SIZE, training_entry
from cosmos_predict2.configs.base.sizes import TINY_SHIFT
from cosmos_predict2.models.config import Predict2p5Video2WorldModelConfig
from cosmos_predict2.models.text import TrainingTextConfig
from cosmos_predict2.models.video2world_model import Video2WorldModel
from imaginaire.config import register_group

LORA_TARGETS = "q,k,v,o,ffn.0,ffn.2"


def wan2pt1(
    kind: str,
    size: str,
    config_class: type[Predict2p5Video2WorldModelConfig] = Predict2p5Video2WorldModelConfig,
    model: type[Video2WorldModel] = Video2WorldModel,
) -> dict[str, Any]:
    """The group entry of one model. Captions of the released ones are encoded on the way, equal ones once."""
    is_tiny = size == "tiny"
    pipe_config = get_wan2pt1_pipeline(kind=kind, model_size=size)
    return training_entry(
        config_class,
        pipe_config,
        is_tiny=is_tiny,
        dit_path="" if is_tiny else wan_folder(kind, size),
        model=model,
        fsdp_shard_size=0 if is_tiny else SHARD_SIZE.get(size, 8),
        lora_target_modules=LORA_TARGETS,
        train_time_shift=TINY_SHIFT if is_tiny else 3.0,
        conditional_frames_probs=None,
        text=TrainingTextConfig() if is_tiny else TrainingTextConfig(encoder=wan_text_encoder(kind, size)),
    )


def group_name(kind: str, size: str) -> str:
    return f"wan2pt1_{kind}_{size.lower().replace('.', 'pt')}"


def register() -> None:
    register_group("model", {group_name(*each): partial(wan2pt1, *each) for each in NETS}, package="_global_")
