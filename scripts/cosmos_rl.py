# SPDX-License-Identifier: Apache-2.0
"""Train a world model or a policy by a recipe of Cosmos-RL (TOML)."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.compat.cosmos_rl import command
from scripts import train


def main(arguments: Sequence[str] | None = None) -> int:
    return command.main(train.main, arguments)


if __name__ == "__main__":
    train.leave(main())
