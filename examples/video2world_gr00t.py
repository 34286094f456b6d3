# SPDX-License-Identifier: Apache-2.0
"""Videos of robots by the released GR00T-Dreams models, 14B at 480p and 16 frames per second.

A prompt gets ``--prompt_prefix`` unless it begins with it. ``--dit_path`` has weights of your own in their place.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file runs from a checkout as it is

from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.released import GROOT_VARIANTS, get_cosmos_predict2_gr00t_checkpoint
from examples import video2world
from examples.video2world import Jobs, Program

PREFIX = "The robot arm is performing a task. "


def add_flags(add: Callable[..., Any], *, is_required: bool = True) -> None:
    add("--gr00t_variant", choices=GROOT_VARIANTS, required=is_required, help="the robot: GR1, or DROID's arm")
    add("--prompt_prefix", default=PREFIX, metavar="TEXT", help="put before prompts that do not begin with it")


def settle(args: argparse.Namespace) -> None:
    """Choose the weights and the size of the variant, where no flag, and no run's record, has others."""
    args.disable_prompt_refiner = True
    if args.model_size == "tiny":
        return
    if not args.dit_path:
        args.model_size = args.model_size or "14B"
        args.dit_path = get_cosmos_predict2_gr00t_checkpoint(gr00t_variant=args.gr00t_variant, root=args.checkpoint_dir)
    if not read_card(args.dit_path).has_pipeline:
        args.resolution = args.resolution or "480"


def prefixed(args: argparse.Namespace, choice: Any, jobs: Jobs) -> Jobs:
    requests, settings = jobs
    prefix = args.prompt_prefix
    needs = [bool(request.prompt.strip()) and not request.prompt.startswith(prefix.strip()) for request in requests]
    return [
        replace(one, prompt=prefix + one.prompt) if needed else one for one, needed in zip(requests, needs)
    ], settings


main = partial(
    video2world.main,
    program=Program("Make videos by the GR00T-Dreams models.", add_flags, settle=settle, plan=prefixed),
)

if __name__ == "__main__":
    sys.exit(main())
