# SPDX-License-Identifier: Apache-2.0
"""Which model examples/video2world.py runs: by its flags, by the run that the weights come from, or by the weights."""

import argparse
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """The model that the flags and the run of the weights ask for."""

    model_size: str
    config: Any  # Video2WorldPipelineConfig
    aspect_ratio: str
    dit_path: str  # empty: random weights


@dataclass(frozen=True)
class Weights:
    """What is known of the weights that the flags name."""

    run: Any  # ModelCard that suffices to build the pipeline, or None
    is_predict2p5: bool
    model_size: str | None


def choose_model(args: argparse.Namespace) -> Choice:
    """The pipeline's config and weights: what no flag says is as in the run that the weights come from."""
    from cosmos_predict2.checkpoints import parse_lora, read_card
    from cosmos_predict2.configs.base import config_predict2p5, config_video2world
    from cosmos_predict2.data.video import media
    from cosmos_predict2.pipelines.recorded_run import apply_text
    from cosmos_predict2.released import get_cosmos_predict25_checkpoint

    if args.random_weights and args.dit_path:
        raise ConfigError(f"--random_weights and --dit_path {args.dit_path}: give one of them.")
    if args.model and args.dit_path:
        raise ConfigError(f"--model {args.model} and --dit_path {args.dit_path}: both name weights; give one of them.")
    found = look_at_weights(args, config_video2world.SIZES)
    run, size = found.run, args.model_size or found.model_size or "2B"
    if found.model_size not in (None, size):
        whose = f"{run.source} trained" if run is not None else f"{args.model or args.dit_path} is of"
        raise ConfigError(
            f"--model_size {size}, but {whose} a {found.model_size} model. Leave --model_size out, or give weights of a"
            f" {size} model."
        )
    rates = (config_predict2p5 if found.is_predict2p5 else config_video2world).SIZES[size].rates
    fps = int(args.fps) if args.fps in rates else 0
    variant: dict[str, Any] = dict(model_size=size, resolution=args.resolution or "", fps=fps)
    if found.is_predict2p5:
        if args.natten:
            raise ConfigError("--natten is a variant of Predict2; Predict2.5 has none.")
        config = config_predict2p5.get_cosmos_predict2p5_video2world_pipeline(**variant)
        config.state_t = (
            config.state_t if size == "tiny" else latent_frames_of(config_predict2p5.NUM_FRAMES, config.state_t)
        )
        aspect_ratio = config_predict2p5.SIZES[size].aspect_ratio
        log.info("model: Predict2.5 %s", size)
    else:
        variant["natten"] = args.natten
        config = config_video2world.get_cosmos_predict2_video2world_pipeline(**variant)
        aspect_ratio = config_video2world.SIZES[size].aspect_ratio
    aspect_ratio = args.aspect_ratio or aspect_ratio
    if run is not None:
        aspect_ratio = follow(run, config, args) or aspect_ratio
        warn_of_size(run, config.resolution, aspect_ratio)
    for path in (parse_lora(adapter)[0] for adapter in args.lora if args.dit_path):
        if (card := read_card(path)).texts:  # adapters were trained last, so theirs counts
            apply_text(card, config)
    if args.fps is not None:
        if run is None and not fps:
            log.warning("--fps %g is the rate of the mp4: the weights make %g frames per second", args.fps, config.fps)
        config.fps = args.fps
    elif run is not None and run.frame_rate is None and args.input_path and media.kind_of(args.input_path) == "video":
        config.fps = media.probe_video(args.input_path).fps  # the run did not record that of its clips
    if args.num_frames is not None:
        config.state_t = latent_frames_of(args.num_frames, config.state_t)
    dit_path = args.dit_path
    if not dit_path and not args.random_weights:
        if run is not None and run.base and os.path.exists(run.base):
            dit_path = run.base
        elif args.model:
            dit_path = get_cosmos_predict25_checkpoint(args.model)
        elif found.is_predict2p5:
            dit_path = config_predict2p5.get_predict2p5_dit_path(model_size=size, release="pre-trained")
        else:
            dit_path = config_video2world.get_dit_path(**variant)
    return Choice(size, config, aspect_ratio, dit_path)


