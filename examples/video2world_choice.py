# SPDX-License-Identifier: Apache-2.0
"""Which model examples/video2world.py runs: by its flags, and by the run that the weights come from."""

import argparse
import logging
import os
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


def choose_model(args: argparse.Namespace) -> Choice:
    """The pipeline's config and weights: what no flag says is as in the run that the weights come from."""
    from cosmos_predict2.checkpoints import parse_lora
    from cosmos_predict2.configs.base.config_video2world import (
        SIZES,
        get_cosmos_predict2_video2world_pipeline,
        get_dit_path,
    )
    from cosmos_predict2.pipelines.recorded_run import recorded_run

    if args.random_weights and args.dit_path:
        raise ConfigError(f"--random_weights and --dit_path {args.dit_path}: give one of them.")
    sources = [args.dit_path] if args.dit_path else [parse_lora(adapter)[0] for adapter in args.lora]
    run = next((found for path in sources if (found := recorded_run(path)) is not None), None)
    trained = run.model_size(SIZES) if run is not None else None
    size = args.model_size or trained or "2B"
    if run is not None and trained not in (None, size):
        raise ConfigError(
            f"--model_size {size}, but {run.folder} trained a {trained} model. Leave --model_size out, or give weights"
            f" of a {size} model."
        )
    variant = dict(model_size=size, resolution=args.resolution or "", fps=args.fps or 0, natten=args.natten)
    config = get_cosmos_predict2_video2world_pipeline(**variant)
    aspect_ratio = args.aspect_ratio or SIZES[size].aspect_ratio
    if run is not None:
        aspect_ratio = follow(run, config, args) or aspect_ratio
    dit_path = args.dit_path
    if not dit_path and not args.random_weights:
        is_there = run is not None and run.dit_path and os.path.exists(run.dit_path)
        dit_path = run.dit_path if run is not None and is_there else get_dit_path(**variant)
    return Choice(size, config, aspect_ratio, dit_path)


def follow(run: Any, config: Any, args: argparse.Namespace) -> str | None:
    """Make the config that of the run but for what the flags say, and tell where they differ; the aspect ratio of the
    run where the flags give none."""
    state_t, fps = config.state_t, config.fps
    resolution, aspect_ratio = run.shape
    run.apply_to(config)
    log.info("run: %s: %s", run.folder, run)
    asked = [("--resolution", args.resolution, resolution), ("--fps", args.fps, run.fps)]
    asked += [("--aspect_ratio", args.aspect_ratio, aspect_ratio)]
    for flag, wanted, trained in asked:
        if wanted is not None and trained is not None and wanted != trained:
            log.warning("%s %s, but %s was trained at %s: %s", flag, wanted, run.folder, trained, run)
    if args.fps is not None and args.fps != run.fps:
        config.state_t, config.fps = state_t, fps
    config.resolution = args.resolution or resolution
    return args.aspect_ratio or aspect_ratio
