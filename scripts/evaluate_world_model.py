# SPDX-License-Identifier: Apache-2.0
"""Measure a tiny Video2World model on clips that it never saw: its loss at fixed noise levels before and after training
and that of linear denoisers, and its generated frames against the last given frame repeated, where something moves."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imaginaire import command_line
from imaginaire.errors import ConfigError

CONFIG = "cosmos_predict2/configs/base/config.py"
NUM_TRAINING_CLIPS = 256  # that the linear denoisers are fitted to
NUM_SHOWN, MAGNIFIED = 4, 4  # clips in the video, and how many times larger

_EPILOG = """\
The experiment says which clips: training ones for the linear denoisers, those of dataloader_val for everything else.
Words after -- are overrides of it, as in scripts.train. "Before" are the weights that its training begins with.

examples:
  python -m scripts.evaluate_world_model --experiment NAME --dit_path checkpoints/PROJECT/GROUP/NAME --load_ema
  python -m scripts.evaluate_world_model --experiment NAME --dit_path RUN --json out.json --save_path out.mp4
"""


@dataclass(frozen=True)
class Figures:
    """What was measured. Losses are of the velocity, one per noise level; PSNR is in dB, over what moves."""

    sigmas: list[float]
    before: list[float]
    after: list[float]
    linear: dict[str, list[float]]
    psnr: float
    psnr_before: float
    psnr_repeat: float
    num_clips: int

    @property
    def ratio(self) -> float:
        """The mean loss after training, as a share of that before."""
        return sum(self.after) / sum(self.before)

    @property
    def gain(self) -> float:
        """By how many dB generated frames are nearer to the truth than the last given frame."""
        return self.psnr - self.psnr_repeat


def evaluate(
    experiment: str,
    dit_path: str,
    *,
    which: str = "auto",
    num_clips: int = 64,
    num_steps: int = 35,
    save_path: str = "",
    overrides: Sequence[str] = (),
    config_path: str = CONFIG,
) -> Figures:
    """The figures of the weights at ``dit_path``; with ``save_path`` a video and a contact sheet are written too."""
    from cosmos_predict2.pipelines import held_out
    from cosmos_predict2.pipelines.assembly import build_net
    from cosmos_predict2.pipelines.video2world import Video2WorldPipeline
    from imaginaire import lazy_config
    from imaginaire.compose import compose

    config = compose(config_path, [f"experiment={experiment}", *overrides])
    model = lazy_config.instantiate(config.model["config"])
    sigmas, pipe_config = model.validation_sigmas, model.pipe_config
    tokenizer = lazy_config.instantiate(pipe_config.tokenizer)

    def clips_of(loader: str, num: int) -> held_out.Clips:
        return held_out.read_clips(_dataset(config, loader, num), tokenizer, pipe_config, num)

    clips, training = clips_of("dataloader_val", num_clips), clips_of("dataloader_train", NUM_TRAINING_CLIPS)
    losses, videos = {}, {"truth": clips.video_B_C_F_H_W}
    weights = (("before", model.model_manager_config.dit_path, "auto"), ("after", dit_path, which))
    for name, path, part in weights:
        net = build_net(pipe_config.net, device=torch.device("cpu"), dtype=torch.float32, path=path, which=part)
        losses[name] = held_out.losses(pipe_config, net, clips, sigmas)
        pipe = Video2WorldPipeline(pipe_config, net, tokenizer)
        videos[name] = held_out.generate(pipe, clips, num_steps=num_steps)
    if save_path:
        show(videos, held_out.movement(clips), Path(save_path), pipe_config.fps)
    return Figures(
        sigmas=list(sigmas),
        before=losses["before"],
        after=losses["after"],
        linear=held_out.linear_losses(training, clips, sigmas),
        psnr=held_out.moving_psnr(videos["after"], clips),
        psnr_before=held_out.moving_psnr(videos["before"], clips),
        psnr_repeat=held_out.moving_psnr(held_out.repeated(clips), clips),
        num_clips=len(clips),
    )


def show(videos: Mapping[str, Tensor], movement: Sequence[float], path: Path, fps: int) -> None:
    """Write the clips in which most moves: four below each other as a video, the first of them as a contact sheet."""
    from cosmos_predict2.data import media

    chosen = sorted(range(len(movement)), key=lambda i: -movement[i])[:NUM_SHOWN]
    rows = [torch.cat([video[i] for video in videos.values()], dim=3) for i in chosen]
    picture = torch.cat(rows, dim=2)
    picture = picture.repeat_interleave(MAGNIFIED, dim=2).repeat_interleave(MAGNIFIED, dim=3)
    media.write_video(path, picture, fps)
    clips = [video[chosen[0]] for video in videos.values()]
    media.write_image(path.with_suffix(".png"), media.contact_sheet(clips, list(videos), columns=8))


def _dataset(config: Any, loader: str, num: int) -> Any:
    """The data set of a loader, no larger than needed where it makes its clips."""
    from imaginaire import lazy_config

    node = getattr(config, loader)
    if node is None or node.get("dataset") is None:
        raise ConfigError(f"{loader} has no dataset to take clips from: choose one with {loader}=toy or another entry.")
    dataset = dict(node["dataset"])
    if "num_episodes" in dataset:
        dataset["num_episodes"] = num
    return lazy_config.instantiate(dataset)


def as_text(figures: Figures) -> str:
    """A table with a row per noise level."""
    linear = list(figures.linear)
    rows = [f"{'sigma':>8} {'before':>9} {'after':>9} " + " ".join(f"{'linear, ' + name:>20}" for name in linear)]
    for i, sigma in enumerate(figures.sigmas):
        others = " ".join(f"{figures.linear[name][i]:>20.4f}" for name in linear)
        rows.append(f"{sigma:>8.2f} {figures.before[i]:>9.4f} {figures.after[i]:>9.4f} {others}")
    rows.append(f"mean loss after / before: {figures.ratio:.3f} ({figures.num_clips} clips, given frames not counted)")
    rows.append(
        f"PSNR where something moves: {figures.psnr:.2f} dB; before {figures.psnr_before:.2f} dB; last given frame"
        f" repeated {figures.psnr_repeat:.2f} dB: {figures.gain:+.2f} dB"
    )
    return "\n".join(rows)


def _parser() -> command_line.Parser:
    parser = command_line.parser("scripts.evaluate_world_model", __doc__, _EPILOG)
    add = parser.add_argument
    add("--experiment", required=True, help="whose model and clips")
    add("--dit_path", required=True, metavar="PATH", help="the weights: a run's folder, a .pt or a safetensors file")
    add("--load_ema", action="store_true", help="take the averaged weights (net_ema.) of the file")
    add("--num_clips", type=int, default=64, help="held-out clips")
    add("--num_steps", type=int, default=35, help="sampling steps")
    add("--save_path", default="", metavar="FILE", help="write an mp4 of truth, before and after, and a .png beside it")
    add("--json", metavar="FILE", help="write the figures to this file too")
    add("overrides", nargs="*", metavar="OVERRIDE", help="of the experiment, after --")
    return parser


def run(args: argparse.Namespace) -> int:
    figures = evaluate(
        args.experiment,
        args.dit_path,
        which="net_ema" if args.load_ema else "auto",
        num_clips=args.num_clips,
        num_steps=args.num_steps,
        save_path=args.save_path,
        overrides=args.overrides,
    )
    print(as_text(figures))
    if args.json:
        record = {**asdict(figures), "ratio": figures.ratio, "gain": figures.gain}
        Path(args.json).write_text(json.dumps(record, indent=2) + "\n")
    return 0


def main() -> int:
    return command_line.main(_parser(), run)


if __name__ == "__main__":
    sys.exit(main())
