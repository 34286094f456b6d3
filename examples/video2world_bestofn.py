# SPDX-License-Identifier: Apache-2.0
"""Several videos of one request, with a seed each, ranked by a critic: any reward of this repository, or of your own.

It writes <input>_seed<k>.mp4 into the folder, and beside each a .json and an .html with its score, whose name has the
score in percent where it is a share, such as the probability that a video has no anomalies.
"""

import argparse
import html
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file runs from a checkout as it is

from cosmos_predict2.rl.interfaces import Reward
from cosmos_predict2.world_model.options import VideoRequest
from examples import video2world, video2world_gr00t
from examples.video2world import Jobs, Program, request_of
from imaginaire.command_line import at_least
from imaginaire.errors import ConfigError, DataError

log = logging.getLogger("video2world_bestofn")

CRITIC, TINY_CRITIC = "cosmos_reason1", "cosmos_predict2.rl.rewards.toy:Contact"
DEADLINE_S = 3600.0  # of a critic that is a service


def add_flags(add: Callable[..., Any]) -> None:
    video2world_gr00t.add_flags(add, is_required=False)
    add("--num_generations", type=at_least(1, 10_000), default=2, metavar="N", help="videos, of seed, seed + 1, ...")
    critic = f"a reward by its name or module:Class (default {CRITIC}; tiny: {TINY_CRITIC}, of the toy world)"
    add("--critic", default=None, metavar="NAME", help=critic)
    add("--critic_path", default="", metavar="DIR", help="the critic's weights, where they are not on the hub")
    trials = "ask the critic so often, and take the mean: for one that draws its answers"
    add("--num_critic_trials", type=at_least(1, 1000), default=1, metavar="N", help=trials)
    add("--skip_generation", action="store_true", help="rank the videos that are there")


def settle(args: argparse.Namespace) -> int | None:
    from cosmos_predict2.rl.rewards.local import path_of

    if args.save_path.endswith(".mp4"):
        raise ConfigError(f"--save_path {args.save_path}: a folder is expected, for several videos.")
    if args.benchmark:
        raise ConfigError("--benchmark makes one video again and again: use examples/video2world.py.")
    if args.checkpoint_dir and os.path.exists(os.path.join(args.checkpoint_dir, "config.json")):
        args.critic_path, args.checkpoint_dir = args.checkpoint_dir, None  # the published meaning: the critic's folder
    args.critic = args.critic or (TINY_CRITIC if args.model_size == "tiny" else CRITIC)
    path_of(args.critic)  # raises for a name that is none
    args.save_path = os.path.join(args.save_path, "video.mp4")  # a batch's outputs have their default beside it
    if args.gr00t_variant:
        video2world_gr00t.settle(args)
    if not args.skip_generation:
        return None
    if args.batch_input_json or args.num_gpus > 1:
        raise ConfigError("--skip_generation ranks the videos of one request, in one process.")
    requests = seeds_of(args, request_of(args, is_tiny=args.model_size == "tiny"))
    if missing := [request.save_path for request in requests if not os.path.isfile(request.save_path)]:
        raise DataError(f"--skip_generation: there is no {missing[0]}. Its name has --input_path's, and --seed's.")
    rank(args, critic_of(args), requests)
    return 0


def seeds_of(args: argparse.Namespace, request: VideoRequest) -> list[VideoRequest]:
    """The request with each seed, and a file of its own."""
    stem = os.path.splitext(request.save_path)[0]
    if not args.batch_input_json:
        stem = os.path.join(os.path.dirname(request.save_path), Path(request.input_path).stem or "text")
    seeds = range(request.seed, request.seed + args.num_generations)
    return [replace(request, seed=seed, save_path=f"{stem}_seed{seed}.mp4") for seed in seeds]


def plan(args: argparse.Namespace, choice: Any, jobs: Jobs) -> Jobs:
    requests, settings = video2world_gr00t.prefixed(args, choice, jobs) if args.gr00t_variant else jobs
    return [one for request in requests for one in seeds_of(args, request)], settings


