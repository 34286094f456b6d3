# SPDX-License-Identifier: Apache-2.0
"""Predict whether a training run fits: memory of a GPU, time of an iteration and of the run, and what to change."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.tools.plan.advice import on_one_card
from cosmos_predict2.tools.plan.report import CARDS, MARGIN, as_text, as_values, cards_text, cards_values, make_plan
from cosmos_predict2.tools.plan.speed import GB, GPUS, find_gpu
from cosmos_predict2.tools.plan.workload import read_workload
from imaginaire import command_line
from imaginaire.config.compose import compose
from imaginaire.errors import ConfigError

DEFAULT_CONFIG = "cosmos_predict2/configs/base/config.py"
_EPILOG = """\
Nothing is built, downloaded or read from the data: only the configuration counts, as for scripts.train. All figures
are estimates. Exit code: 0 it fits, 1 it does not, 2 the configuration cannot run.

examples:
  python -m scripts.plan --gpus 8 --gpu H100 -- experiment=predict2_video2world_training_2b_groot_gr1_480
  python -m scripts.plan --one_card -- experiment=predict2_video2world_training_2b_groot_gr1_480
  python -m scripts.plan --gpu RTX-4090 -- experiment=NAME model.config.train_architecture=lora
  python -m scripts.plan --gpus 2 --gpu_memory 24 --json plan.json -- experiment=NAME optimizer=adamw
"""


def _parser() -> command_line.Parser:
    parser = command_line.parser("scripts.plan", __doc__, _EPILOG)
    add = parser.add_argument
    add("--gpus", type=int, help="how many GPUs the run gets, on all nodes together (default: 8, of RTX cards 1)")
    add("--gpu", default="H100", help=f"which: {', '.join(GPUS)}")
    add(
        "--gpu_memory", type=command_line.above_zero, help="GB of one, as nvidia-smi counts (default: what the GPU has)"
    )
    add("--one_card", action="store_true", help=f"what fits one card of {', '.join(map(str, CARDS))} GB, and how")
    add("--config", default=DEFAULT_CONFIG, help="config file, or the saved config.yaml of a run")
    add("--json", metavar="FILE", help="write the figures to this file too; - prints them in place of the table")
    add("overrides", nargs="*", help="after --: experiment=NAME and dotted overrides, as for scripts.train")
    return parser


def run(args: argparse.Namespace) -> int:
    gpu = find_gpu(args.gpu)
    memory = gpu.memory if args.gpu_memory is None else args.gpu_memory
    config = compose(args.config, args.overrides)
    if args.one_card:
        work = read_workload(config, config.model_parallel.context_parallel_size)
        cards = {size: find_gpu(name) for size, name in CARDS.items()}
        found = {size: on_one_card(work, card, (1 - MARGIN) * card.memory * GB) for size, card in cards.items()}
        return show(cards_text(found), cards_values(found), args.json, fits=any(fits for _, fits in found.values()))
    num_gpus = gpu.usual_count if args.gpus is None else args.gpus
    plan = make_plan(read_workload(config, num_gpus), args.gpu, gpu, memory)
    return show(as_text(plan), as_values(plan), args.json, fits=plan.fits)


def show(text: str, values: dict[str, Any], path: str | None, *, fits: bool) -> int:
    """Print the text, or write the values; the exit code."""
    content = json.dumps(values, indent=2)
    print(content if path == "-" else text)
    if path and path != "-":
        try:
            Path(path).write_text(content + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {path} cannot be written: {error.strerror}.") from error
    return int(not fits)


if __name__ == "__main__":
    sys.exit(command_line.main(_parser(), run))
