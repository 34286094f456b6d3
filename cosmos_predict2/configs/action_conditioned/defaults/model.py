# SPDX-License-Identifier: Apache-2.0
"""Groups ``model`` and ``net`` of the action-conditioned models."""

from collections.abc import Iterator
from typing import Any

from hydra.core.config_store import ConfigStore

from cosmos_predict2.configs.action_conditioned.networks import (
    get_action_dit_path,
    get_cosmos_predict2_action_conditioned_pipeline,
    get_cosmos_predict2p5_action_conditioned_pipeline,
    network_node,
)
from cosmos_predict2.configs.base.config_predict2p5 import get_predict2p5_dit_path
from cosmos_predict2.models.flow_model import Predict2p5Video2WorldModelConfig
from cosmos_predict2.models.training_text import TrainingTextConfig
from cosmos_predict2.models.validation import RELEASED_SIGMAS, TINY_SIGMAS
from cosmos_predict2.models.video2world_action_model import (
    Predict2p5ActionConditionedModel,
    Predict2Video2WorldActionConditionedModel,
)
from cosmos_predict2.models.video2world_model import Predict2ModelManagerConfig, Predict2Video2WorldModelConfig
from cosmos_predict2.released import (
    NETWORKS,
    get_cosmos_predict2_video2world_checkpoint,
    get_predict25_empty_text,
)
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig
from imaginaire.config.lazy_config import LazyCall as L


def for_training(pipe_config: Video2WorldActionPipelineConfig, *, is_tiny: bool) -> Video2WorldActionPipelineConfig:
    """The same without what only inference uses."""
    pipe_config.guardrail_config.enabled = False
    pipe_config.text_encoder = None  # the text is zeros, or comes with the data
    if not is_tiny:
        pipe_config.tokenizer.tile_size = None  # tiles change latents a little, which training must never see
    return pipe_config


def predict2(model_size: str, network: str) -> dict[str, Any]:
    """The group entry of a model with Predict2's loss, sharded over all processes.

    The weights are the released ones of the flat network; the chunk network starts from a model that is told nothing.
    """
    is_tiny = model_size == "tiny"
    dit_path = ""
    if not is_tiny:
        flat = network == "flat"
        dit_path = get_action_dit_path() if flat else get_cosmos_predict2_video2world_checkpoint(resolution="480")
    pipe_config = get_cosmos_predict2_action_conditioned_pipeline(model_size=model_size, network=network)
    config = Predict2Video2WorldModelConfig(
        fsdp_shard_size=0 if is_tiny else -1,
        precision=pipe_config.precision,
        validation_sigmas=list(TINY_SIGMAS if is_tiny else RELEASED_SIGMAS),
        model_manager_config=Predict2ModelManagerConfig(dit_path=dit_path),
        pipe_config=for_training(pipe_config, is_tiny=is_tiny),
    )
    return dict(
        trainer=dict(distributed_parallelism="ddp" if is_tiny else "fsdp"),
        model=L(Predict2Video2WorldActionConditionedModel)(config=config, _recursive_=False),
    )


def predict2p5(model_size: str, network: str) -> dict[str, Any]:
    """The group entry of a model with Predict2.5's loss, from its pre-trained weights, which are told no actions.

    Every clip has one given frame and the text of the empty prompt, one embedding for all.
    """
    is_tiny = model_size == "tiny"
    pipe_config = get_cosmos_predict2p5_action_conditioned_pipeline(model_size=model_size, network=network)
    config = Predict2p5Video2WorldModelConfig(
        fsdp_shard_size=0 if is_tiny else 8,
        precision=pipe_config.precision,
        train_time_shift=pipe_config.flow.shift if pipe_config.flow is not None else 5.0,
        conditional_frames_probs=None,
        validation_sigmas=list(TINY_SIGMAS if is_tiny else RELEASED_SIGMAS),
        model_manager_config=Predict2ModelManagerConfig(
            dit_path="" if is_tiny else get_predict2p5_dit_path(model_size=model_size, release="pre-trained")
        ),
        text=TrainingTextConfig(constant_path="" if is_tiny else get_predict25_empty_text()),
        pipe_config=for_training(pipe_config, is_tiny=is_tiny),
    )
    return dict(
        trainer=dict(distributed_parallelism="ddp" if is_tiny else "fsdp"),
        model=L(Predict2p5ActionConditionedModel)(config=config, _recursive_=False),
    )


def models() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "predict2_v2w_2b_action_conditioned_fsdp", predict2("2B", "flat")
    yield "predict2_v2w_2b_action_chunk_conditioned_fsdp", predict2("2B", "chunk")
    yield "predict2_v2w_tiny_action_conditioned", predict2("tiny", "chunk")
    yield "predict2p5_v2w_2b_action_conditioned_fsdp", predict2p5("2B", "flat")
    yield "predict2p5_v2w_2b_action_chunk_conditioned_fsdp", predict2p5("2B", "chunk")
    yield "predict2p5_v2w_tiny_action_conditioned", predict2p5("tiny", "chunk")


def nets() -> Iterator[tuple[str, Any]]:
    """Networks by their published names, for another one than the model's."""
    numbers = NETWORKS["2B Predict2.5"]
    yield "cosmos_v1_2B_action_conditioned", network_node("flat", 7, numbers)
    yield "cosmos_v1_2B_action_chunk_conditioned", network_node("chunk", 7, numbers)


def register() -> None:
    store = ConfigStore.instance().store
    for name, node in models():
        store(group="model", package="_global_", name=name, node=node)
    for name, node in nets():
        store(group="net", package="model.config.pipe_config.net", name=name, node=node)
