# SPDX-License-Identifier: Apache-2.0
"""The same as scripts.doctor, under the name that guides of this model family use. The exit code reports faults."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line
from scripts.doctor import findings, show

parser = command_line.parser("scripts.test_environment", __doc__)
parser.add_argument("--training", action="store_true", help="accepted: what training needs is always looked at")


def run(args: argparse.Namespace) -> int:
    found = findings()
    code = show(found)
    print("[ERROR] Cosmos environment: see the faults above" if code else "[SUCCESS] Cosmos environment")
    return code


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
