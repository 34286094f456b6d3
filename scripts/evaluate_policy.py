# SPDX-License-Identifier: Apache-2.0
"""Measure how often a policy succeeds, on starts that training never has; and with --world_model, whether what is
imagined of the same actions is true.

A policy is a file or folder of scripts.train_policy, a run that trained one by reinforcement learning, a driver of
yours, MODULE:CLASS, with act, action_dim and chunk, or that of a server, openpi://HOST:PORT or gr00t://HOST:PORT.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line, storage
from imaginaire.errors import ConfigError

FIGURES = "evaluation.json"

_EPILOG = """\
Rates have a 95 % interval (Wilson's; of several draws by the spread between starts). Greedy and sampled actions are two
different policies: say which when you compare.

With --world_model each episode is played twice with the same actions, in two ways: the actions that the policy chooses
in the simulator are imagined, and those that it chooses in imagination are executed in the simulator. The second shows
whether the policy has learnt to deceive the world model.

examples:
  python -m scripts.evaluate_policy --suite toy --policy policy
  python -m scripts.evaluate_policy --suite toy --policy RUN --mode sample --world_model --out outputs/policy --videos 4
  python -m scripts.evaluate_policy --suite libero_spatial --policy RUN --workers 8 --render egl --out outputs/libero
  python -m scripts.evaluate_policy --suite libero_10 --tasks 0 3 --episodes 20 --policy RUN
  python -m scripts.evaluate_policy --suite my_robot:MyEnv --policy RUN      an environment of yours, of my_robot.py
  python -m scripts.evaluate_policy --suite gym:MODULE:ID --policy RUN --world_model W --reward R.safetensors
  python -m scripts.evaluate_policy --suite wfm://gpubox:8100 --policy RUN   imagined by scripts.serve_world_model
"""

parser = command_line.parser("scripts.evaluate_policy", __doc__, _EPILOG)
add, count = parser.add_argument, command_line.at_least(1)
of_policy = "a file or folder, a run, MODULE:CLASS, or a server: openpi://HOST:PORT, gr00t://"
add("--policy", required=True, metavar="PATH", help=of_policy)
of_suite = "toy, lift, libero_{spatial,object,goal,10,90,all}, b1k, gym:ID, MODULE:CLASS, wfm://"
add("--suite", default="toy", help=of_suite)
add("--tasks", nargs="+", default=[], metavar="TASK", help="of LIBERO also numbers (default: all; of yours the first)")
add("--setting", default=None, help="difficulty of the toy world (default: default)")
add("--split", default=None, help="starts of the toy world: val, or those of training, train (default: val)")
add("--episodes", type=count, default=None, help="starts (default: 800, or 50 of each task of a simulator, 10 of b1k)")
add("--draws", type=count, help="episodes of each start (default: 1, or 4 where decisions draw noise)")
add("--max_steps", type=count, default=None, help="of an episode in a simulator (default: as published)")
add("--num_steps_wait", type=command_line.at_least(0), default=None, help="LIBERO's steps of rest (default: 10)")
add("--image_size", type=count, default=None, help="of a simulator's pictures (default: 256, of lift 128)")
add("--render", default=None, help="how a simulator draws: auto, egl, osmesa, glx (default: auto)")
add("--first", type=command_line.at_least(0), default=0, help="number of the first start")
add("--mode", choices=["greedy", "sample"], default="greedy", help="the likeliest action, or one that is drawn")
add("--execute", type=count, default=None, help="so many actions of each decision (default: all, or as its run had it)")
add("--batch_size", type=count, default=None, help="episodes that are played together (default: 200, or 8)")
add("--workers", type=count, default=None, help="the same of lift and LIBERO, which have a process for each")
a_path = "compare with a world model: a run or weights; without a path the tiny one that ships"
add("--world_model", nargs="?", const="", default=None, metavar="PATH", help=a_path)
add("--reward", metavar="R", help="judge of that: of scripts.train_reward_model, a file or folder, or MODULE:CLASS")
add("--num_steps", type=count, default=None, help="evaluations of --world_model's network for a chunk (default: 1)")
command_line.common(add, "options", "load_ema", "seed", "device")
add(
    "--out",
    type=command_line.folder_to_write,
    default=None,
    metavar="DIR",
    help=f"write {FIGURES} there, and the videos",
)
add("--videos", type=command_line.at_least(0), default=0, metavar="N", help="of the first N episodes; needs --out")
add("--fps", type=command_line.above_zero, default=None, help="of the videos (default: 8, or the simulator's 20)")


def run(args: argparse.Namespace) -> None:
    from cosmos_predict2.rl.envs import suites
    from cosmos_predict2.rl.envs.world_model import require_inputs
    from cosmos_predict2.rl.episodes import policy_evaluation
    from cosmos_predict2.rl.episodes.policy_evaluation import evaluate, imagined_along, played_along
    from cosmos_predict2.rl.policies.files import find_policy
    from cosmos_predict2.world_model.assembly import device_of
    from imaginaire.training.provenance import run_record

    device = device_of(args.device)
    if args.videos and not args.out:
        raise ConfigError(f"--videos {args.videos} needs --out, the folder that they are written to.")
    is_compared, has_judge = args.world_model is not None, args.reward is not None or args.suite == suites.TOY
    if (args.reward is not None and not is_compared) or (is_compared and not has_judge):
        why = "the reward judges what is imagined (scripts.train_reward_model); the toy world has a detector"
        raise ConfigError(f"--world_model PATH --reward PATH go together in --suite {args.suite}: {why}.")
    if args.world_model == "" and args.suite != suites.TOY:
        raise ConfigError(f"--world_model PATH: the model that ships is of the toy world, not of --suite {args.suite}.")
    if args.num_steps is not None and args.world_model is None:
        raise ConfigError(f"--num_steps {args.num_steps} is of the world model: give --world_model, or leave it out.")
    args.num_steps = args.num_steps or 1
    of_place = ("setting", "split", "max_steps", "num_steps_wait", "image_size", "render")
    place = suites.find(args.suite, args.tasks, **{name: getattr(args, name) for name in of_place})
    if args.workers is not None and (args.batch_size is not None or not place.has_workers):
        why = f"has no meaning for --suite {args.suite}, or beside --batch_size"
        raise ConfigError(f"--workers {args.workers} {why}: leave it out.")
    args.tasks, args.episodes, args.fps = place.tasks, args.episodes or place.episodes, args.fps or place.fps
    options = command_line.key_values(args.options, "--options")
    policy, card = find_policy(args.policy, "net_ema" if args.load_ema else "auto", options)
    policy.to(device)
    if args.execute is None and (execute := card.about.get("execute")):
        args.execute = execute
        print(f"--execute {execute}, as the policy's run had it")
    args.draws = policy_evaluation.draws_of(policy, args.mode, args.draws)
    how = dict(in_blocks=place.in_blocks, draws=args.draws)
    starts = policy_evaluation.held_out_starts(args.episodes, len(args.tasks), args.seed, args.first, **how)
    size = min(args.batch_size or args.workers or place.at_once, len(starts))
    imagination = None if args.world_model is None else _imagination(args, policy.action_dim)
    env = place.env(size, policy)
    imagined = None if imagination is None else _imagined_env(args, imagination, size, env)
    for one in (env, imagined):
        require_inputs(one, policy)
    found = evaluate(policy, env, starts, args.tasks, args.mode, args.execute, lambda _: None)  # with its bar
    for name, rate in found.tasks.items():
        print(f"{name}: {rate.as_text()}")
    if len(args.tasks) > 1:
        print(f"all: {found.total.as_text()}")
    names = ("suite", "first", "draws", "seed", "execute", "load_ema", "options")
    conditions = {**{name: getattr(args, name) for name in names}, **place.conditions()}
    conditions |= {"command": parser.command(), "versions": run_record()}
    content = {"policy": args.policy, "about": dict(card.about), **conditions, **found.as_dict()}
    if imagined is not None:
        closed = evaluate(policy, imagined, starts, args.tasks, args.mode, args.execute)
        comparisons = {
            "actions_chosen_in_the_simulator": imagined_along(found.played, starts, imagined, args.execute),
            "actions_chosen_in_imagination": played_along(closed.played, starts, env, args.execute),
        }
        for name, comparison in comparisons.items():
            print(f"{name.replace('_', ' ')}: {comparison.as_text()}")
        path = args.world_model or "the tiny one that ships"
        content["world_model"] = {**comparisons, "path": path, "num_steps": args.num_steps}
    if args.out:
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True)
        if args.videos:
            content["videos"] = _write_videos(args, out, found, env, imagination)
        storage.write_json(out / FIGURES, content)
        print(f"figures: {out / FIGURES}")
    env.close()


def _imagination(args: argparse.Namespace, action_dim: int) -> Any:
    """The world model, which takes the actions of the policy."""
    from cosmos_predict2.configs.rl.imagination import imagination_of

    imagination = imagination_of(args.world_model, device=args.device)
    if (dim := imagination.transform.dim) != action_dim:
        raise ConfigError(f"--world_model: its actions have {dim} numbers, those of the policy {action_dim}.")
    return imagination


def _imagined_env(args: argparse.Namespace, imagination: Any, size: int, env: Any) -> Any:
    """The world model as an environment with the starts of the simulator."""
    from cosmos_predict2.configs.rl.imagination import fit_of
    from cosmos_predict2.rl.envs.first_frames import SimulatedStarts
    from cosmos_predict2.rl.envs.scoring import Scoring
    from cosmos_predict2.rl.envs.starts import ToyStarts
    from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv
    from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
    from cosmos_predict2.rl.rewards.resnet import read_reward

    if args.reward is None:
        setting = args.setting or "default"
        starts: Any = ToyStarts(setting, args.tasks, split=args.split or "val")
        reward: Any = ToyDetectorReward(setting)
    else:
        starts = SimulatedStarts(env, len(args.tasks), fit_of(args.world_model), len(imagination.views))
        reward = read_reward(args.reward)
    scoring, sampling = Scoring(judge="last", reward_on="last"), replace(ONE_EVALUATION, num_steps=args.num_steps)
    how: dict[str, Any] = dict(scoring=scoring, sampling=sampling)
    return WorldModelEnv(imagination, starts, reward, size, env.metadata["max_steps"], **how)


def _write_videos(args: argparse.Namespace, out: Path, found: Any, env: Any, imagination: Any | None) -> list[str]:
    """The first episodes, true pictures beside imagined ones where there is a world model; gives their names."""
    from cosmos_predict2.callbacks.draw_samples import side_by_side
    from cosmos_predict2.data.video.media import write_video
    from cosmos_predict2.data.views import split
    from cosmos_predict2.rl.episodes.policy_evaluation import film

    rows = list(range(len(found.starts)))[:: args.draws][: args.videos]  # the first episode of each start
    num, part = len(rows), found.starts.part(slice(0, rows[-1] + 1, args.draws))
    actions = found.played.actions_M_E_A_D[:, rows]
    films = [film(env, part, actions, args.execute)]
    if imagination is not None:
        imagined = _imagined_env(args, imagination, num, env)
        films.append(split(film(imagined, part, actions, args.execute), len(imagination.views))[0])
    names = []
    for i in range(num):
        task = args.tasks[part.task_ids[i] % len(args.tasks)]
        name = video_name(task, part.trial_ids[i], bool(found.played.success_E[rows[i]]))
        shown = side_by_side([[one[i] for one in films]], ["true", "imagined"][: len(films)])
        write_video(out / name, shown, args.fps)
        names.append(name)
    return names


def video_name(task: str, trial: int, is_success: bool) -> str:
    """A file of the folder itself, also where the task is an ID of gymnasium, PACKAGE/NAME."""
    return f"task={task.replace('/', '_')}_trial_{trial}--success={str(is_success).lower()}.mp4"


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
