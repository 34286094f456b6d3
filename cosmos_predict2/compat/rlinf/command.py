# SPDX-License-Identifier: Apache-2.0
"""Train a policy in a world model by a configuration of RLinf (YAML): it is translated to an experiment with
overrides, which scripts.train runs."""

import argparse
from collections.abc import Sequence

import torch

from cosmos_predict2.compat import launch
from cosmos_predict2.compat.rlinf.configurations import translate_embodiment
from cosmos_predict2.compat.rlinf.files import load_embodiment
from imaginaire import command_line

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


def parser() -> command_line.Parser:
    made = command_line.parser("scripts.embodied", __doc__, _EPILOG)
    add = made.add_argument
    add("--config-path", default=CONFIGS, metavar="DIR", dest="config_path", help=f"default: {CONFIGS}")
    add("--config-name", required=True, metavar="NAME", dest="config_name", help="the configuration, NAME.yaml there")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="values of the configuration")
    add("--dryrun", action="store_true", help="print the composed configuration, and notes on what is missing")
    add("--debug", action="store_true", help="show the traceback of an error, not its message alone")
    return made


def main(train: launch.Train, arguments: Sequence[str] | None = None) -> int:
    return launch.main(parser(), lambda args, overrides: run(args, overrides, train), arguments)


def run(args: argparse.Namespace, overrides: Sequence[str], train: launch.Train) -> int:
    content = load_embodiment(args.config_path, args.config_name, args.overrides)
    translation = translate_embodiment(content, torch.accelerator.device_count())
    return launch.start(translation, overrides, train, name="configuration", dryrun=args.dryrun, debug=args.debug)
