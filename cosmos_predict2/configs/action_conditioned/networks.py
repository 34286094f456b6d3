# SPDX-License-Identifier: Apache-2.0
"""Action-conditioned Video2World by size and network: the numbers of the released models, and of the tiny one.

``flat``: every latent frame sees all 12 actions of a clip. ``chunk``: each sees the four that lead to it, so that clips
may have any length.
"""

from typing import Any

import attrs

from cosmos_predict2.configs.base.config_predict2p5 import get_cosmos_predict2p5_video2world_pipeline
from cosmos_predict2.configs.base.config_video2world import get_cosmos_predict2_video2world_pipeline
from cosmos_predict2.nn.action_dit import ChunkActionDiT, FlatActionDiT
from cosmos_predict2.released import get_cosmos_predict2_action_conditioned_checkpoint, tiny_action_path
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig, Video2WorldPipelineConfig
from imaginaire.config import L
from imaginaire.errors import ConfigError, near

SIZES = ("2B", "tiny")
ACTION_DIM = {"2B": 7, "tiny": 4}  # numbers of one action: of a robot arm, of the toy world
CHUNK = 12  # actions of a clip
STATE_T = 4  # latent frames
FPS = 4  # label of the frame rate, whatever that of the recording


def require_size(model_size: str) -> str:
    if model_size not in SIZES:
        raise ConfigError(f"No action-conditioned model is of size '{model_size}'. There are: {', '.join(SIZES)}.")
    return model_size


def network_node(network: str, action_dim: int, numbers: dict[str, Any]) -> Any:
    """The lazy node of a network for clips of 12 actions with so many numbers each."""
    if network == "flat":
        # One number for all of them, as in the release, so that a node of the other kind can be merged over this one.
        return L(FlatActionDiT)(action_dim=CHUNK * action_dim, **numbers)
    if network == "chunk":
        return L(ChunkActionDiT)(action_dim=action_dim, temporal_compression_ratio=4, **numbers)
    raise ConfigError(f"There is no network '{network}' for actions.{near(network, ('flat', 'chunk'))}")


def with_actions(base: Video2WorldPipelineConfig, network: str, action_dim: int) -> Video2WorldActionPipelineConfig:
    """A Video2World pipeline's config with actions: one conditioning frame, 12 actions, an action-conditioned
    network; no prompt refiner, as published."""
    fields = {field.name: getattr(base, field.name) for field in attrs.fields(Video2WorldPipelineConfig)}
    base.prompt_refiner_config.enabled = False
    numbers = {key: value for key, value in base.net.items() if not str(key).startswith("_")}
    own = dict(
        net=network_node(network, action_dim, numbers),
        state_t=STATE_T,
        min_num_conditional_frames=1,
        max_num_conditional_frames=1,
        chunk_size=CHUNK,
    )
    return Video2WorldActionPipelineConfig(**{**fields, **own})


def get_cosmos_predict2_action_conditioned_pipeline(
    *, model_size: str = "2B", network: str = "flat", resolution: str = "", fps: int = 0
) -> Video2WorldActionPipelineConfig:
    """The pipeline's config. Resolution and rate have one choice each, 480 and 4; for the tiny model 48 and 10."""
    only = ("48", 10) if require_size(model_size) == "tiny" else ("480", FPS)
    if (asked := (resolution or only[0], fps or only[1])) != only:
        has = "resolution {} and {} frames per second, not {} and {}".format(*only, *asked)
        raise ConfigError(f"The action-conditioned {model_size} model has {has}.")
    base = get_cosmos_predict2_video2world_pipeline(model_size=model_size, resolution=only[0])
    base.fps = only[1]
    return with_actions(base, network, ACTION_DIM[model_size])


def get_cosmos_predict2p5_action_conditioned_pipeline(
    *, model_size: str = "2B", network: str = "chunk"
) -> Video2WorldActionPipelineConfig:
    """The config of a Predict2.5 pipeline with actions; its text is the embedding of the empty prompt."""
    is_tiny = require_size(model_size) == "tiny"
    base = get_cosmos_predict2p5_video2world_pipeline(model_size=model_size, resolution="48" if is_tiny else "480")
    base.fps = base.fps if is_tiny else FPS
    return with_actions(base, network, ACTION_DIM[model_size])


def get_action_dit_path(*, model_size: str = "2B") -> str:
    """The path of the released weights, which are of the flat network and trained on Bridge, or of the tiny model's,
    which come with the code."""
    if model_size == "tiny":
        return tiny_action_path()
    if model_size != "2B":
        raise ConfigError(f"No action-conditioned weights of size '{model_size}' were released: only 2B.")
    return get_cosmos_predict2_action_conditioned_checkpoint()
