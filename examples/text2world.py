# SPDX-License-Identifier: Apache-2.0
"""A prompt becomes a picture by Text2Image, and the picture a video by Video2World."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file runs from a checkout as it is

from examples import text2image, video2world
from examples.video2world import Jobs, Program
from imaginaire.errors import ConfigError


def settle(args: argparse.Namespace) -> None:
    if args.num_conditional_frames or args.input_path:
        raise ConfigError("Text2World begins with a prompt: leave --input_path out (examples/video2world.py has it).")
    text2image.settle_stage(args)
    args.num_conditional_frames = 1


def plan(args: argparse.Namespace, choice: Any, jobs: Jobs) -> Jobs:
    return text2image.first_pictures(args, choice, jobs[0]), jobs[1]


main = partial(
    video2world.main,
    program=Program(
        "Make pictures from prompts, and videos that begin with them.",
        text2image.add_stage_flags,
        defaults={"num_conditional_frames": 0},
        model_flags=text2image.PROGRAM.model_flags,
        older={"--dit_path_video2world": "--dit_path"},
        shares_input=True,
        settle=settle,
        plan=plan,
    ),
)

if __name__ == "__main__":
    sys.exit(main())
