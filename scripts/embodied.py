# SPDX-License-Identifier: Apache-2.0
"""Train a policy in a world model by a configuration of RLinf (YAML): it is translated to an experiment with
overrides, which scripts.train runs."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.compat.rlinf.configurations import translate_embodiment
from cosmos_predict2.compat.rlinf.files import load_embodiment
from imaginaire import command_line
from imaginaire.errors import ConfigError
from scripts import train
from scripts.cosmos_rl import require_gpus

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


def _parser() -> command_line.Parser:
    parser = command_line.parser("scripts.embodied", __doc__, _EPILOG)
    add = parser.add_argument
    add("--config-path", default=CONFIGS, metavar="DIR", dest="config_path", help=f"default: {CONFIGS}")
    add("--config-name", required=True, metavar="NAME", dest="config_name", help="the configuration, NAME.yaml there")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="values of the configuration")
    add("--dryrun", action="store_true", help="print the composed configuration, and notes on what is missing")
    add("--debug", action="store_true", help="show the traceback of an error, not its message alone")
    return parser


def run(args: argparse.Namespace, overrides: Sequence[str] = ()) -> int:
    import torch

    content = load_embodiment(args.config_path, args.config_name, args.overrides)
    translation = translate_embodiment(content, torch.accelerator.device_count())
    for name, value in translation.environment.items():
        os.environ.setdefault(name, value)
    if os.environ.get("RANK", "0") == "0":
        for warning in translation.warnings:
            print(f"configuration: {warning}", file=sys.stderr)
    words = [*(["--debug"] if args.debug else []), "--", *translation.overrides, *overrides]
    if args.dryrun:
        code = train.main(["--dryrun", *words])
        if code == 0 and os.environ.get("RANK", "0") == "0":
            for sentence in translation.missing:
                print(f"note: {sentence}")
        return code
    if translation.missing:
        raise ConfigError("\n".join(translation.missing))
    if "RANK" in os.environ or translation.num_gpus == 1:
        return train.main(words)
    require_gpus(translation, 1)
    sys.stdout.flush()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={translation.num_gpus}"]
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "scripts.train", *words])


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    cut = words.index("--") if "--" in words else len(words)
    overrides = words[cut + 1 :]
    return command_line.main(_parser(), lambda args: run(args, overrides), words[:cut])


if __name__ == "__main__":
    train.leave(main())
