# SPDX-License-Identifier: Apache-2.0
"""Say before a training run whether it fits: memory of a GPU, time of an iteration, and what to change."""

import argparse
import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the file also runs as python scripts/plan.py

from cosmos_predict2.tools.plan.report import as_text, as_values, make_plan
from cosmos_predict2.tools.plan.speed import GPUS, find_gpu
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
  python -m scripts.plan --gpus 2 --gpu_memory 24 --json plan.json -- experiment=NAME optimizer=adamw
"""


def _parser() -> command_line.Parser:
    parser = command_line.parser("scripts.plan", __doc__, _EPILOG)
    add = parser.add_argument
    add("--gpus", type=int, default=8, help="how many GPUs the run gets, on all nodes together")
    add("--gpu", default="H100", help=f"which: {', '.join(GPUS)}")
    add("--gpu_memory", type=float, help="GB of one, as nvidia-smi counts (default: what the GPU has)")
    add("--config", default=DEFAULT_CONFIG, help="config file, or the saved config.yaml of a run")
    add("--json", metavar="FILE", help="write the figures to this file too; - prints them in place of the table")
    add("overrides", nargs="*", help="after --: experiment=NAME and dotted overrides, as for scripts.train")
    return parser


def run(args: argparse.Namespace) -> int:
    gpu = find_gpu(args.gpu)
    memory = gpu.memory if args.gpu_memory is None else args.gpu_memory
    if not 0 < memory < math.inf:
        raise ConfigError(f"--gpu_memory {memory:g}: the GB of one GPU, such as 80.")
    work = read_workload(compose(args.config, args.overrides), args.gpus)
    plan = make_plan(work, args.gpu, gpu, memory)
    values = json.dumps(as_values(plan), indent=2)
    print(values if args.json == "-" else as_text(plan))
    if args.json and args.json != "-":
        try:
            Path(args.json).write_text(values + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {args.json} cannot be written: {error.strerror}.") from error
    return int(not plan.fits)


def main() -> int:
    return command_line.main(_parser(), run)


if __name__ == "__main__":
    sys.exit(main())
