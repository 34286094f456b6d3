# SPDX-License-Identifier: Apache-2.0
"""Measure how often a policy succeeds, on starts that training never has; and with --world_model, whether what is
imagined of the same actions is true.

A policy is a file or folder of scripts.train_policy, or a run that trained one by reinforcement learning.
"""

import argparse
import itertools
import logging
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

FIGURES = "evaluation.json"
_AT_ONCE = 200  # episodes

_EPILOG = """\
Rates have Wilson's 95 % interval. Greedy and sampled actions are two different policies: say which when you compare.

With --world_model each episode is played twice with the same actions, in two ways: the actions that the policy chooses
in the simulator are imagined, and those that it chooses in imagination are executed in the simulator. The second shows
whether the policy has learnt to deceive the world model.

examples:
  python -m scripts.evaluate_policy --suite toy --policy policy
  python -m scripts.evaluate_policy --suite toy --policy RUN --mode sample --world_model --out outputs/policy --videos 4
"""


def _parser() -> command_line.Parser:
    parser = command_line.parser("scripts.evaluate_policy", __doc__, _EPILOG)
    add, count = parser.add_argument, command_line.at_least(1)
    add("--policy", required=True, metavar="PATH", help="a policy's file or folder, or a run that trained one")
    add("--load_ema", action="store_true", help="take the averaged weights (net_ema.) of a run")
    add("--suite", choices=["toy"], default="toy", help="where it acts")
    add("--tasks", nargs="+", default=["push_puck"], metavar="TASK", help="of the toy world")
    add("--setting", default="default", help="difficulty of the toy world")
    add("--split", default="val", help="which starts: val, or those of training (train)")
    add("--episodes", type=count, default=800, help="one start each, tasks in turn")
    add("--first", type=command_line.at_least(0), default=0, help="number of the first start")
    add("--mode", choices=["greedy", "sample"], default="greedy", help="the likeliest action, or one that is drawn")
    add(
        "--execute",
        type=count,
        default=None,
        help="so many actions of each decision (default: all, or as its run had it)",
    )
    add("--seed", type=command_line.at_least(0), default=0, help="of what is drawn, of policy and world model")
    add("--batch_size", type=count, default=_AT_ONCE, help="episodes that are played together")
    add(
        "--world_model",
        nargs="?",
        const="",
        default=None,
        metavar="PATH",
        help="compare with a world model: a run or weights; without a path the tiny one that ships",
    )
    add("--num_steps", type=count, default=1, help="evaluations of the world model's network for a chunk")
    add("--device", default=None, help="of the world model, cpu or cuda (default: a GPU where there is one)")
    add("--out", default="", metavar="DIR", help=f"write {FIGURES} there, and the videos")
    add("--videos", type=command_line.at_least(0), default=0, metavar="N", help="of the first N episodes; needs --out")
    add("--fps", type=command_line.above_zero, default=8.0, help="frames per second of the videos")
    return parser


def run(args: argparse.Namespace) -> None:
    from cosmos_predict2.evaluation.reports.evaluation_page import write_json
    from cosmos_predict2.rl.envs.toy import ToyEnv
    from cosmos_predict2.rl.policies.files import read_policy
    from cosmos_predict2.rl.vla.policy_evaluation import evaluate, held_out_starts, imagined_along, played_along
    from imaginaire.progress import Progress

    if args.videos and not args.out:
        raise ConfigError(f"--videos {args.videos} needs --out, the folder that they are written to.")
    if repeated := [task for task in args.tasks if args.tasks.count(task) > 1]:
        raise ConfigError(f"--tasks names {repeated[0]} twice: give each task once.")
    policy, card = read_policy(args.policy, "net_ema" if args.load_ema else "auto")
    if args.execute is None and (execute := card.about.get("execute")):
        args.execute = execute
        print(f"--execute {execute}, as the policy's run had it")
    world = dict(setting=args.setting, tasks=args.tasks, split=args.split)
    size = min(args.batch_size, args.episodes)
    env = ToyEnv(size, action_dim=policy.action_dim, **world)
    starts = held_out_starts(args.episodes, len(args.tasks), args.seed, args.first)
    begun = itertools.count()
    with Progress("episodes", args.episodes, unit="episode") as progress:
        found = evaluate(
            policy, env, starts, args.tasks, args.mode, args.execute, lambda _: progress.set(next(begun) * size)
        )
    for name, rate in found.tasks.items():
        print(f"{name}: {rate.as_text()}")
    if len(args.tasks) > 1:
        print(f"all: {found.total.as_text()}")
    content = {"policy": args.policy, "about": dict(card.about), **_conditions(args), **found.as_dict()}
    imagination = None if args.world_model is None else _imagination(args, policy.action_dim)
    if imagination is not None:
        imagined = _imagined_env(args, imagination, size)
        closed = evaluate(policy, imagined, starts, args.tasks, args.mode, args.execute)
        comparisons = {
            "actions_chosen_in_the_simulator": imagined_along(found, imagined, args.execute),
            "actions_chosen_in_imagination": played_along(closed, env, args.execute),
        }
        for name, comparison in comparisons.items():
            print(f"{name.replace('_', ' ')}: {comparison.as_text()}")
        content["world_model"] = {name: comparison.as_dict() for name, comparison in comparisons.items()}
        content["world_model"]["path"] = args.world_model or "the tiny one that ships"
        content["world_model"]["num_steps"] = args.num_steps
    if args.out:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        if args.videos:
            content["videos"] = _write_videos(args, out, found, policy.action_dim, imagination)
        write_json(out / FIGURES, content)
        print(f"figures: {out / FIGURES}")


