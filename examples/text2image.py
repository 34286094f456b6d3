# SPDX-License-Identifier: Apache-2.0
"""A prompt becomes a picture."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file runs from a checkout as it is

from cosmos_predict2.world_model.options import Settings, VideoForm, VideoModel, VideoRequest
from examples import video2world
from examples.video2world import Jobs, Program
from imaginaire.command_line import values_of
from imaginaire.errors import ConfigError

SIZES = ["0.6B", "2B", "14B", "tiny"]
PICTURE = VideoForm(chunk_frames=1)


def add_flags(add: Callable[..., Any]) -> None:
    add("--distill_steps", type=int, choices=range(5), default=0, help="0: the distilled models are not here")
    add("--use_fast_tokenizer", action="store_true", help="not here: the usual tokenizer is taken without it")


def settle(args: argparse.Namespace) -> None:
    settle_stage(args)
    args.model_size = args.image_size
    if args.num_conditional_frames or args.input_path:
        raise ConfigError("Text2Image makes a picture from the prompt alone: leave --input_path and its frames out.")


def add_stage_flags(add: Callable[..., Any]) -> None:
    add_flags(add)
    add("--dit_path_text2image", default="", metavar="PATH", help="weights of the picture, in place of the released")


def choose(args: argparse.Namespace) -> Any:
    from cosmos_predict2.configs.base.config_text2image import choose_text2image

    return choose_text2image(values_of(VideoModel, args))


def pictures(args: argparse.Namespace, choice: Any, jobs: Jobs) -> Jobs:
    requests, settings = jobs
    return [replace(one, form=PICTURE) for one in requests], settings


PROGRAM = Program(
    "Make pictures from prompts.",
    add_flags,
    defaults={"save_path": "output/generated_image.jpg", "negative_prompt": "", "num_conditional_frames": 0},
    model_flags={"model_size": {"choices": SIZES, "type": str}},
    settle=settle,
    choose=choose,
    plan=pictures,
)
main = partial(video2world.main, program=PROGRAM)


# A stage of other programs, on rank 0 ---------------------------------------------------------------------------------

VALUES = ("num_steps", "device", "dtype", "tokenizer_path", "checkpoint_dir", "prompt_embeddings")  # of both stages
SWITCHES = (
    *("random_weights", "disable_guardrail", "offload_text_encoder", "downcast_text_encoder", "text_encoder_8bit"),
    "use_cuda_graphs",
)


def first_pictures(
    args: argparse.Namespace, choice: Any, requests: list[VideoRequest], strength: float = 1.0
) -> list[VideoRequest]:
    """The requests of videos with a picture, <out>_temp.jpg, to begin with: made of the prompt, or of the clip that is
    edited."""
    from cosmos_predict2.world_model.assembly import check_parts

    check_parts(choice.config.net, choice.dit_path, [choice.config.tokenizer])  # of the video, before the pictures
    own: dict[str, Any] = dict(num_conditional_frames=0, input_path="", negative_prompt="", form=PICTURE)
    begun = [replace(one, input_path=f"{os.path.splitext(one.save_path)[0]}_temp.jpg") for one in requests]

    def plan(_args: argparse.Namespace, _choice: Any, jobs: Jobs) -> Jobs:
        assert isinstance(jobs[1], Settings)
        sampling = replace(jobs[1].sampling, strength=strength)
        made = [replace(one, **own, start_frame_idx=None, save_path=one.input_path) for one in begun]
        return made, replace(jobs[1], sampling=sampling)

    flags = [f"--aspect_ratio={choice.aspect_ratio}", f"--dit_path={args.dit_path_text2image}"]
    flags += [f"--model_size={args.image_size}"] * bool(args.image_size and not args.dit_path_text2image)
    flags += [f"--{name}={value}" for name in VALUES if (value := getattr(args, name)) is not None]
    flags += [f"--{name}" for name in SWITCHES if getattr(args, name)]
    program = replace(PROGRAM, plan=plan)
    of_images = video2world.parse(flags, program)
    of_images.is_stage = True
    prepared = video2world.prepare(of_images, program)
    if prepared.make_videos is None or prepared.make_videos(prepared.make_pipeline):
        raise ConfigError("The pictures that the videos begin with could not be made; the log has the reasons.")
    return [replace(one, num_conditional_frames=1, start_frame_idx=None) for one in begun]


def settle_stage(args: argparse.Namespace) -> None:
    """The flags of a program with this stage: there is no video model of 0.6B."""
    if args.distill_steps or args.use_fast_tokenizer:
        raise ConfigError("--distill_steps and --use_fast_tokenizer choose weights that are not here. Leave them out.")
    args.image_size = args.model_size
    args.model_size = "2B" if args.model_size == "0.6B" else args.model_size


if __name__ == "__main__":
    sys.exit(main())