def after(args: argparse.Namespace, choice: Any, jobs: Jobs) -> None:
    critic, count = critic_of(args), args.num_generations
    for first in range(0, len(jobs[0]), count):
        rank(args, critic, [one for one in jobs[0][first : first + count] if os.path.isfile(one.save_path)])


# The critic -----------------------------------------------------------------------------------------------------------


def critic_of(args: argparse.Namespace) -> Reward:
    from cosmos_predict2.rl.rewards.local import LocalReward, build, scored_by

    if args.critic_path:
        return LocalReward(build(args.critic, {"model_path": args.critic_path}))
    return scored_by(args.critic, "--critic")


def rank(args: argparse.Namespace, critic: Reward, requests: Sequence[VideoRequest]) -> None:
    """Score the videos of one input, log them from the best to the worst, and write the scores beside them."""
    scored = []
    for request in requests:
        answers = [one for i in range(args.num_critic_trials) if (one := score(critic, request, i)) is not None]
        if answers:
            scored.append((sum(one["value"] for one in answers) / len(answers), request, answers))
        else:
            log.error("%s: the critic %s gave no score", request.save_path, args.critic)
    if requests and not scored:
        raise DataError(f"The critic {args.critic} gave no score of any video; the log has the reasons.")
    scored.sort(key=lambda one: -one[0])
    for place, (value, request, answers) in enumerate(scored, start=1):
        log.info("%d. %s: %.4f", place, request.save_path, value)
        record = {"critic": args.critic, "score": value, "place": place, "of": len(scored), "answers": answers}
        write_score(request, record)


def score(critic: Reward, request: VideoRequest, trial: int) -> dict[str, float] | None:
    """The value of a video and its parts; None where the critic gave none."""
    import torch

    from cosmos_predict2.data.video import media
    from cosmos_predict2.rl.interfaces import Clips
    from cosmos_predict2.tokenizers.sizes import latent_frames

    video, fps = media.read_video(request.save_path)
    given = latent_frames(request.num_conditional_frames) if request.num_conditional_frames else 0
    context = {"num_conditional_frames": torch.tensor([given])}
    ticket = critic.submit(Clips(None, video[None], [request.prompt], fps), context, f"{request.save_path}:{trial}")
    found = critic.fetch(ticket, DEADLINE_S)
    parts = {name: float(part[0]) for name, part in found.parts.items()}
    return {"value": float(found.value_B[0]), **parts} if bool(found.is_valid_B[0]) else None


def write_score(request: VideoRequest, record: dict[str, Any]) -> None:
    """<video>_score<percent>.json and .html, in place of earlier ones."""
    video = Path(request.save_path)
    for old in video.parent.iterdir():
        if re.fullmatch(rf"{re.escape(video.stem)}_score(\d{{3}})?\.(json|html)", old.name):
            old.unlink()
    percent = f"{round(100 * record['score']):03d}" if 0 <= record["score"] <= 1 else ""
    record = {"video": video.name, "prompt": request.prompt, "seed": request.seed, **record}
    rows = "".join(f"<tr><th>{name}<td>{html.escape(str(value))}" for name, value in record.items())
    page = f"<!DOCTYPE html><meta charset=utf-8><video controls loop src='{html.escape(video.name)}'></video>"
    stem = video.with_name(f"{video.stem}_score{percent}")
    Path(f"{stem}.html").write_text(f"{page}<table>{rows}</table>\n", encoding="utf-8")
    Path(f"{stem}.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


main = partial(
    video2world.main,
    program=Program(
        "Make several videos of a request and rank them.",
        add_flags,
        defaults={"save_path": "output/best-of-n"},
        settle=settle,
        plan=plan,
        after=after,
    ),
)

if __name__ == "__main__":
    sys.exit(main())
