# SPDX-License-Identifier: Apache-2.0
"""Fit the tiny tokenizer to recordings, and measure what any tokenizer keeps of them; needs no download and no GPU.

It begins with the shipped weights, or with principal components of the recordings (--start components), and learns from
the recordings that are not held out. What is held out measures it: decibels, the actions that are still read from
its pictures, and whether its latents have mean 0 and deviation 1 as world models expect. The figures are written
beside OUT, with a verdict and what to do.
"""

import argparse
import logging
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the file also runs as a program

from imaginaire import command_line, storage
from imaginaire.errors import ConfigError, DataError

log = logging.getLogger(__name__)

STEPS = 400
MOST_WINDOWS = 768  # of 13 pictures, which are held in memory

_EPILOG = """\
examples:
  python -m scripts.fit_tiny_tokenizer --data datasets/my_robot --split split.json --out my_tokenizer.safetensors
  python -m scripts.fit_tiny_tokenizer --data datasets/my_robot --measure tiny --out outputs/shipped.json
"""

parser = command_line.parser("scripts.fit_tiny_tokenizer", __doc__, _EPILOG)
add, count = parser.add_argument, command_line.at_least(1)
add("--out", required=True, type=command_line.file_to_write, metavar="FILE", help="weights to write (.safetensors)")
add("--data", required=True, metavar="DATA", help="the folder of recordings")
add("--minutes", type=float, default=None, help="length of training by the processor's clock, in place of --steps")
add("--seed", type=command_line.at_least(0), default=0, help="of data and start")
add("--split", default="", metavar="FILE", help="which episodes are held out (scripts.split_recordings)")
add("--steps", type=count, default=STEPS, help="of the optimizer")
add("--start", default="", metavar="FILE", help="weights to begin with, or components (default: those that ship)")
add("--camera", default=None, help="of several, the one to look at")
add("--video_size", type=count, nargs=2, default=None, metavar=("H", "W"), help="(default: at most 64, in their shape)")
add("--measure", default="", metavar="TOKENIZER", help="fit nothing: measure this file, tiny, or a Wan checkpoint")
add("--reward", default="", metavar="PATH", help="also compare what this reward model sees")
command_line.common(add, "device")


def run(args: argparse.Namespace) -> None:
    from cosmos_predict2.data.action_conditioned.recorded_episodes import open_episodes, read_windows
    from cosmos_predict2.data.lerobot.info import VAL_FRACTION, held_out
    from cosmos_predict2.data.lerobot.reader import LeRobotSource
    from cosmos_predict2.data.split import split_of
    from cosmos_predict2.data.views import views_of
    from cosmos_predict2.evaluation.metrics import tokenizer_quality as quality
    from cosmos_predict2.rl.rewards.resnet import ResnetReward
    from cosmos_predict2.tokenizers import tiny_fit
    from cosmos_predict2.tokenizers.tiny import PATCH, SHIPPED
    from cosmos_predict2.world_model.assembly import device_of

    if args.minutes is not None and args.minutes < 0:
        raise ConfigError(f"--minutes {args.minutes:g}: a number of at least 0.")
    if args.video_size and any(length % PATCH for length in args.video_size):
        height, width = args.video_size
        raise ConfigError(f"--video_size {height} {width}: height and width are multiples of {PATCH} pixels.")
    if not args.measure and Path(args.out).suffix == ".json":
        raise ConfigError(f"--out {args.out}: weights are written there, and their figures as .json beside them.")

    device = device_of(args.device)
    episodes = open_episodes(Path(args.data), camera=args.camera)
    if args.split:
        split = split_of(args.split, LeRobotSource.open(args.data))
        learnt, held = list(split.train), list(split.calibrate)
    else:
        is_held = held_out(len(episodes), VAL_FRACTION)
        learnt, held = ([i for i in range(len(episodes)) if is_held[i] == kind] for kind in (False, True))
    if not learnt or not held:
        raise DataError(f"{args.data} has {len(episodes)} episodes: one at least is held out, and one to learn from.")
    size = None if args.video_size is None else (args.video_size[0], args.video_size[1])
    shape: Any = dict(num_frames=quality.NUM_FRAMES, size=size, num_views=len(views_of(args.camera)))
    log.info("reading pictures of %d episodes, %d of them held out", len(learnt) + len(held), len(held))
    windows = read_windows(episodes, learnt, num=MOST_WINDOWS, **shape)
    measured = read_windows(episodes, held, num=quality.NUM_WINDOWS, **shape)

    about: dict[str, Any] = {"data": args.data, "split": args.split, "size": list(windows.pictures.shape[2:4])}
    figures_of = partial(quality.measure_tokenizer, held_out=measured, learnt=windows.evenly(quality.NUM_LEARNT))
    value = None
    if args.reward:  # the probability of success that it sees in pictures
        reward = ResnetReward(args.reward).to(device)
        value = lambda pictures_N_H_W_C: reward.outputs(pictures_N_H_W_C[:, None])[:, 0, 0]  # noqa: E731
    if args.measure:
        figures = figures_of(_tokenizer(args.measure, device), value=value)
        storage.write_json(Path(args.out), {"tokenizer": args.measure, **about, **figures.as_dict()})
        print(f"{args.out}: {figures.as_text()}")
        return

    def shown(step: int, part: float, decibels: list[float]) -> None:
        log.info("step %d, %.0f %%: %.1f dB of single frames, %.1f of groups of four", step, 100 * part, *decibels)

    began_at, start = time.process_time(), args.start or str(SHIPPED)
    length = tiny_fit.Length(steps=args.steps)
    if args.minutes is not None:
        length = tiny_fit.Length(seconds=60 * args.minutes, clock=time.process_time)
    net, steps = tiny_fit.fit(windows.pictures, length, seed=args.seed, start=start, device=device, report=shown)
    seconds = time.process_time() - began_at
    tiny_fit.write(args.out, net, {**_made(args, steps), "data": args.data, "began": start})
    figures, before = (figures_of(_tokenizer(args.out, device), value=value), figures_of(_tokenizer("tiny", device)))
    content = {"tokenizer": args.out, **about, **figures.as_dict(), "psnr_of_shipped": before.psnr}
    storage.write_json(
        Path(args.out).with_suffix(".json"), {**content, "steps": steps, "began": start, "seconds": seconds}
    )
    print(
        f"{args.out}: {steps} steps from {start}, {seconds:.0f} processor-seconds, {before.psnr:.1f} dB (the shipped"
        f" one) -> {figures.psnr:.1f} dB; figures: {Path(args.out).with_suffix('.json')}"
    )
    print(figures.as_text())


def _tokenizer(path: str, device: str) -> Any:
    """The tokenizer of a file: a tiny one, or a Wan checkpoint."""
    from cosmos_predict2.tokenizers.tiny import TinyTokenizer
    from cosmos_predict2.tokenizers.wan_vae import WanTokenizer

    tokenizer = WanTokenizer(path) if path.endswith(".pth") else TinyTokenizer(None if path == "tiny" else path)
    return tokenizer.to(device)


def _made(args: argparse.Namespace, steps: int) -> dict[str, str]:
    from imaginaire.training import provenance

    git = provenance.git_state(provenance.root())
    return {
        "command": parser.command(),
        "seed": str(args.seed),
        "commit": "unknown" if git is None else git["commit"][:12],
        "steps": str(steps),
    }


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
