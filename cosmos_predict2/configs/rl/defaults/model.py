# SPDX-License-Identifier: Apache-2.0
"""Group ``model``, the part of reinforcement learning: the Video2World models with ``model.config.rl``."""

from functools import partial
from typing import Any

from cosmos_predict2.configs.action_conditioned.defaults.model import from_action_weights
from cosmos_predict2.configs.base.config_video2world import get_cosmos_predict2_video2world_pipeline, get_dit_path
from cosmos_predict2.configs.base.config_wan2pt1 import NETS as WAN_NETS
from cosmos_predict2.configs.base.defaults.model import SHARD_SIZE, predict2p5_video2world, training_entry
from cosmos_predict2.configs.base.defaults.wan2pt1 import wan2pt1
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.clips.own_frames import OwnFramesRLModel, Predict2OwnFramesRLConfig
from cosmos_predict2.rl.config import Predict2p5RLConfig, Predict2RLConfig
from imaginaire.config import register_group


def predict2(model_size: str, shard_size: int) -> dict[str, Any]:
    """The group entry of one Predict2 size, from its released weights, or from the tiny base."""
    is_tiny = model_size == "tiny"
    entry = training_entry(
        Predict2RLConfig,
        get_cosmos_predict2_video2world_pipeline(model_size=model_size),
        is_tiny=is_tiny,
        dit_path=get_dit_path(model_size=model_size),
        model=FlowGRPOModel,
        fsdp_shard_size=shard_size,
    )
    if is_tiny:
        entry["model"].config.pipe_config.video_noise_factor = 8.0
    return entry


def with_actions(
    model_size: str,
    config_class: type[Predict2RLConfig] = Predict2RLConfig,
    model: type[FlowGRPOModel] = FlowGRPOModel,
) -> dict[str, Any]:
    """The group entry of one size of Predict2 with actions, from its released weights, or those of the code."""
    network = "chunk" if model_size == "tiny" else "flat"
    return from_action_weights(model_size, network, SHARD_SIZE.get(model_size, 0), config_class, model)


def register() -> None:
    entries = {}
    for size, shard in {"tiny": 0, **SHARD_SIZE}.items():
        name, flow = f"video2world_rl_{size.lower()}", (Predict2p5RLConfig, FlowGRPOModel)
        entries[f"predict2_{name}"] = partial(predict2, size, shard)
        entries[f"predict2p5_{name}"] = partial(predict2p5_video2world, size, shard, *flow)
    for kind, size in WAN_NETS:
        name = f"wan2pt1_{kind}_video2world_rl_{size.lower().replace('.', 'pt')}"
        entries[name] = partial(wan2pt1, kind, size, Predict2p5RLConfig, FlowGRPOModel)
    own = dict(config_class=Predict2OwnFramesRLConfig, model=OwnFramesRLModel)
    for size in ("tiny", "2B"):
        entries[f"predict2_video2world_action_rl_{size.lower()}"] = partial(with_actions, size)
        entries[f"predict2_video2world_action_own_frames_rl_{size.lower()}"] = partial(with_actions, size, **own)
    register_group("model", entries, package="_global_")
