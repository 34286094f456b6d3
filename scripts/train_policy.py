# SPDX-License-Identifier: Apache-2.0
"""Train a policy to decide as demonstrations do (cloning), the start of reinforcement learning.

The toy world's expert demonstrates, or recordings of yours (--data): a LeRobot data set, annotation/<split>/*.json
(Bridge), <suite>/*_demo.hdf5 (LIBERO), or states that scripts.make_toy_world writes with --form states. A policy that
reads its task reads the sentence of each recording.
"""

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

CONFIG = "cosmos_predict2/configs/base/config.py"
ROOT = "IMAGINAIRE_OUTPUT_ROOT"  # of run folders

# Given to those policies that take them, and errors for others.
_OWN_FLAGS = ("base", "keep_statistics", "lora_rank", "variant", "expert_only", "augment")

_EPILOG = """\
examples:
  python -m scripts.train_policy --suite toy --demonstrations 20 --out policy
  python -m scripts.train_policy --demonstrations 20 --windows all --seed 1 --out policy_all
  python -m scripts.train_policy --data datasets/toy_states/train --demonstrations 100 --out policy_mine
  python -m scripts.train_policy --policy openvla_oft --out checkpoints/policies/tiny_openvla_oft
  python -m scripts.train_policy --policy pi05 --out checkpoints/policies/tiny_pi05
  python -m scripts.train_policy --policy my_robot:MyPolicy --data datasets/my_robot --out policy_mine
  python -m scripts.evaluate_policy --suite toy --policy policy
"""


def _starts(text: str) -> list[int] | str:
    """The ``type`` of --windows: numbers of steps, or "all"."""
    if text == "all":
        return text
    try:
        starts = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        starts = []
    if not starts or min(starts) < 0:
        raise argparse.ArgumentTypeError(f"'{text}' is neither 'all' nor numbers of steps, as in 0,12")
    return starts


def _suite(text: str) -> str:
    """The ``type`` of --suite."""
    if text != "toy":
        collect = f"python -m scripts.collect --suite {text} --policy MODULE:CLASS --episodes 50 --out DATA"
        raise argparse.ArgumentTypeError(f"'{text}' has no expert. Record a driver ({collect}), and give --data DATA")
    return text


parser = command_line.parser("scripts.train_policy", __doc__, _EPILOG)
add, count = parser.add_argument, command_line.at_least(1)
add("--out", required=True, type=command_line.local_output, metavar="PATH", help="a folder, or a file (.safetensors)")
add("--policy", metavar="NAME", default="toy", help="openvla_oft, pi05, toy (of the toy world alone), or your class")
add("--base", default="", metavar="PATH", help="published weights to begin with (default: tiny random ones)")
add("--keep_statistics", action="store_true", help="scale actions as --base does (default: by what is cloned)")
add("--lora_rank", type=command_line.at_least(1, 10**4), default=0, metavar="N", help="train adapters of this rank")
add("--expert_only", action="store_true", help="of pi05: train the action expert, and keep what sees and reads")
add("--augment", action="store_true", help="of pi05: crop, turn and recolour its pictures a little, as published")
add("--variant", choices=["oft", "l1"], help="of openvla_oft: tokens, or numbers, for imitation alone (default: oft)")
add("--suite", type=_suite, default="toy", help="the world of the demonstrations: toy, the only one with an expert")
of_cloning = "how many; the first ones of --data (default: all of these; in the toy world the policy's `cloning`)"
add("--demonstrations", type=command_line.at_least(1, 10**6), metavar="N", help=of_cloning)
add("--data", default="", metavar="FOLDER", help="recordings to clone (default: the toy world's expert)")
add("--split", default="", metavar="FILE", help="of --data: clone the successes of its part train alone")
add("--camera", metavar="NAME", help="of --data, whose pictures (default: the only one; LIBERO: agentview_rgb)")
add("--action_keys", nargs="+", metavar="COLUMN", help="what makes an action of a LeRobot data set (default: action)")
add("--setting", default="default", help="difficulty of the toy world, where its expert demonstrates")
add("--action_dim", type=int, choices=(4, 7), help="numbers per action of the toy world's expert (default: 4)")
add("--windows", type=_starts, help="steps at which the windows of a demonstration begin, or 'all' (default: likewise)")
add("--chunk", type=command_line.at_least(1, 10**4), default=12, help="actions that are decided at once")
knots = "motions of a chunk, each held for chunk / knots actions (default: every action its own; in the toy world 4)"
add("--knots", type=count, help=knots)
add("--noise", type=command_line.above_zero, help="standard deviation of what the policy draws (default: its own)")
add("--steps", type=command_line.at_least(1, 10**8), help="of the optimizer (default: likewise)")
add("--lr", type=command_line.above_zero, help="learning rate, which falls to 0 (default: likewise)")
add("--batch_size", type=command_line.at_least(1, 10**5), help="windows of a step (default: likewise)")
command_line.common(add, "seed", "device", "overwrite")