def _conditions(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on besides the policy."""
    from imaginaire.training.provenance import run_record

    names = ("suite", "setting", "split", "first", "seed", "execute", "load_ema")
    command = shlex.join(["python", "-m", "scripts.evaluate_policy", *sys.argv[1:]])
    return {**{name: getattr(args, name) for name in names}, "command": command, "versions": run_record()}


def _imagination(args: argparse.Namespace, action_dim: int) -> Any:
    """The world model, which takes the actions of the policy."""
    from cosmos_predict2.configs.rl.imagination import imagination_of

    imagination = imagination_of(args.world_model, device=args.device)
    if imagination.transform.dim != action_dim:
        raise ConfigError(
            f"--world_model: its actions have {imagination.transform.dim} numbers, those of the policy {action_dim}."
        )
    return imagination


def _imagined_env(args: argparse.Namespace, imagination: Any, size: int) -> Any:
    """The world model as an environment with the starts of the simulator."""
    from cosmos_predict2.rl.envs.scoring import Scoring
    from cosmos_predict2.rl.envs.starts import ToyStarts
    from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv
    from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
    from cosmos_predict2.toy_world.scene import SETTINGS

    return WorldModelEnv(
        imagination,
        ToyStarts(args.setting, args.tasks, split=args.split),
        ToyDetectorReward(args.setting),
        size,
        SETTINGS[args.setting].num_steps,
        scoring=Scoring(judge="last", reward_on="last"),
        sampling=replace(ONE_EVALUATION, num_steps=args.num_steps),
    )


def _write_videos(
    args: argparse.Namespace, out: Path, found: Any, action_dim: int, imagination: Any | None
) -> list[str]:
    """The first episodes, true pictures beside imagined ones where there is a world model; gives their names."""
    import torch

    from cosmos_predict2.data.video.media import write_video
    from cosmos_predict2.rl.envs.toy import ToyEnv
    from cosmos_predict2.rl.vla.policy_evaluation import film

    num = min(args.videos, args.episodes)
    part, actions = found.starts.part(slice(0, num)), found.played.actions_M_E_A_D[:, :num]
    world = dict(setting=args.setting, tasks=args.tasks, split=args.split)
    true = ToyEnv(num, action_dim=action_dim, **world)
    films = [film(true, part, actions, args.execute)[0]]
    if imagination is not None:
        imagined = _imagined_env(args, imagination, num)
        films.append(film(imagined, part, actions, args.execute)[0])
    names = []
    for i in range(num):
        task = args.tasks[part.task_ids[i] % len(args.tasks)]
        outcome = str(bool(found.played.success_E[i])).lower()
        name = f"task={task}_trial_{part.trial_ids[i]}--success={outcome}.mp4"
        large = torch.cat([one[i] for one in films], dim=-1).repeat_interleave(4, -1).repeat_interleave(4, -2)
        write_video(out / name, large, args.fps)
        names.append(name)
    return names


if __name__ == "__main__":
    sys.exit(command_line.main(_parser(), run))
