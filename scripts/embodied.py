# SPDX-License-Identifier: Apache-2.0
"""Train a policy in a world model by a configuration of RLinf (YAML): it is translated to an experiment with
overrides, which scripts.train runs."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.compat import launch
from cosmos_predict2.compat.rlinf.configurations import translate_embodiment
from cosmos_predict2.compat.rlinf.files import load_embodiment
from imaginaire import command_line
from scripts import train

CONFIGS = "examples/embodiment/config"
_EPILOG = """\
examples/embodiment/run_embodiment.sh calls this program, with a folder for the logs. Overrides of the configuration are
written as Hydra takes them, those of scripts.train come after --.

examples:
  python -m scripts.embodied --config-name tiny_toy_grpo
  python -m scripts.embodied --config-name tiny_toy_grpo runner.max_epochs=2 algorithm.group_size=4 --dryrun
  python -m scripts.embodied --config-path my_configs --config-name my_run -- model.config.rl.shared_noise=true

exit codes: those of scripts.train; 2: something that you can mend, in one message
"""

parser = command_line.parser("scripts.embodied", __doc__, _EPILOG)
add = parser.add_argument
add("--config-path", default=CONFIGS, metavar="DIR", dest="config_path", help=f"default: {CONFIGS}")
add("--config-name", required=True, metavar="NAME", dest="config_name", help="the configuration, NAME.yaml there")
add("overrides", nargs="*", metavar="KEY=VALUE", help="values of the configuration")
add("--dryrun", action="store_true", help="print the composed configuration, and notes on what is missing")
add("--debug", action="store_true", help="show the traceback of an error, not its message alone")


def main(arguments: Sequence[str] | None = None) -> int:
    return launch.main(parser, run, arguments)


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    import torch

    content = load_embodiment(args.config_path, args.config_name, args.overrides)
    translation = translate_embodiment(content, torch.accelerator.device_count())
    return launch.start(translation, overrides, train.main, name="configuration", dryrun=args.dryrun, debug=args.debug)


if __name__ == "__main__":
    train.leave(main())
