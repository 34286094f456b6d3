# SPDX-License-Identifier: Apache-2.0
"""Write a page about a run, also while it is going: curves of its metrics, its samples before and after."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.evaluation.reports.run_report import REPORT, write_report
from imaginaire import command_line

_EPILOG = f"""\
The page is RUN/{REPORT}: one file, which opens without a network. Write it again to see newer figures.

examples:
  python -m scripts.run_report checkpoints/posttraining/reinforcement_learning/tiny_flow_grpo_toy_world
"""

parser = command_line.parser("scripts.run_report", __doc__, _EPILOG)
parser.add_argument("run", metavar="RUN", help="the folder of the run, which has metrics.jsonl")


def run(args: argparse.Namespace) -> int:
    print(write_report(args.run))
    return 0


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
