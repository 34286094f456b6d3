# SPDX-License-Identifier: Apache-2.0
"""Train a world model or a policy by a recipe of Cosmos-RL (TOML): it is translated to an experiment with overrides,
which scripts.train runs."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from cosmos_predict2.compat import launch
from cosmos_predict2.compat.cosmos_rl.diffusion_nft import translate_nft
from cosmos_predict2.compat.cosmos_rl.policies import translate_vla
from cosmos_predict2.compat.cosmos_rl.world_models import translate_wfm
from cosmos_predict2.compat.fields import Translation
from imaginaire import command_line
from imaginaire.config.registry import load_toml
from imaginaire.errors import ConfigError, near
from scripts import train

ROOT = Path(__file__).resolve().parents[1]
# Of cosmos_rl.tools.dataset: what they do is part of the translation.
SCRIPTS = ("wfm_rl", "diffusion_nft", "libero_grpo", "b1k_grpo")
PLATFORMS = {"LIBERO": "libero_grpo", "BEHAVIOR": "b1k_grpo", "B1K": "b1k_grpo"}  # of ROBOT_PLATFORM
_EPILOG = """\
A recipe with [vla] trains a policy, or with n_generation = 1 evaluates it; others train a world model. One process runs
here; more are started by torchrun, one for each GPU that the recipe asks for (copies x shards x context parallelism).
Under torchrun or Slurm, each process runs its part. Overrides of scripts.train come after --.

examples:
  cosmos-rl --config configs/wfm/cosmos_predict2-5_2b_480_grpo_mock_data.toml --wfm-mode cosmos_rl.tools.dataset.wfm_rl
  cosmos-rl --config my_recipe.toml --wfm-mode ./cosmos_rl/tools/dataset/wfm_rl.py --dryrun
  cosmos-rl --config my_recipe.toml --wfm-mode cosmos_rl.tools.dataset.wfm_rl -- trainer.max_iter=2
  ROBOT_PLATFORM=LIBERO cosmos-rl --config configs/openvla-oft/openvla-oft-7b-fsdp2-8p8r-colocate.toml \
    cosmos_rl/tools/dataset/libero_grpo.py

exit codes: those of scripts.train; 2: something that you can mend, in one message
"""

parser = command_line.parser("scripts.cosmos_rl", __doc__, _EPILOG)
add = parser.add_argument
add("--config", required=True, metavar="FILE", help="the recipe, a TOML file")
add("--wfm-mode", action="store_true", dest="wfm_mode", help="train a world model, as a recipe without [vla] does")
add("script", nargs="?", default="", help=f"accepted: {' or '.join(SCRIPTS)} of cosmos_rl.tools.dataset")
add("--log-dir", metavar="DIR", dest="log_dir", help="keep the output of each process in a file below DIR")
add("--num-workers", type=command_line.at_least(1), default=1, dest="num_workers", help="how many machines")
add("--worker-idx", type=command_line.at_least(0), default=0, dest="worker_idx", help="which of them this is")
add("--node-ip-list", default="", dest="node_ip_list", help="their addresses, separated by ';'")
add("--rdzv-port", type=int, default=29345, dest="rdzv_port", help="where their processes meet, on the first")
add("--dryrun", action="store_true", help="print the composed configuration and build nothing")
add("--debug", action="store_true", help="show the traceback of an error, not its message alone")


def main(arguments: Sequence[str] | None = None) -> int:
    return launch.main(parser, run, arguments)


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    import torch

    _require_recipe(args.config)
    translation = translate(load_toml(args.config), torch.accelerator.device_count())
    _require_script(args.script, translation.scripts)
    _require_platform(os.environ.get("ROBOT_PLATFORM", ""), translation.scripts)
    if place := os.environ.get("COSMOS_OUTPUT_DIR"):
        os.environ.setdefault("IMAGINAIRE_OUTPUT_ROOT", place)
    if args.dryrun and translation.evaluation is None:
        print(f"# processes: {translation.num_gpus}, one for each GPU ({translation.gpu_product})")
    own = dict(name="recipe", num_machines=args.num_workers, torchrun=lambda: torchrun(args))
    options = command_line.options_of(launch.start, args, **own, is_logged=bool(args.log_dir))
    return launch.start(translation, overrides, train.main, **options)


def translate(content: Mapping[str, Any], gpus_here: int = 0) -> Translation:
    """The run of a recipe, of a policy, DiffusionNFT or a world model ("WFM"), on a machine with so many GPUs."""
    if "vla" in content:
        return translate_vla(content, gpus_here)
    return translate_nft(content) if "policy" in content or "train" in content else translate_wfm(content)


def _require_script(script: str, fitting: Sequence[str]) -> None:
    if not script:
        return
    name = Path(script.replace(".", "/") if not script.endswith(".py") else script).stem
    if name not in SCRIPTS:
        cure = f"Give cosmos_rl.tools.dataset.{fitting[0]}, or your experiment: documentations/world_model_rl.md."
        raise ConfigError(f"{script}: scripts of your own are not run. {cure}")
    if name not in fitting:
        raise ConfigError(f"{script} does not fit the recipe: give cosmos_rl/tools/dataset/{fitting[0]}.py.")


def _require_platform(name: str, fitting: Sequence[str]) -> None:
    """Raise where ROBOT_PLATFORM, which is only read of policies, names another robot than the recipe's."""
    platforms = [platform for platform, script in PLATFORMS.items() if script in fitting]
    if name and platforms and name.upper() not in platforms:
        known = " or ".join(platforms)
        raise ConfigError(f"ROBOT_PLATFORM={name} does not fit the recipe: set {known}, or leave it out.")


def _require_recipe(path: str) -> None:
    """Raise where there is no such file, with the place of this project's recipes."""
    if Path(path).exists():
        return
    recipes = [str(found.relative_to(ROOT)) for found in sorted(ROOT.glob("configs/*/*.toml"))]
    if not recipes:  # installed without a checkout
        cure = " This project's recipes are files of its checkout, in configs/wfm."
    elif os.path.normpath(path) in recipes:
        cure = f" There is one in {ROOT}: start the command there, or give --config {ROOT / path}."
    else:
        cure = near(path, recipes)
    raise ConfigError(f"--config {path}: there is no such file in {Path.cwd()}.{cure}")


def torchrun(args: argparse.Namespace) -> list[str]:
    """The arguments of torchrun for this machine, but for the number of processes."""
    words = [f"--log-dir={args.log_dir}", "--tee=3"] if args.log_dir else []
    if args.num_workers == 1:
        return ["--standalone", *words]
    first = args.node_ip_list.split(";")[0]
    if not first:
        raise ConfigError("--num-workers needs --node-ip-list: the addresses of the machines, separated by ';'.")
    meeting = [f"--master_addr={first}", f"--master_port={args.rdzv_port}"]
    return [f"--nnodes={args.num_workers}", f"--node_rank={args.worker_idx}", *meeting, *words]


if __name__ == "__main__":
    train.leave(main())
