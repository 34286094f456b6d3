# SPDX-License-Identifier: Apache-2.0
"""What an evaluation of a Video2World model leaves behind: a page with its videos, and its figures.

FOLDER/index.html              opens in any browser, without a network
FOLDER/figures.json            all figures
FOLDER/clip_00_truth.mp4 ...   what the page shows
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.data.video import media
from cosmos_predict2.evaluation.reports.evaluation_page import FIGURES, Page, aligned, shown_width, write_json, written

BETTER = 0.99  # of the loss before the training: a run that starts from good weights is good without learning
NUM_SHOWN, MAGNIFIED = 4, 4  # clips in a video, those in which most moves, and how many times larger
TRUTH, BEFORE, AFTER = "truth", "before", "after"


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
    data: str  # what they are of
    training_data: str  # that the linear denoisers were fitted to
    weights: str = ""  # which were measured
    start: str = ""  # which the training began with
    num_steps: int = 0  # of sampling
    cautions: tuple[str, ...] = ()  # what makes the verdict doubtful

    @property
    def ratio(self) -> float:
        """The mean loss after training, as a share of that before."""
        return sum(self.after) / sum(self.before)

    @property
    def best_linear(self) -> float:
        """The mean loss after training, as a share of that of the best linear denoiser."""
        return sum(self.after) / min(sum(losses) for losses in self.linear.values())

    @property
    def gain(self) -> float:
        """By how many dB generated frames are nearer to the truth than the last conditioning frame."""
        return self.psnr - self.psnr_repeat

    @property
    def verdict(self) -> str:
        """What the training has done, from the controls measured beside it."""
        if not self.ratio < BETTER:
            claim = "has learned next to nothing: its loss is as before the training, or higher"
        elif not self.gain > 0:
            claim = (
                "has learned something, but its frames are no nearer to the truth than the last conditioning frame"
                " repeated"
            )
        elif not self.psnr > self.psnr_before:
            claim = "has learned something, but its frames are no nearer to the truth than before the training"
        elif not self.best_linear < 1:
            claim = "has learned something, but a linear denoiser is as good or better"
        else:
            claim = "has learned these clips"
        return (
            f"{claim}: loss {self.ratio:.2f} of before, {self.best_linear:.2f} of the best linear denoiser;"
            f" where something moves its frames are {self.gain:+.1f} dB nearer to the truth than the last conditioning"
            f" frame repeated; measured on {self.data}"
        )

    def facts(self) -> list[str]:
        """What was measured, on what, and with what it is compared."""
        return [
            f"weights: {self.weights}",
            f"before the training: {self.start}",
            f"data: {self.num_clips} clip{'s' if self.num_clips > 1 else ''} of {self.data}; linear denoisers fitted to"
            f" {self.training_data}",
            f"{self.num_steps} sampling step{'s' if self.num_steps > 1 else ''}, conditioning frames not counted",
        ]

    def losses(self) -> dict[str, list[float]]:
        """The loss at each noise level, by what it is of."""
        return {BEFORE: self.before, AFTER: self.after} | {f"linear, {name}": of for name, of in self.linear.items()}

    def frames(self) -> dict[str, float]:
        """PSNR in dB where something moves, by what it is of."""
        return {AFTER: self.psnr, BEFORE: self.psnr_before, "last conditioning frame repeated": self.psnr_repeat}

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "cautions": self.cautions,
            **asdict(self),
            "ratio": self.ratio,
            "gain": self.gain,
        }

    def as_text(self) -> str:
        """The verdict, and the figures as two tables."""
        losses = [*aligned("loss at sigma", self.sigmas, self.losses().items())]
        frames = [*aligned("frames", ["PSNR where something moves"], [(k, [v]) for k, v in self.frames().items()])]
        cautions = [f"caution: {text}" for text in self.cautions]
        return "\n".join([self.verdict, *cautions, *self.facts(), "", *losses, "", *frames])


def write_report(
    folder: Path, figures: Figures, videos: Mapping[str, Tensor], movement: Sequence[float], fps: float
) -> Path:
    """Write all of it; gives the page. ``videos`` are uint8 [B, 3, F, H, W] by name, ``movement`` is of each clip."""
    folder.mkdir(parents=True, exist_ok=True)
    page = Page("What the Video2World model has learned", figures.facts(), shown_width(videos[TRUTH]))
    page.verdict(f"The model {figures.verdict}.")
    for caution in figures.cautions:
        page.verdict(f"Caution: {caution}.")
    page.heading("Truth, before and after the training", "All get the same first frames, and the same text and noise.")
    chosen = most_moving(movement)
    for i in chosen:
        page.clips(
            [
                written(folder, f"clip_{i:02d}_{name}", f"clip {i}, {name}", video[i], fps)
                for name, video in videos.items()
            ]
        )
    page.note(
        f"Shown are {len(chosen)} of {len(movement)} clips, those in which most moves; a model that has learned them"
        " moves as the truth does."
    )
    page.heading("Loss at fixed noise levels", "The mean squared error of the velocity, with the same noise for all.")
    page.curves({"loss": figures.losses()}, "noise level: the columns of the table below")
    page.note(
        f"After the training it is {figures.ratio:.2f} of that before, and {figures.best_linear:.2f} of that of the"
        " best linear denoiser, which uses no more than means and variances of the training clips."
    )
    rows = [[name, *(f"{value:.3f}" for value in values)] for name, values in figures.losses().items()]
    page.table(["sigma", *(f"{sigma:g}" for sigma in figures.sigmas)], rows)
    page.heading("Frames", "PSNR to the truth in dB, over the pixels that move.")
    page.table(["frames", "PSNR"], [[name, f"{value:.2f}"] for name, value in figures.frames().items()])
    page.note(
        f"Generated frames are {figures.gain:+.1f} dB nearer to the truth than a standstill, and"
        f" {figures.psnr - figures.psnr_before:+.1f} dB nearer than before the training."
    )
    write_json(folder / FIGURES, figures.as_dict())
    return page.write(folder)


def show(videos: Mapping[str, Tensor], movement: Sequence[float], path: Path, fps: float) -> None:
    """Write the clips in which most moves: four below each other as a video, the first of them as a contact sheet."""
    chosen = most_moving(movement)
    rows = [torch.cat([video[i] for video in videos.values()], dim=3) for i in chosen]
    picture = torch.cat(rows, dim=2)
    picture = picture.repeat_interleave(MAGNIFIED, dim=2).repeat_interleave(MAGNIFIED, dim=3)
    media.write_video(path, picture, fps)
    clips = [video[chosen[0]] for video in videos.values()]
    media.write_image(sheet_of(path), media.contact_sheet(clips, list(videos), columns=8))


def sheet_of(path: Path) -> Path:
    """Where the contact sheet of a video lies."""
    return path.with_suffix(".png")


def most_moving(movement: Sequence[float]) -> list[int]:
    """The clips that are shown."""
    return sorted(range(len(movement)), key=lambda i: -movement[i])[:NUM_SHOWN]
