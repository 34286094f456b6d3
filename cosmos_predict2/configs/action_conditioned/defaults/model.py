# SPDX-License-Identifier: Apache-2.0
"""Groups ``model`` and ``net`` of the action-conditioned models."""

from functools import partial
from typing import Any

from cosmos_predict2.configs.action_conditioned.networks import (
    get_action_dit_path,
    get_cosmos_predict2_action_conditioned_pipeline,
    get_cosmos_predict2p5_action_conditioned_pipeline,
    network_node,
)
from cosmos_predict2.configs.base.config_video2world import get_predict2p5_dit_path
from cosmos_predict2.configs.base.defaults.model import training_entry
from cosmos_predict2.models.config import Predict2p5Video2WorldModelConfig, Predict2Video2WorldModelConfig
from cosmos_predict2.models.own_frames import OwnFramesModel, Predict2OwnFramesConfig
from cosmos_predict2.models.text import TrainingTextConfig
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.released import NETWORKS, get_cosmos_predict2_video2world_checkpoint, get_predict25_empty_text
from imaginaire.config import register_group


def predict2(model_size: str, network: str) -> dict[str, Any]:
    """The group entry of a model with Predict2's loss, sharded over all processes.

    The weights are the released ones of the flat network; the chunk network starts from a model without actions.
    """
    is_tiny = model_size == "tiny"
    path = get_action_dit_path() if network == "flat" else get_cosmos_predict2_video2world_checkpoint(resolution="480")
    return training_entry(
        Predict2Video2WorldModelConfig,
        get_cosmos_predict2_action_conditioned_pipeline(model_size=model_size, network=network),
        is_tiny=is_tiny,
        dit_path="" if is_tiny else path,
        fsdp_shard_size=0 if is_tiny else -1,
    )


def from_action_weights(
    model_size: str,
    network: str,
    shard_size: int = -1,
    config_class: type[Predict2Video2WorldModelConfig] = Predict2OwnFramesConfig,
    model: type[Video2WorldModel] = OwnFramesModel,
) -> dict[str, Any]:
    """The group entry of a model that goes on from weights with actions, by default after histories of its own."""
    is_tiny = model_size == "tiny"
    return training_entry(
        config_class,
        get_cosmos_predict2_action_conditioned_pipeline(model_size=model_size, network=network),
        is_tiny=is_tiny,
        dit_path=get_action_dit_path(model_size=model_size),
        model=model,
        fsdp_shard_size=0 if is_tiny else shard_size,
    )


def predict2p5(model_size: str, network: str) -> dict[str, Any]:
    """The group entry of a model with Predict2.5's loss, from its pre-trained weights, which take no actions.

    Every clip has one conditioning frame and the text of the empty prompt, one embedding for all.
    """
    is_tiny = model_size == "tiny"
    pipe_config = get_cosmos_predict2p5_action_conditioned_pipeline(model_size=model_size, network=network)
    return training_entry(
        Predict2p5Video2WorldModelConfig,
        pipe_config,
        is_tiny=is_tiny,
        dit_path="" if is_tiny else get_predict2p5_dit_path(model_size=model_size, release="pre-trained"),
        fsdp_shard_size=0 if is_tiny else 8,
        train_time_shift=pipe_config.flow.shift if pipe_config.flow is not None else 5.0,
        conditional_frames_probs=None,
        text=TrainingTextConfig(constant_path="" if is_tiny else get_predict25_empty_text()),
    )


def register() -> None:
    models = {
        "predict2_v2w_2b_action_conditioned_fsdp": partial(predict2, "2B", "flat"),
        "predict2_v2w_2b_action_chunk_conditioned_fsdp": partial(predict2, "2B", "chunk"),
        "predict2_v2w_tiny_action_conditioned": partial(predict2, "tiny", "chunk"),
        "predict2_v2w_2b_action_own_frames": partial(from_action_weights, "2B", "flat"),
        "predict2_v2w_tiny_action_own_frames": partial(from_action_weights, "tiny", "chunk"),
        "predict2p5_v2w_2b_action_conditioned_fsdp": partial(predict2p5, "2B", "flat"),
        "predict2p5_v2w_2b_action_chunk_conditioned_fsdp": partial(predict2p5, "2B", "chunk"),
        "predict2p5_v2w_tiny_action_conditioned": partial(predict2p5, "tiny", "chunk"),
    }

    numbers = NETWORKS["2B Predict2.5"]
    nets = {  # by their published names, for another one than the model's
        "cosmos_v1_2B_action_conditioned": partial(network_node, "flat", 7, numbers),
        "cosmos_v1_2B_action_chunk_conditioned": partial(network_node, "chunk", 7, numbers),
    }
    register_group("model", models, package="_global_")
    register_group("net", nets, package="model.config.pipe_config.net")
