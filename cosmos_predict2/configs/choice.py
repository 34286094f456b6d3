# SPDX-License-Identifier: Apache-2.0
"""The choice of the model to run: by its name and size, by the run that the weights come from, or by the weights.

    choice = choose_model(VideoModel(dit_path="checkpoints/.../iter_000001000.pt"))
    choice = choose_action_model(ActionModel(model_size="tiny"))

Whatever no flag sets is as the card of the weights records it.
"""

import logging
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attrs

from cosmos_predict2.actions.transforms import ACTION_SCALE, relative_pose
from cosmos_predict2.checkpoints import checkpoint_dir
from cosmos_predict2.checkpoints.adapters import parse_lora
from cosmos_predict2.checkpoints.card import ModelCard, read_card
from cosmos_predict2.checkpoints.dit_loading import require_transform
from cosmos_predict2.checkpoints.dit_weights import action_network
from cosmos_predict2.configs.action_conditioned.networks import (
    SIZES,
    get_action_dit_path,
    get_cosmos_predict2_action_conditioned_pipeline,
)
from cosmos_predict2.configs.base import config_predict2p5, config_video2world
from cosmos_predict2.data.video import media
from cosmos_predict2.nn.action_dit import ChunkActionDiT
from cosmos_predict2.pipelines.flags import ActionModel, Model, VideoModel
from cosmos_predict2.pipelines.recorded_run import apply_card, apply_text, place_tokenizer, read_and_warn
from cosmos_predict2.released import get_cosmos_predict25_checkpoint, released_but_absent
from cosmos_predict2.tokenizers.sizes import latent_frames, pixel_frames, size_of
from cosmos_predict2.world_model.config import FlowConfig
from imaginaire.buildable import target_of
from imaginaire.checkpoint.weight_files import latest
from imaginaire.config.lazy_config import LazyCall
from imaginaire.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The model that the flags choose."""

    config: Any  # Video2WorldPipelineConfig, or one for actions, its action_transform set
    dit_path: str  # empty: random weights
    model_size: str
    card: ModelCard  # of the weights
    aspect_ratio: str = ""

    @property
    def run(self) -> ModelCard | None:
        """The card, where it suffices to build the pipeline; else None."""
        return self.card if self.card.has_pipeline else None

    @property
    def video_size(self) -> tuple[int, int] | None:
        """(height, width) of the clips that the run was trained on."""
        return None if self.run is None else self.run.video_size

    @property
    def fps(self) -> float:
        """Frames per second of the clips that the run was trained on, or of the model's."""
        return float(self.config.fps if self.run is None else self.run.fps)


# Video2World ----------------------------------------------------------------------------------------------------------


def choose_model(flags: VideoModel, input_path: str | None = None) -> Choice:
    """The Video2World pipeline's config and weights; of a run that recorded no frame rate, that of an input clip."""
    _use_checkpoint_dir(flags)
    if flags.dit_path and (flags.model or flags.random_weights):
        other = f"--model {flags.model}" if flags.model else "--random_weights"
        raise ConfigError(f"{other} and --dit_path {flags.dit_path}: both name weights; give one of them.")
    card = ModelCard() if flags.model else _card_of(flags)
    is_predict2p5 = bool(flags.model) or card.is_predict2p5
    if card.problem and not card.has_pipeline:  # loading reports it; until then the path decides
        is_predict2p5 = is_predict2p5 or "Predict2.5" in card.path
    family: Any = config_predict2p5 if is_predict2p5 else config_video2world
    trained = flags.model.partition("/")[0] if flags.model else _size_of(card, family.SIZES)
    size = _agreed_size(flags, trained)
    fps = int(flags.fps) if flags.fps and flags.fps in family.SIZES[size].rates else 0
    variant: dict[str, Any] = dict(model_size=size, resolution=flags.resolution or "", fps=fps)
    if is_predict2p5:
        if flags.natten:
            raise ConfigError("--natten is a variant of Predict2; Predict2.5 has none.")
        config = config_predict2p5.get_cosmos_predict2p5_video2world_pipeline(**variant)
        config.state_t = config.state_t if size == "tiny" else latent_frames(config_predict2p5.NUM_FRAMES)
        log.info("model: Predict2.5 %s", size)
    else:
        variant["natten"] = flags.natten
        config = config_video2world.get_cosmos_predict2_video2world_pipeline(**variant)
    run = card if card.has_pipeline else None
    aspect_ratio = flags.aspect_ratio or family.SIZES[size].aspect_ratio
    if run is not None:
        aspect_ratio = _follow(run, config, flags, aspect_ratio)
    elif flags.tokenizer_path:
        place_tokenizer(config, flags.tokenizer_path)
    for adapter in flags.lora if flags.dit_path else ():
        if (of_adapter := read_card(parse_lora(adapter)[0])).texts:  # adapters were trained last, so theirs counts
            apply_text(of_adapter, config)
    if flags.fps is not None:
        if run is None and not fps:
            log.warning("--fps %g is the rate of the mp4: the weights make %g frames per second", flags.fps, config.fps)
        config.fps = flags.fps
    elif run is not None and run.frame_rate is None and input_path and media.kind_of(input_path) == "video":
        config.fps = media.probe_video(input_path).fps
    if flags.num_frames is not None:
        if flags.num_frames < 5 or flags.num_frames % 4 != 1:
            own = pixel_frames(config.state_t)
            raise ConfigError(f"--num_frames {flags.num_frames}: 1 + 4k, 5 at least; this model makes {own}.")
        config.state_t = latent_frames(flags.num_frames)
    config.guardrail_config.checkpoint_dir = config.prompt_refiner_config.checkpoint_dir = checkpoint_dir()
    return Choice(config, _video_weights(flags, run, is_predict2p5, variant), size, card, aspect_ratio)


