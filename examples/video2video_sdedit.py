# SPDX-License-Identifier: Apache-2.0
"""A clip is edited: sampling begins in it, noised, in place of noise, and follows a prompt (SDEdit).

The strength is the share of the steps that are taken: near 0 the clip stays, at 1 nothing of it but its first frame,
which Text2Image edits before, by a strength of its own. It writes NAME.mp4, NAME_input.mp4, the clip as the model saw
it, and NAME_comparison.mp4, both with titles.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file runs from a checkout as it is

from examples import text2image, video2world
from examples.video2world import ROOT, Jobs, Program
from imaginaire.errors import ConfigError

TINY_CLIP = "assets/toy_world/clip.mp4"


def add_flags(add: Callable[..., Any]) -> None:
    text2image.add_stage_flags(add)
    first = "the same of the first frame, by Text2Image; 0: it stays as it is"
    add("--text2image_edit_strength", type=float, default=0.4, metavar="SHARE", help=first)
    strength = "share of the steps that are taken from the noised clip, above 0, at most 1"
    add("--video2world_edit_strength", type=float, default=0.8, metavar="SHARE", help=strength)


def settle(args: argparse.Namespace) -> None:
    if args.input_path is None and args.model_size == "tiny":
        args.input_path = str(ROOT / TINY_CLIP)
    if args.input_path is None and not args.batch_input_json:
        raise ConfigError("Name the clip that is edited with --input_video_path.")
    if args.text2image_edit_strength and args.num_conditional_frames != 1:
        raise ConfigError("An edited first frame is one: give --num_conditional_frames 1, or edit none by strength 0.")
    args.start_frame_idx = args.start_frame_idx or 0
    text2image.settle_stage(args)


def plan(args: argparse.Namespace, choice: Any, jobs: Jobs) -> Jobs:
    from cosmos_predict2.pipelines.requests import check_outputs
    from cosmos_predict2.pipelines.video2world import check_input
    from cosmos_predict2.tokenizers.sizes import pixel_frames

    requests, settings = jobs
    assert not isinstance(settings, list)
    form = replace(requests[0].form, chunk_frames=pixel_frames(choice.config.state_t))
    start = args.start_frame_idx
    edits = [replace(one, edited_path=one.input_path, edited_start=start, form=form) for one in requests]
    for one in edits:
        check_outputs(_beside(one.save_path), [one.input_path])
        check_input(one.edited_path, pixel_frames(choice.config.state_t), start)
    sampling = replace(settings.sampling, strength=args.video2world_edit_strength)
    if args.text2image_edit_strength:
        edits = text2image.first_pictures(args, choice, edits, args.text2image_edit_strength)
    return edits, replace(settings, sampling=sampling)


def after(args: argparse.Namespace, choice: Any, jobs: Jobs) -> None:
    """Write the clips as they were given, and beside what was made of them."""
    from cosmos_predict2.callbacks.draw_samples import side_by_side
    from cosmos_predict2.data.video import media
    from cosmos_predict2.pipelines.video2world import read_input

    for one in jobs[0]:
        if not os.path.isfile(one.save_path):  # it failed
            continue
        made, fps = media.read_video(one.save_path)
        size, crop = (made.shape[2], made.shape[3]), choice.config.input_crop
        given = read_input(one.edited_path, made.shape[1], size, one.edited_start, crop=crop)
        input_path, comparison_path = _beside(one.save_path)
        media.write_video(input_path, given, fps)
        media.write_video(comparison_path, side_by_side([[given, made]], ["input", "edited"]), fps)


def _beside(save_path: str) -> tuple[str, str]:
    stem = os.path.splitext(save_path)[0]
    return f"{stem}_input.mp4", f"{stem}_comparison.mp4"


main = partial(
    video2world.main,
    program=Program(
        "Edit a clip by a prompt.",
        add_flags,
        older={"--input_video_path": "--input_path", "--dit_path_video2world": "--dit_path"},
        shares_input=True,
        model_flags=text2image.PROGRAM.model_flags,
        settle=settle,
        plan=plan,
        after=after,
    ),
)

if __name__ == "__main__":
    sys.exit(main())
