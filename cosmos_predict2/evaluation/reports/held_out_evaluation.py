# SPDX-License-Identifier: Apache-2.0
"""A Video2World model on held-out clips, before and after its training, beside linear denoisers and a standstill, and
what it leaves in a folder: index.html with the videos that it shows, which opens without a network; figures.json.
"""

import logging
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.callbacks.draw_samples import side_by_side
from cosmos_predict2.checkpoints.dit_weights import described_weights
from cosmos_predict2.data.video import media
from cosmos_predict2.evaluation.metrics import held_out
from cosmos_predict2.evaluation.reports.evaluation_page import FIGURES, Page, Table, aligned, shown_width
from cosmos_predict2.models.text import TrainingText
from cosmos_predict2.pipelines.recorded_run import dataset_node, described_dataset, held_out_doubt, held_out_node
from cosmos_predict2.world_model.world_model import build_world_model
from imaginaire import storage
from imaginaire.checkpoint.weight_files import latest
from imaginaire.config import lazy_config
from imaginaire.data.facts import facts_of
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

NUM_TRAINING_CLIPS = 256  # that the linear denoisers are fitted to
WIDEST = 1024  # network that is evaluated here
BETTER = 0.99  # of the loss before the training: a run that starts from good weights is good without learning
NUM_SHOWN = 4  # clips in a video, those in which most moves
TRUTH, BEFORE, AFTER = "truth", "before", "after"


@dataclass(frozen=True)
class Figures:
    """The measurements. Losses are of the velocity, one per noise level; PSNR is in dB, over what moves."""

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
        """The PSNR of generated frames above that of the last conditioning frame, in dB."""
        return self.psnr - self.psnr_repeat

    @property
    def verdict(self) -> str:
        """A sentence on what the training has achieved, from the controls measured beside it."""
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
        """The weights, the data and the sampling, and what the weights are compared with."""
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

    def as_dict(self) -> dict[str, Any]:
        claim = {"verdict": self.verdict, "cautions": self.cautions}
        return {**claim, **asdict(self), "ratio": self.ratio, "gain": self.gain}

    def tables(self) -> list[Table]:
        """The loss at each noise level, and the PSNR where something moves."""
        frames = {AFTER: self.psnr, BEFORE: self.psnr_before, "last conditioning frame repeated": self.psnr_repeat}
        return [
            ("loss at sigma", [f"{sigma:g}" for sigma in self.sigmas], list(self.losses().items())),
            ("frames", ["PSNR (dB) where something moves"], [(name, [value]) for name, value in frames.items()]),
        ]

    def as_text(self) -> str:
        tables = [line for table in self.tables() for line in ["", *aligned(*table)]]
        return "\n".join([self.verdict, *(f"caution: {text}" for text in self.cautions), *self.facts(), *tables])


@dataclass(frozen=True)
class HeldOutEvaluation:
    """The figures, and the clips by name (TRUTH, BEFORE, AFTER): uint8 [B, 3, F, H, W]."""

    figures: Figures
    videos: dict[str, Tensor]
    shown: list[int]  # the clips in which most moves
    fps: float

    def write_report(self, folder: Path, fps: float) -> Path:
        """Write the page, its videos and the figures; gives the page."""
        folder.mkdir(parents=True, exist_ok=True)
        figures, (losses, frames) = self.figures, self.figures.tables()
        page = Page("What the Video2World model has learned", figures.facts(), shown_width(self.videos[TRUTH]))
        page.verdict(f"The model {figures.verdict}.")
        for caution in figures.cautions:
            page.verdict(f"Caution: {caution}.")
        page.heading("Truth, before and after the training", "All get the same first frames, text and noise.")
        for i in self.shown:
            clips = [(f"clip_{i:02d}_{name}", f"clip {i}, {name}", video[i]) for name, video in self.videos.items()]
            page.videos(folder, fps, clips)
        page.note(
            f"Shown are {len(self.shown)} of {figures.num_clips} clips, those in which most moves; a model that has"
            " learned them moves as the truth does."
        )
        page.heading("Loss at fixed noise levels", "Mean squared error of the velocity, with the same noise for all.")
        page.curves({"loss": figures.losses()}, "noise level: the columns of the table below")
        page.note(
            f"After the training it is {figures.ratio:.2f} of that before, and {figures.best_linear:.2f} of that of the"
            " best linear denoiser, which uses no more than means and variances of the training clips."
        )
        page.table(*losses)
        page.heading("Frames", "PSNR to the truth in dB, over the pixels that move.")
        page.table(*frames)
        page.note(
            f"Generated frames are {figures.gain:+.1f} dB nearer to the truth than a standstill, and"
            f" {figures.psnr - figures.psnr_before:+.1f} dB nearer than before the training."
        )
        storage.write_json(folder / FIGURES, figures.as_dict())
        return page.write(folder)

    def show(self, path: Path, fps: float) -> Path:
        """Write the clips in which most moves below each other as a video, the first of them as a contact sheet beside
        it; gives the sheet."""
        rows = [[video[i] for video in self.videos.values()] for i in self.shown]
        media.write_video(path, side_by_side(rows, list(self.videos)), fps)
        clips = [video[self.shown[0]] for video in self.videos.values()]
        media.write_image(path.with_suffix(".png"), media.contact_sheet(clips, list(self.videos), columns=8))
        return path.with_suffix(".png")