def run(args: argparse.Namespace) -> None:
    from cosmos_predict2.rl.policies import cloning, files
    from cosmos_predict2.toy_world.physics import SETTINGS
    from cosmos_predict2.world_model.assembly import device_of
    from imaginaire.buildable import require_taken, resolve
    from imaginaire.errors import near

    device = device_of(args.device)
    cls = resolve(args.policy, "policy")
    args.knots = args.knots or (args.chunk if args.data else 4)
    for option, default in {**cloning.DEFAULTS, **getattr(cls, "cloning", {})}.items():
        if getattr(args, option) is None and not (args.data and option == "demonstrations"):
            setattr(args, option, default)
    starts = None if args.windows == "all" else args.windows
    path = Path(args.out) / files.PUBLIC_CONFIG if files.is_public(cls) else files.file_of(Path(args.out))
    own_arguments = {name: value for name in _OWN_FLAGS if (value := getattr(args, name))}
    build, where = getattr(cls, "to_clone", cls), f"--policy {args.policy}: --"
    require_taken(build, own_arguments, where)  # before demonstrations are made
    if args.keep_statistics and not args.base:
        raise ConfigError("--keep_statistics keeps those of --base: name it, or leave --keep_statistics out.")
    if path.exists() and not args.overwrite:
        raise ConfigError(f"--out {path} exists: give another path, or --overwrite.")
    if args.setting not in SETTINGS:
        raise ConfigError(f"--setting {args.setting}: the toy world has none.{near(args.setting, SETTINGS)}")
    if args.base and args.policy in files.POLICIES and files.is_public(cls):  # before demonstrations are made
        files.require_public(args.base, args.policy)
    if args.data:
        if args.action_dim is not None:
            raise ConfigError(f"--action_dim {args.action_dim} is of the toy world's expert: leave it out with --data.")
        _clone_recordings(args, own_arguments)
        return
    if args.camera or args.action_keys or args.split:
        raise ConfigError("--camera, --action_keys and --split are of recordings: give --data, or leave them out.")
    demonstrations = cloning.toy_demonstrations(args.demonstrations, args.seed, args.setting, args.action_dim or 4)
    windows = demonstrations.windows(args.chunk, starts)
    args.action_dim = windows.actions_B_A_D.shape[2]
    log.info("%s: %d windows", demonstrations.source, len(windows))
    with tempfile.TemporaryDirectory() as beginning:  # nothing is at --out before it is trained
        start = cloning.CloneStart(windows, Path(beginning), args.seed, args.chunk, args.knots)
        policy = cloning.begin(args.policy, start, own_arguments, where, noise=args.noise)
        policy.to(device)
        options = dict(steps=args.steps, lr=args.lr, batch_size=args.batch_size)
        losses = cloning.clone(policy, windows, **options, seed=args.seed)
        names = ("suite", "setting", "windows", "seed", "lora_rank")
        about = {name: getattr(args, name) for name in names} | options
        about |= dict(data=demonstrations.source, demonstrations=len(demonstrations.actions), loss=losses[-1])
        about["command"] = parser.command()
        path = files.write_policy(Path(args.out), policy, about)
    log.info("wrote %s; the loss fell from %.3f to %.3f", path, losses[0], losses[-1])
    print(f"policy: {path}")


def _clone_recordings(args: argparse.Namespace, own_arguments: Mapping[str, Any]) -> None:
    """Run experiment=clone_recordings with these flags, in a folder that is gone afterwards."""
    from cosmos_predict2.rl.policies import files
    from imaginaire import distributed
    from imaginaire.config import compose
    from imaginaire.training import trainer

    if args.device and not str(distributed.device()).startswith(args.device):
        why = f"recordings are cloned on {distributed.device().type}. An empty CUDA_VISIBLE_DEVICES hides the GPUs"
        raise ConfigError(f"--device {args.device}: {why}.")
    model, data = "model.config", "dataloader_train.dataset"
    values: dict[str, Any] = {f"+{model}.arguments.{name}": value for name, value in own_arguments.items()}
    values |= {f"{model}.policy": args.policy, f"{model}.num_knots": args.knots, f"{model}.noise": args.noise}
    values |= {f"{data}.path": args.data, f"{data}.split_file": args.split, f"{data}.num": args.demonstrations}
    values |= {f"{data}.starts": None if args.windows == "all" else args.windows, f"{data}.chunk": args.chunk}
    values |= {f"{data}.camera": args.camera, f"{data}.action_keys": args.action_keys}
    values |= {"optimizer.lr": args.lr, "dataloader_train.batch_size": args.batch_size, "trainer.seed": args.seed}
    values |= {"trainer.max_iter": args.steps, "trainer.validation_iter": max(1, args.steps // 10)}
    if not args.split:  # nothing is held out
        values |= {"trainer.run_validation": False, f"{data}.held_out_share": 0.0}
    overrides = ["experiment=clone_recordings", "ckpt_type=dummy"]
    overrides += [f"{key}={json.dumps(value)}" for key, value in values.items()]
    with tempfile.TemporaryDirectory() as folder, _runs_below(folder):
        config = compose.compose(CONFIG, overrides)
        if code := trainer.launch(config):
            sys.exit(code)
        result, path = Path(config.job.path_local) / files.RESULT, Path(args.out)
        if (result / files.FILE).is_file():
            path = files.file_of(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(result / files.FILE, path)
        else:
            shutil.copytree(result, path, dirs_exist_ok=True)
    print(f"policy: {path}")


@contextmanager
def _runs_below(folder: str) -> Iterator[None]:
    before = os.environ.get(ROOT)
    os.environ[ROOT] = folder
    try:
        yield
    finally:
        os.environ.pop(ROOT)
        if before is not None:
            os.environ[ROOT] = before


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