def look_at_weights(args: argparse.Namespace, sizes: Mapping[str, Any]) -> Weights:
    """The run that the weights or the adapter lie in, else what names and shapes say; a released model by its name."""
    from cosmos_predict2.checkpoints import parse_lora
    from cosmos_predict2.pipelines.recorded_run import recorded_run
    from cosmos_predict2.released import PREDICT25, not_yet_here

    if args.model:
        return Weights(None, True, args.model.partition("/")[0])
    if args.dit_path.endswith(PREDICT25["2B/distilled"][1]):  # its shapes are those of the others
        raise ConfigError(f"--dit_path {args.dit_path}: {not_yet_here('2B/distilled')}.")
    sources = [args.dit_path] if args.dit_path else [parse_lora(adapter)[0] for adapter in args.lora]
    run = next((found for path in sources if (found := recorded_run(path)) is not None), None)
    if run is not None:
        return Weights(run, run.is_predict2p5, run.model_size(sizes))
    return weights_by_shapes(args.dit_path, sizes) if args.dit_path else Weights(None, False, None)


def weights_by_shapes(dit_path: str, sizes: Mapping[str, Any]) -> Weights:
    """Predict2.5 networks read their text through a projection. Why a file cannot be opened, loading reports."""
    from cosmos_predict2.checkpoints import read_card

    card = read_card(dit_path)
    if card.problem:
        return Weights(None, "Predict2.5" in dit_path, None)
    if card.family is None or not card.is_predict2p5:
        return Weights(None, False, None)
    as_large = {(size.net["model_channels"], size.net["num_blocks"]): name for name, size in sizes.items()}
    return Weights(None, True, as_large.get((card.family.width, card.family.num_blocks)))


def latent_frames_of(num_frames: int, own: int) -> int:
    """The latent frames of a video of so many frames; ``own`` are those of the model."""
    from cosmos_predict2.data.sizes import latent_frames, pixel_frames

    if num_frames < 5 or num_frames % 4 != 1:
        below = max(5, (num_frames - 1) // 4 * 4 + 1)
        raise ConfigError(
            f"--num_frames {num_frames}, but it must be 1 + 4k, and 5 at least. This model makes {pixel_frames(own)};"
            f" the nearest are {below} and {below + 4}."
        )
    return latent_frames(num_frames)


def follow(run: Any, config: Any, args: argparse.Namespace) -> str | None:
    """Make the config that of the run but for what the flags say, and tell where they differ; the aspect ratio of the
    run where the flags give none."""
    from cosmos_predict2.data.sizes import pixel_frames
    from cosmos_predict2.pipelines.recorded_run import apply_card

    state_t, fps = config.state_t, config.fps
    resolution, aspect_ratio = run.shape
    apply_card(run, config)
    log.info("run: %s: %s", run.source, run)
    asked = [("--resolution", args.resolution, resolution), ("--fps", args.fps and f"{args.fps:g}", f"{run.fps:g}")]
    asked += [("--aspect_ratio", args.aspect_ratio, aspect_ratio)]
    asked += [("--num_frames", args.num_frames, pixel_frames(run.state_t))]
    for flag, wanted, trained in asked:
        if wanted is not None and trained is not None and wanted != trained:
            log.warning("%s %s, but %s was trained at %s: %s", flag, wanted, run.source, trained, run)
    if fps == args.fps != run.fps:  # the length of the released model of this rate
        config.state_t = state_t
    config.resolution = args.resolution or resolution
    return args.aspect_ratio or aspect_ratio


def warn_of_size(run: Any, resolution: str, aspect_ratio: str) -> None:
    """Warn of frames of another size than the run's clips, where no resolution and aspect ratio name theirs: where they
    do, `follow` compares the flags."""
    from cosmos_predict2.data.sizes import size_of

    if run.video_size is None or run.shape[1] is not None:
        return
    if (size := size_of(resolution, aspect_ratio)) != run.video_size:
        (height, width), (own_height, own_width) = size, run.video_size
        log.warning(
            "frames of %dx%d (--resolution %s, --aspect_ratio %s), but %s was trained at %dx%d (width x height): %s",
            *(width, height, resolution, aspect_ratio, run.source, own_width, own_height, run),
        )