def evaluate(
    config: Any, dit_path: str, *, data: str = "", which: str = "auto", num_clips: int = 64, num_steps: int = 35
) -> HeldOutEvaluation:
    """Measure the weights at ``dit_path`` with the model and the data of a configuration; ``data``: another folder."""
    if (width := config.model["config"]["pipe_config"]["net"].get("model_channels") or 0) > WIDEST:
        raise ConfigError(
            f"The network is {width} wide, but this evaluation computes on the CPU with all clips in memory, which tiny"
            " models allow. See clips beside the truth: examples/video2world.py --input_path CLIP --compare_to CLIP."
        )
    training_node, node = dataset_node(config, "dataloader_train"), held_out_node(config, data)
    if caution := held_out_doubt(training_node, node):
        log.warning("%s", caution)
    model = lazy_config.instantiate(config.model["config"])
    sigmas, pipe_config = model.validation_sigmas, model.pipe_config
    start = config.checkpoint.load_path or model.model_manager_config.dit_path
    of_start = "net_ema" if config.checkpoint.load_ema_to_reg else "auto"
    before = build_world_model(pipe_config, dtype=torch.float32).load(start, of_start, is_baseline=True)
    clips = _clips(node, num_clips, before, model)
    held_out.require_movement(clips)
    training = _clips(training_node, NUM_TRAINING_CLIPS, before, model)
    trained = (latest(dit_path), which)
    after = build_world_model(pipe_config, dtype=torch.float32).load(*trained)
    worlds = {BEFORE: before, AFTER: after}
    videos = {name: held_out.generate(world, clips, num_steps=num_steps) for name, world in worlds.items()}
    figures = Figures(
        sigmas=list(sigmas),
        before=held_out.losses(before, clips, sigmas),
        after=held_out.losses(after, clips, sigmas),
        linear=held_out.linear_losses(training, clips, sigmas),
        psnr=held_out.moving_psnr(videos[AFTER], clips),
        psnr_before=held_out.moving_psnr(videos[BEFORE], clips),
        psnr_repeat=held_out.moving_psnr(held_out.repeated(clips), clips),
        num_clips=len(clips),
        data=described_dataset(node),
        training_data=described_dataset(training_node),
        weights=described_weights(*trained),
        start=described_weights(start, of_start),
        num_steps=num_steps,
        cautions=(caution,) if caution else (),
    )
    fps = facts_of(node).rate or pipe_config.fps
    movement = held_out.movement(clips)
    shown = sorted(range(len(clips)), key=lambda i: -movement[i])[:NUM_SHOWN]
    return HeldOutEvaluation(figures, {TRUTH: clips.video_B_C_F_H_W, **videos}, shown, fps)


def _clips(node: Any, num: int, world: Any, model: Any) -> held_out.HeldOutClips:
    """The first clips of a data set, with the text of training."""
    with_text = partial(TrainingText(model.text).added_to, device=torch.device("cpu")) if model.text.is_set else None
    made = {"num_episodes": num} if "num_episodes" in node else {}  # no more than needed
    dataset = lazy_config.instantiate({**node, **made})
    return held_out.read_clips(dataset, world.tokenizer, model.pipe_config, num, with_text=with_text)
