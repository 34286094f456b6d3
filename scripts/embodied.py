# SPDX-License-Identifier: Apache-2.0
"""Train a policy in a world model by a configuration of RLinf (YAML)."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.compat.rlinf import command
from scripts import train


def main(arguments: Sequence[str] | None = None) -> int:
    return command.main(train.main, arguments)


if __name__ == "__main__":
    train.leave(main())
