# SPDX-License-Identifier: Apache-2.0
"""A prompt becomes a picture by Text2Image, and the picture a video by Video2World.

python examples/text2world.py --model_size 2B --prompt "..." --save_path out.mp4
python examples/text2world.py --model_size tiny --prompt "push the red puck to the green ring"
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file runs from a checkout as it is

from examples import text2image, video2world
from examples.video2world import Jobs, Program
from imaginaire.errors import ConfigError

VALUES = ("num_steps", "device", "dtype", "tokenizer_path", "checkpoint_dir", "prompt_embeddings")  # of both stages
SWITCHES = ("random_weights", "disable_guardrail", "offload_text_encoder", "downcast_text_encoder", "use_cuda_graphs")


def add_flags(add: Callable[..., Any]) -> None:
    text2image.add_flags(add)
    add("--dit_path_text2image", default="", metavar="PATH", help="weights of the picture, in place of the released")


def settle(args: argparse.Namespace) -> None:
    if args.num_conditional_frames or args.input_path:
        raise ConfigError("Text2World begins with a prompt: leave --input_path out (examples/video2world.py has it).")
    text2image.settle(args)
    args.image_size = args.model_size
    args.model_size = "2B" if args.model_size == "0.6B" else args.model_size  # of the video: there is no 0.6B one
    args.num_conditional_frames = 1


def plan(args: argparse.Namespace, choice: Any, jobs: Jobs) -> Jobs:
    """Make the pictures, each <out>_temp.jpg; the requests of the videos begin with them."""
    from cosmos_predict2.world_model.assembly import check_parts

    check_parts(choice.config.net, choice.dit_path, [choice.config.tokenizer])  # of the video, before the pictures
    requests, settings = jobs
    requests = [replace(one, input_path=f"{os.path.splitext(one.save_path)[0]}_temp.jpg") for one in requests]
    flags = [f"--aspect_ratio={choice.aspect_ratio}", f"--dit_path={args.dit_path_text2image}", "--overwrite"]
    flags += [f"--model_size={args.image_size}"] * bool(args.image_size and not args.dit_path_text2image)
    flags += [f"--{name}={value}" for name in VALUES if (value := getattr(args, name)) is not None]
    flags += [f"--{name}" for name in SWITCHES if getattr(args, name)]
    entries = [dict(prompt=one.prompt, seed=one.seed, output_image=one.input_path) for one in requests]
    with tempfile.TemporaryDirectory() as folder:
        batch = Path(folder, "pictures.json")
        batch.write_text(json.dumps(entries))
        of_images = video2world.parse([*flags, f"--batch_input_json={batch}"], text2image.PROGRAM)
        of_images.is_stage = True  # on rank 0 alone
        prepared = video2world.prepare(of_images, text2image.PROGRAM)
        if prepared.make_videos is None or prepared.make_videos(prepared.make_pipeline):
            raise ConfigError("The pictures that the videos begin with could not be made; the log has the reasons.")
    return requests, settings


main = partial(
    video2world.main,
    program=Program(
        "Make pictures from prompts, and videos that begin with them.",
        add_flags,
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
