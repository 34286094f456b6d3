# SPDX-License-Identifier: Apache-2.0
"""Action-conditioned Video2World by size and network: the numbers of released models, and the choice of one to run.

``flat``: every latent frame sees all 12 actions of a clip. ``chunk``: each sees the four that lead to it, so that clips
may have any length.
"""

import logging
from pathlib import Path
from typing import Any

import attrs

from cosmos_predict2.actions.transforms import ACTION_SCALE, relative_pose
from cosmos_predict2.checkpoints.card import ModelCard
from cosmos_predict2.checkpoints.dit_loading import require_transform
from cosmos_predict2.checkpoints.dit_weights import action_network
from cosmos_predict2.configs.base.config_video2world import (
    Choice,
    agreed_size,
    get_cosmos_predict2_video2world_pipeline,
    get_cosmos_predict2p5_video2world_pipeline,
    use_checkpoint_dir,
)
from cosmos_predict2.nn.action_dit import ChunkActionDiT, FlatActionDiT
from cosmos_predict2.pipelines.recorded_run import apply_card, place_tokenizer, read_and_warn
from cosmos_predict2.released import TINY_ACTION, checkpoint_dir, get_cosmos_predict2_action_conditioned_checkpoint
from cosmos_predict2.world_model.config import FlowConfig, Video2WorldActionPipelineConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.options import ActionModel
from imaginaire.buildable import target_of
from imaginaire.checkpoint.weight_files import latest
from imaginaire.config import L
from imaginaire.errors import CheckpointError, ConfigError, near

log = logging.getLogger(__name__)

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
        return TINY_ACTION
    if model_size != "2B":
        raise ConfigError(f"No action-conditioned weights of size '{model_size}' were released: only 2B.")
    return get_cosmos_predict2_action_conditioned_checkpoint()


# Choice of the model to run -------------------------------------------------------------------------------------------


def choose_action_model(flags: ActionModel) -> Choice:
    """The pipeline's config and weights of a model with actions; its network, of a bare file, is that of its shapes."""
    use_checkpoint_dir(flags)
    released = get_action_dit_path(model_size=flags.model_size or "2B") if not flags.dit_path else ""
    card = read_and_warn(released or latest(flags.dit_path))
    run = card if card.has_pipeline else None
    sizes = {name: get_cosmos_predict2_action_conditioned_pipeline(model_size=name) for name in SIZES}
    size = agreed_size(flags, run.model_size(sizes) if run is not None else None)
    config = sizes[size]
    if run is not None:
        apply_card(run, config, tokenizer_path=flags.tokenizer_path)
        config.resolution, _ = run.shape
        log.info("run: %s: %s", run.source, run)
    elif (family := card.opened().family) is None or family.action_inputs is None:
        if family is None:
            runs = sorted(str(found.parent) for found in Path(card.path).glob("posttraining/video2world/*/checkpoints"))
            hint = f" Give one of its runs: {', '.join(runs)}." if runs else ""
            raise CheckpointError(f"{card.path} holds no weights of a video network.{hint}")
        raise CheckpointError(f"{card.path} is of {family}, without actions: use examples/video2world.py for it.")
    transform = require_transform(card, _transform_of_flags(flags))
    config.action_transform = transform.to_dict()
    if flags.chunk_size is not None and (flags.chunk_size < 4 or flags.chunk_size % 4):
        raise ConfigError(f"--chunk_size {flags.chunk_size}: a multiple of 4, 12 for example.")
    if run is None:
        if flags.tokenizer_path:
            place_tokenizer(config, flags.tokenizer_path)
        config.chunk_size = flags.chunk_size or config.chunk_size
        _fit_network(config, card, transform.dim)
    elif flags.chunk_size not in (None, config.chunk_size):
        if target_of(config.net) is not ChunkActionDiT:
            raise ConfigError(
                f"--chunk_size {flags.chunk_size}, but this network reads {config.chunk_size} actions at once."
            )
        log.warning("--chunk_size %d, but the run was trained on %d", flags.chunk_size, config.chunk_size)
        config.chunk_size = flags.chunk_size
    config.state_t = 1 + config.chunk_size // 4
    if flags.given_timestep is not None:
        if config.flow is None or not 0 <= flags.given_timestep < 1000:
            raise ConfigError(f"--given_timestep {flags.given_timestep:g}: from 0 to below 1000, of Predict2.5 alone.")
        config.flow = attrs.evolve(config.flow, conditional_frame_timestep=flags.given_timestep)
    config.guardrail_config.checkpoint_dir = checkpoint_dir()
    return Choice(config, card.path, size, card)


def _transform_of_flags(flags: ActionModel) -> Any:
    """The transform that the flags set; None where they set none."""
    if (flags.action_scaler, flags.gripper_scale, flags.use_quat) == (None, None, False):
        return flags.action_transform or None
    if flags.action_transform:
        raise ConfigError("--action_transform and --action_scaler, --gripper_scale or --use_quat: give one of them.")
    scale = ACTION_SCALE if flags.action_scaler is None else flags.action_scaler
    return relative_pose(scale, 1.0 if flags.gripper_scale is None else flags.gripper_scale, quaternion=flags.use_quat)


def _fit_network(config: Any, card: ModelCard, dim: int) -> None:
    """Make the config's network that of a file without a run: its kind and sizes are what its shapes show."""
    network, arguments = action_network(card.family, dim, config.chunk_size, source=card.path)
    own = ("action_dim", "num_action_per_chunk", "temporal_compression_ratio")
    known = {key: value for key, value in config.net.items() if not str(key).startswith("_") and key not in own}
    config.net = L(network)(**known | arguments)
    is_flow = card.family is not None and card.family.text_projection_from is not None
    config.flow = FlowConfig() if is_flow else None
    log.info("network: %s of %s", network.__name__, "Predict2.5" if is_flow else "Predict2")
