# SPDX-License-Identifier: Apache-2.0
"""Serve rewards over HTTP: trainers post clips, get a ticket at once, and fetch the scores later."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # so that the file also runs as python scripts/reward_service.py

from cosmos_predict2.rl.rewards.local import REWARDS
from cosmos_predict2.rl.rewards.service.running import serve, try_rewards
from cosmos_predict2.rl.rewards.service.settings import DEFAULT_QUEUE, read_settings
from imaginaire import command_line

_EPILOG = f"""\
Rewards by name: {", ".join(sorted(REWARDS))}; one of your own: NAME=module:Class.
The token of the clients is read from WFM_REWARD_TOKEN. Ctrl-C finishes running jobs; waiting ones stay in the queue.

examples:
  python -m scripts.reward_service --rewards smoothness,agreement --decoder tiny
  python -m scripts.reward_service --config service.toml --check
  WFM_REWARD_TOKEN=... python -m scripts.reward_service --host 0.0.0.0 --rewards dance_grpo --queue redis://HOST:6379/0
"""

parser = command_line.parser("scripts.reward_service", __doc__, _EPILOG)
add = parser.add_argument
add("--rewards", default="", metavar="NAME,...", help="which rewards to serve (default: those of --config)")
add("--config", metavar="FILE", help="a service.toml; flags count more than its fields")
add("--host", help="address to listen on; other machines reach only a service with a token (default: 127.0.0.1)")
add("--port", type=int, help="port to listen on (default: 8080)")
add("--queue", help=f"redis://HOST:PORT/DB, or a file for SQLite (default: {DEFAULT_QUEUE})")
add("--decoder", help="tokenizer that decodes latents: a file of the Wan2.1 tokenizer, or tiny")
add("--check", action="store_true", help="start the service on a free port, score one clip with each reward, and stop")


def run(args: argparse.Namespace) -> int:
    names = [name.strip() for name in args.rewards.split(",") if name.strip()]
    settings = read_settings(args.config, names, host=args.host, port=args.port, queue=args.queue)
    if args.decoder:
        settings.decode.model_path = args.decoder
    return try_rewards(settings) if args.check else serve(settings)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
