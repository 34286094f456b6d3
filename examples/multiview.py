# SPDX-License-Identifier: Apache-2.0
"""Frames of several cameras of one scene, and a prompt, become their videos, side by side."""

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file runs from a checkout as it is

from cosmos_predict2.world_model.options import VideoForm, VideoModel
from examples import video2world
from examples.video2world import Jobs, Program
from imaginaire.command_line import at_least, values_of
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)


def add_flags(add: Callable[..., Any]) -> None:
    add("--n_views", type=at_least(1), metavar="N", help="cameras (default: those of the run; else 1)")
    given = "all frames of this view are given, counted from 0: for weights that were trained with ref_cam or any_cam"
    add("--given_view", type=at_least(0), metavar="N", help=given)


def settle(args: argparse.Namespace) -> None:
    if args.num_conditional_frames and not args.input_path:
        raise ConfigError(
            "There is no bundled clip of several cameras: give one with --input_path, or --num_conditional_frames 0."
        )
    args.disable_prompt_refiner = True  # it reads one picture and one prompt


def choose(args: argparse.Namespace) -> Any:
    from cosmos_predict2.configs.base.config_multiview import choose_multiview

    return choose_multiview(values_of(VideoModel, args), args.n_views)


def with_views(args: argparse.Namespace, choice: Any, jobs: Jobs) -> Jobs:
    from cosmos_predict2.pipelines.multiview import prompt_of_file
    from cosmos_predict2.tokenizers.sizes import pixel_frames

    requests, settings = jobs
    num_views, given = len(choice.config.net.view_ids), args.given_view
    if given is not None and given >= num_views:
        raise ConfigError(f"--given_view {given}, but there are views 0 to {num_views - 1}.")
    locations = choice.card.pipeline.get("condition_locations", ["first_random_n"])
    if bool({"ref_cam", "any_cam"} & set(locations)) != (given is not None):
        found = "without --given_view" if given is None else f"--given_view {given}"
        log.warning("%s, but the weights were trained with condition_locations=%s", found, locations)
    frames = pixel_frames(choice.config.state_t)
    size = None if args.resolution or args.aspect_ratio else choice.video_size
    form = VideoForm(size=size, chunk_frames=frames, num_views=num_views, given_view=given)
    made = []
    for one in requests:
        own: dict[str, Any] = dict(form=form, prompt=prompt_of_file(one.prompt, num_views))
        if given is not None:
            if not one.input_path:
                raise ConfigError(f"--given_view {given}: its frames are those of a clip, --input_path.")
            start = one.start_frame_idx or 0
            own |= dict(start_frame_idx=start, edited_path=one.input_path, edited_start=start)
        made.append(replace(one, **own))
    return made, settings


PROGRAM = Program(
    "Make videos of several cameras of one scene.",
    add_flags,
    model_flags={"model_size": {"choices": ["2B", "tiny"]}},
    settle=settle,
    choose=choose,
    plan=with_views,
)
main = partial(video2world.main, program=PROGRAM)

if __name__ == "__main__":
    sys.exit(main())
