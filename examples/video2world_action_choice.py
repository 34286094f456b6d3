# SPDX-License-Identifier: Apache-2.0
"""Which model examples/video2world_action.py runs: told by its weights, the run that they come from, and the flags."""

import argparse
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import attrs

from imaginaire.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ActionChoice:
    """The model that the flags and the weights ask for."""

    config: Any  # Video2WorldActionPipelineConfig, its action_transform set
    dit_path: str
    video_size: tuple[int, int] | None  # (height, width) of the clips that the run was trained on
    constant_text: str  # a file of the one embedding that the run was trained with; empty: none is known
    model_size: str
    card: Any = None  # ModelCard of the weights

    @property
    def run(self) -> Any:
        """The card, where it suffices to build the pipeline; else None."""
        return self.card if self.card is not None and self.card.has_pipeline else None

    @property
    def fps(self) -> float:
        """Frames per second of the clips that the run was trained on, or of the model's."""
        return float(self.config.fps if self.run is None else self.run.fps)


def choose_action_model(args: argparse.Namespace) -> ActionChoice:
    """The pipeline's config and weights: what no flag says is as in the run, or as the shapes of the weights tell."""
    from cosmos_predict2.checkpoints import read_card
    from cosmos_predict2.checkpoints.card_checks import require_transform
    from cosmos_predict2.configs.action_conditioned.networks import (
        SIZES,
        get_action_dit_path,
        get_cosmos_predict2_action_conditioned_pipeline,
    )
    from cosmos_predict2.pipelines.recorded_run import apply_card, warn_of_unknown
    from imaginaire.checkpoint.weight_files import latest

    dit_path = latest(args.dit_path) if args.dit_path else get_action_dit_path(model_size=args.model_size or "2B")
    card = read_card(dit_path)
    warn_of_unknown(card)
    run = card if card.has_pipeline else None
    sizes = {name: get_cosmos_predict2_action_conditioned_pipeline(model_size=name) for name in SIZES}
    trained = run.model_size(sizes) if run is not None else None
    size = args.model_size or trained or "2B"
    if run is not None and trained not in (None, size):
        raise ConfigError(
            f"--model_size {size}, but {run.source} trained a {trained} model. Leave --model_size out, or give weights"
            f" of a {size} model."
        )
    config = sizes[size]
    if run is not None:
        apply_card(run, config)
        config.resolution, _ = run.shape
        log.info("run: %s: %s", run.source, run)
    family = require_actions(card) if run is None else None
    transform = require_transform(card, asked_transform(args))
    config.action_transform = transform.to_dict()
    if run is None:
        fit_network(config, dit_path, args, transform.dim, family)
    elif args.chunk_size not in (None, config.chunk_size):
        follow_chunk_size(config, args.chunk_size)
    if args.given_timestep is not None:
        tell_given_frames(config, args.given_timestep)
    video_size = run.video_size if run is not None else None
    return ActionChoice(config, dit_path, video_size, constant_text(card), size, card)


def require_actions(card: Any) -> Any:
    """What network a file without a record is of; raises for one that takes no actions."""
    family = card.opened().family
    if family is None:
        raise CheckpointError(f"{card.path} is no video network. Choose weights of an action-conditioned one.")
    if family.action_inputs is None:
        raise CheckpointError(f"{card.path} is a {family}, without actions: use examples/video2world.py for it.")
    return family


def asked_transform(args: argparse.Namespace) -> Any:
    """The transform that flags ask for; None where they ask for none."""
    from cosmos_predict2.actions.transforms import ACTION_SCALE, relative_pose

    single = args.action_scaler is not None or args.gripper_scale is not None or args.use_quat
    if args.action_transform and single:
        raise ConfigError("--action_transform and --action_scaler, --gripper_scale or --use_quat: give one of them.")
    if not single:
        return args.action_transform or None
    scale = ACTION_SCALE if args.action_scaler is None else args.action_scaler
    gripper = 1.0 if args.gripper_scale is None else args.gripper_scale
    return relative_pose(scale, gripper, quaternion=args.use_quat)


def fit_network(config: Any, dit_path: str, args: argparse.Namespace, dim: int, family: Any) -> None:
    """Make the config's network that of a file without a run: its kind and sizes are what its shapes say."""
    from cosmos_predict2.checkpoints.families import action_network
    from cosmos_predict2.world_model.config import FlowConfig
    from imaginaire.config.lazy_config import LazyCall

    config.chunk_size = args.chunk_size or config.chunk_size
    config.state_t = state_t_of(config.chunk_size)
    network, arguments = action_network(family, dim, config.chunk_size, source=dit_path)
    known = {key: value for key, value in config.net.items() if not str(key).startswith("_")}
    for name in ("action_dim", "num_action_per_chunk", "temporal_compression_ratio"):
        known.pop(name, None)
    config.net = LazyCall(network)(**known | arguments)
    is_flow = family.text_projection_from is not None
    config.flow = FlowConfig() if is_flow else None
    release = "Predict2.5" if is_flow else "Predict2"
    log.info("network: %s of %s, told by %s", network.__name__, release, dit_path)


