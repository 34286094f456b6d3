# SPDX-License-Identifier: Apache-2.0
"""A prompt becomes a picture.

python examples/text2image.py --model_size 2B --prompt "..." --save_path image.jpg
python examples/text2image.py --model_size tiny --prompt "push the red puck to the green ring"
"""

import argparse
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
from imaginaire.command_line import values_of
from imaginaire.errors import ConfigError

SIZES = ["0.6B", "2B", "14B", "tiny"]


def add_flags(add: Callable[..., Any]) -> None:
    add("--distill_steps", type=int, choices=range(5), default=0, help="0: the distilled models are not here")
    add("--use_fast_tokenizer", action="store_true", help="not here: the usual tokenizer is taken without it")


def settle(args: argparse.Namespace) -> None:
    if args.distill_steps or args.use_fast_tokenizer:
        raise ConfigError("--distill_steps and --use_fast_tokenizer choose weights that are not here. Leave them out.")
    if args.num_conditional_frames or args.input_path:
        raise ConfigError("Text2Image makes a picture from the prompt alone: leave --input_path and its frames out.")


def choose(args: argparse.Namespace) -> Any:
    from cosmos_predict2.configs.base.config_text2image import choose_text2image

    return choose_text2image(values_of(VideoModel, args))


def pictures(args: argparse.Namespace, choice: Any, jobs: Jobs) -> Jobs:
    requests, settings = jobs
    return [replace(one, form=VideoForm(chunk_frames=1)) for one in requests], settings


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

if __name__ == "__main__":
    sys.exit(main())
