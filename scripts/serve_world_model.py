# SPDX-License-Identifier: Apache-2.0
"""Serve a world model as an environment, in which policies and learners of other machines act: wfm://HOST:8100."""

import argparse
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line
from imaginaire.errors import ConfigError

TOY_STARTS = 800  # of each part; held-out ones are behind those that a run of the toy world counts
TOY_HELD_OUT = 2**20

_EPILOG = """\
Without --starts and --reward it is the toy world. Clients name the address where others name an environment:
  python -m scripts.evaluate_policy --suite wfm://HOST:8100 --policy RUN
  python -m scripts.train -- experiment=vla_grpo_served model.config.env=wfm://HOST:8100 model.config.policy.path=RUN

examples:
  python -m scripts.serve_world_model
  python -m scripts.serve_world_model --world_model RUN --reward outputs/my_reward --starts outputs/my_starts \\
    --card outputs/my_card.json
  WFM_WORLD_MODEL_TOKEN=... python -m scripts.serve_world_model --world_model RUN --reward R --starts S --host 0.0.0.0
"""

parser = command_line.parser("scripts.serve_world_model", __doc__, _EPILOG)
add, count = parser.add_argument, command_line.at_least(1)
add("--world_model", default="", metavar="W", help="a run or weights (default: the tiny one that ships)")
add("--reward", default="", metavar="R", help="a file or folder of scripts.train_reward_model, or MODULE:CLASS")
add("--starts", default="", metavar="S", help="of scripts.make_reset_states")
add("--card", default="", metavar="CARD", help="of scripts.check_imagination, which learners demand")
add("--options", nargs="+", default=[], metavar="KEY=VALUE", help="of the environment, as model.config.env has them")
add("--scoring", nargs="+", default=[], metavar="KEY=VALUE", help="likewise (default: judge=last reward_on=last)")
add("--num_steps", type=count, default=1, help="evaluations of the network for a chunk")
add("--num_envs", type=count, default=64, help="episodes of a session at once, at most")
add("--sessions", type=count, default=8, help="clients at once, at most")
add("--idle", type=command_line.above_zero, default=3600.0, metavar="SECONDS", help="after which a session ends")
add("--host", default="127.0.0.1", help="address to listen on; one that others reach needs WFM_WORLD_MODEL_TOKEN")
add("--port", type=command_line.at_least(0, 65535), default=8100, help="port to listen on")
command_line.common(add, "load_ema", "device")


def run(args: argparse.Namespace) -> None:
    from cosmos_predict2.checkpoints.card import read_card as weights_card
    from cosmos_predict2.configs.rl.imagination import imagination_of
    from cosmos_predict2.released import TINY_ACTION
    from cosmos_predict2.rl.envs.recorded_starts import RecordedStarts
    from cosmos_predict2.rl.envs.remote import TOKEN
    from cosmos_predict2.rl.envs.scoring import Scoring
    from cosmos_predict2.rl.envs.starts import ToyStarts
    from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv
    from cosmos_predict2.rl.imagined.ranking import have_failures
    from cosmos_predict2.rl.interfaces import FrameRewardDefaults, completed
    from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
    from cosmos_predict2.rl.rewards.resnet import read_reward
    from cosmos_predict2.rl.trust import digest, require_card
    from cosmos_predict2.tools.serve.world_model import ServedWorld, serve
    from cosmos_predict2.world_model.assembly import device_of
    from imaginaire.buildable import made, path_of
    from imaginaire.listening import token_of

    if bool(args.reward) != bool(args.starts):
        raise ConfigError("--starts S --reward R go together: what episodes begin with, and what judges them.")
    token, path = token_of(TOKEN, args.host), args.world_model or TINY_ACTION
    places = {"world_model": path, "reward": args.reward or path_of(ToyDetectorReward)}
    inputs = {"world_model": digest(path, load_ema=args.load_ema), "reward": digest(places["reward"])}
    card = require_card(args.card, inputs, key="--card") if args.card else None
    imagination = imagination_of(path, load_ema=args.load_ema, device=device_of(args.device))
    options: dict[str, Any] = dict(sampling=replace(ONE_EVALUATION, num_steps=args.num_steps))
    if args.starts:
        starts: Any = RecordedStarts(args.starts, by_task=False, size=weights_card(path).video_size)
        parts = {part: starts.numbers(part) for part in ("train", "held_out")}
        reward: Any = read_reward(args.reward)
        options |= dict(max_steps=None, clip_actions="recorded")
    else:
        starts, reward = ToyStarts(), ToyDetectorReward()
        parts = {part: [*range(n, n + TOY_STARTS)] for part, n in {"train": 0, "held_out": TOY_HELD_OUT}.items()}
        options["max_steps"] = starts.setting.num_steps
    completed(reward, FrameRewardDefaults).to(imagination.world.device)
    rules = {"judge": "last", "reward_on": "last", **command_line.key_values(args.scoring, "--scoring")}
    options |= dict(scoring=made(Scoring, rules, "--scoring "), **command_line.key_values(args.options, "--options"))

    def make(num_envs: int, seed: int) -> WorldModelEnv:
        given = dict(imagination=imagination, starts=starts, reward=reward, num_envs=num_envs, seed=seed)
        return made(WorldModelEnv, {**options, **given}, "--options ")

    about: dict[str, Any] = dict(
        inputs=inputs, places=places, parts={name: rows for name, rows in parts.items() if rows}
    )
    about |= dict(card=card and asdict(card), has_failures=have_failures(path))
    served = ServedWorld(make, about, args.num_envs, args.sessions, args.idle)
    serve(served, args.host, args.port, token)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