def follow_chunk_size(config: Any, chunk_size: int) -> None:
    """Another number of actions than the run's, which a network that sees them frame by frame takes."""
    if str(config.net["_target_"]).find("ChunkActionDiT") < 0:
        raise ConfigError(
            f"--chunk_size {chunk_size}, but this network reads {config.chunk_size} actions at once. Leave it out."
        )
    log.warning("--chunk_size %d, but the run was trained on %d", chunk_size, config.chunk_size)
    config.chunk_size, config.state_t = chunk_size, state_t_of(chunk_size)


def tell_given_frames(config: Any, timestep: float) -> None:
    """Ask a Predict2.5 network with a timestep of its own for the given frames."""
    if config.flow is None:
        raise ConfigError(
            f"--given_timestep {timestep:g} is of Predict2.5 weights; these are Predict2's, whose given frames have a"
            f" noise level of their own ({config.sigma_conditional:g}). Leave it out."
        )
    if not 0 <= timestep < 1000:
        raise ConfigError(f"--given_timestep {timestep:g}: 0 at least and below 1000, 0.1 for example.")
    config.flow = attrs.evolve(config.flow, conditional_frame_timestep=timestep)


def state_t_of(chunk_size: int) -> int:
    if chunk_size < 4 or chunk_size % 4:
        raise ConfigError(f"--chunk_size {chunk_size}: a multiple of 4, 12 for example.")
    return 1 + chunk_size // 4


def tell_differences(choice: ActionChoice, num_given: int, resolution: str, sizes: Collection[tuple[int, int]]) -> None:
    """Warn of given frames, and of (height, width) of first frames, that the weights were not trained with."""
    from cosmos_predict2.data.sizes import VIDEO_SIZES, pixel_frames

    run = choice.run
    most = (
        None
        if run is None or run.max_conditioning_frames is None
        else pixel_frames(max(1, run.max_conditioning_frames))
    )
    if most is not None and num_given > most:
        log.warning(
            "--num_conditional_frames %d, but %s was trained with %d at most (max_num_conditional_frames=%d): expect"
            " smeared frames",
            num_given,
            run.source,
            most,
            run.max_conditioning_frames,
        )
    elif most is None and num_given > 1:
        log.warning(
            "--num_conditional_frames %d, but %s does not say that it was trained with more than 1; the released"
            " weights were not, and smear then",
            num_given,
            choice.dit_path,
        )
    if run is None:
        return
    name, _ = run.shape
    known = {(height, width) for width, height in VIDEO_SIZES.get(name, {}).values()}
    trained = {run.video_size} if run.video_size else known
    for height, width in dict.fromkeys(sizes):
        if trained and (height, width) not in trained:
            asked = f"--resolution {resolution}" if resolution else "no --resolution"
            log.warning(
                "%s: frames of %d,%d (height, width), but %s was trained at %s", asked, height, width, run.source, run
            )


def constant_text(card: Any) -> str:
    """The file of the one embedding that weights were trained with: as recorded, or the released one beside them."""
    from cosmos_predict2.released import PREDICT25_EMPTY_TEXT
    from imaginaire import storage

    beside = storage.join(card.path.rpartition("/")[0], PREDICT25_EMPTY_TEXT.rpartition("/")[2])
    return card.constant_text or (beside if storage.exists(beside) else "")


def read_texts(args: argparse.Namespace, choice: ActionChoice, width: int) -> tuple[Any, Any]:
    """The text and the negative text of all samples, [1, S, E]; None for none."""
    from cosmos_predict2.text.constant_embedding import read_constant_embedding
    from cosmos_predict2.text.encoder_names import parse_name
    from cosmos_predict2.text.prompt_embeddings import read_prompt_embeddings
    from cosmos_predict2.text.trained_text import NO_TEXT, other_text

    path, trained = args.prompt_embeddings, choice.config.text_encoder_name
    if path is None:
        if args.prompt or args.negative_prompt:
            raise ConfigError(
                "--prompt and --negative_prompt need their embeddings: write them with python -m"
                " scripts.encode_prompts, and give the file with --prompt_embeddings."
            )
        if not choice.constant_text:
            if trained not in ("", NO_TEXT):
                log.warning(
                    "text: zeros, but %s was trained with captions encoded by %s: give --prompt, and its embedding"
                    " with --prompt_embeddings (python -m scripts.encode_prompts %s)",
                    choice.dit_path,
                    trained,
                    parse_name(trained).flags(),
                )
            elif choice.config.flow is not None:
                log.info("text: zeros; these weights saw an embedding of the empty prompt too (--prompt_embeddings)")
            return None, None
        path = choice.constant_text
    if str(path).endswith(".safetensors"):
        known = read_prompt_embeddings(path)
        if (problem := other_text(trained, known.name, known.values())) is not None:
            raise ConfigError(f"--prompt_embeddings {path} {problem}")
        found = [known.encode([text])[0] if text or not i else None for i, text in enumerate(texts_of(args))]
    elif args.prompt or args.negative_prompt:
        raise ConfigError(f"--prompt_embeddings {path} is one embedding, of no text: leave --prompt out.")
    else:
        found = [read_constant_embedding(path), None]
    if wrong := [row for row in found if row is not None and row.shape[1] != width]:
        raise CheckpointError(f"{path} has embeddings of width {wrong[0].shape[1]}, but this model takes {width}.")
    log.info("text: %s", path)
    text, negative = (None if row is None else row[None] for row in found)
    return text, negative


def texts_of(args: argparse.Namespace) -> tuple[str, str]:
    return args.prompt, args.negative_prompt
