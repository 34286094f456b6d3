# SPDX-License-Identifier: Apache-2.0
"""Videos by weights with adapters (LoRA) beside them, as training saves them.

Rank, alpha and layers are those of the file, or of the config.yaml of its run. The flags are for files that record no
alpha, and are compared with what is recorded. examples/video2world.py does the same where nothing is missing.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file runs from a checkout as it is

from cosmos_predict2.checkpoints.adapters import read_adapter
from cosmos_predict2.checkpoints.card import read_card
from examples import video2world
from examples.video2world import Program
from imaginaire.command_line import above_zero, at_least
from imaginaire.errors import ConfigError

ALPHA = 16.0  # of the published training


def add_flags(add: Callable[..., Any]) -> None:
    add("--use_lora", action="store_true", help="require adapters in --dit_path")
    add("--lora_rank", type=at_least(1), metavar="N", help="must be the file's (default: the file's)")
    add("--lora_alpha", type=above_zero, metavar="NUMBER", help=f"default: the recorded one, else {ALPHA:g}")
    layers = "names of layers with adapters, with commas; must be the file's (default: the file's)"
    add("--lora_target_modules", default="", metavar="NAMES", help=layers)
    add("--init_lora_weights", action="store_true", help="no effect: the adapters are those of the file")


def settle(args: argparse.Namespace) -> None:
    """Raise where the flags are not those of the file; give an alpha to a file that records none."""
    if not args.use_lora:
        return
    if not args.dit_path:
        raise ConfigError("--use_lora takes weights with adapters: name them with --dit_path.")
    if args.lora_alpha is None and read_card(args.dit_path).lora_alpha is None:
        args.lora_alpha = ALPHA
    adapter = read_adapter(args.dit_path, alpha=args.lora_alpha, which="net_ema" if args.load_ema else "auto")
    ranks = {layer.rank for layer in adapter.layers.values()}
    if args.lora_rank is not None and ranks != {args.lora_rank}:
        raise ConfigError(f"--lora_rank {args.lora_rank}, but {args.dit_path} has {sorted(ranks)}. Leave it out.")
    targets = [name.strip() for name in args.lora_target_modules.split(",") if name.strip()]
    layers = [name.removesuffix(".weight") for name in adapter.layers]
    without = [name for name in targets if not any(layer.endswith(name) for layer in layers)]
    others = [layer for layer in layers if targets and not layer.endswith(tuple(targets))]
    if without or others:
        what = f"no adapters of {without[0]}" if without else f"adapters of {others[0]}"
        raise ConfigError(f"--lora_target_modules: {args.dit_path} has {what}. Leave the flag out.")


main = partial(
    video2world.main,
    program=Program("Make videos by weights with adapters (LoRA).", add_flags, settle=settle),
)

if __name__ == "__main__":
    sys.exit(main())