def _use_checkpoint_dir(flags: Model) -> None:
    if flags.checkpoint_dir:
        os.environ["COSMOS_PREDICT2_ARGS"] = f"--checkpoints {shlex.quote(flags.checkpoint_dir)}"


def _card_of(flags: Model) -> ModelCard:
    """The card of the weights; where only adapters are named, of the first one that lies in a run."""
    if why := released_but_absent(flags.dit_path):
        raise ConfigError(f"--dit_path {flags.dit_path}: {why}.")
    if flags.dit_path:
        return read_and_warn(flags.dit_path)
    cards = (read_and_warn(parse_lora(adapter)[0]) for adapter in flags.lora)
    return next((card for card in cards if card.has_pipeline), ModelCard())


def _size_of(card: ModelCard, sizes: Mapping[str, Any]) -> str | None:
    """The name of the size of weights, by their record or their shapes; None where they have another, or none."""
    if card.has_pipeline:
        return card.model_size(sizes)
    found = card.family and (card.family.width, card.family.num_blocks)
    return next((n for n, size in sizes.items() if (size.net["model_channels"], size.net["num_blocks"]) == found), None)


def _agreed_size(flags: Model, trained: str | None) -> str:
    size = flags.model_size or trained or "2B"
    if trained not in (None, size):
        raise ConfigError(f"--model_size {size}, but the weights are of a {trained} model. Leave --model_size out.")
    return size


def _video_weights(flags: VideoModel, run: ModelCard | None, is_predict2p5: bool, variant: Mapping[str, Any]) -> str:
    """The path of the weights; empty for random ones."""
    if flags.dit_path or flags.random_weights:
        return flags.dit_path
    if run is not None and run.base and os.path.exists(run.base):
        return run.base
    if flags.model:
        return get_cosmos_predict25_checkpoint(flags.model)
    if is_predict2p5:
        return config_predict2p5.get_predict2p5_dit_path(model_size=variant["model_size"], release="pre-trained")
    return config_video2world.get_dit_path(**variant)


def _follow(run: ModelCard, config: Any, flags: VideoModel, aspect_ratio: str) -> str:
    """Make the config that of the run but for the flags, with a warning where they differ; gives the aspect ratio."""
    state_t, fps = config.state_t, config.fps
    resolution, ratio = run.shape
    apply_card(run, config, tokenizer_path=flags.tokenizer_path)
    log.info("run: %s: %s", run.source, run)
    for flag, wanted, trained in (
        ("--resolution", flags.resolution, resolution),
        ("--aspect_ratio", flags.aspect_ratio, ratio),
        ("--fps", flags.fps and f"{flags.fps:g}", f"{run.fps:g}"),
        ("--num_frames", flags.num_frames, pixel_frames(run.state_t)),
    ):
        if None not in (wanted, trained) and wanted != trained:
            log.warning("%s %s, but %s was trained at %s: %s", flag, wanted, run.source, trained, run)
    if fps == flags.fps != run.fps:  # the length of the released model of this rate
        config.state_t = state_t
    config.resolution = flags.resolution or resolution
    if ratio is None:
        warn_of_size(run, size_of(config.resolution, aspect_ratio))
        return aspect_ratio
    return flags.aspect_ratio or ratio


def warn_of_size(run: ModelCard, size: tuple[int, int]) -> None:
    """Warn of frames of another (height, width) than the run's clips, where those are recorded."""
    if run.video_size is None:
        return
    trained = (len(run.views) * run.video_size[0], run.video_size[1])
    if trained != tuple(size):
        log.warning("frames of %d,%d (height, width), but %s was trained at %d,%d", *size, run.source, *trained)


# With actions ---------------------------------------------------------------------------------------------------------


def choose_action_model(flags: ActionModel) -> Choice:
    """The pipeline's config and weights of a model with actions; its network, of a bare file, is that of its shapes."""
    _use_checkpoint_dir(flags)
    released = get_action_dit_path(model_size=flags.model_size or "2B") if not flags.dit_path else ""
    card = read_and_warn(released or latest(flags.dit_path))
    run = card if card.has_pipeline else None
    sizes = {name: get_cosmos_predict2_action_conditioned_pipeline(model_size=name) for name in SIZES}
    size = _agreed_size(flags, run.model_size(sizes) if run is not None else None)
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
    config.net = LazyCall(network)(**known | arguments)
    is_flow = card.family is not None and card.family.text_projection_from is not None
    config.flow = FlowConfig() if is_flow else None
    log.info("network: %s of %s", network.__name__, "Predict2.5" if is_flow else "Predict2")
