# SPDX-License-Identifier: Apache-2.0
"""Training a success classifier from labelled pictures, and what it is worth on pictures that it never saw.

    learnt, held_out = recorded_successes(folder, "next.success", None, near=3, val_fraction=0.1)
    train(model, LabelledPictures.joined(learnt), TrainingOptions(), seed=0)
    scale_to(model, held_out)                                    # probabilities that mean what they say
    threshold = calibrated_threshold(model, held_out, precision=0.9)
    quality = measure(model, others, threshold)

Letters: N pictures.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.data.lerobot import info
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.rl.rewards.resnet import SuccessClassifier, to_unit
from imaginaire.errors import DataError, TrainingError
from imaginaire.errors import near as close_names
from imaginaire.progress import Progress, tracked
from imaginaire.random import generator

NUM_BINS = 10
LEAST_HELD_OUT = 2  # episodes: one half calibrates, the other measures
_AT_ONCE = 256
_LEAST = 0.02  # share of positives, below which a threshold is no choice


@dataclass(frozen=True)
class LabelledPictures:
    """Pictures, whether the task is done on each, and which of the others nearly show it."""

    pictures_N_H_W_C: Tensor  # uint8
    success_N: Tensor  # bool
    near_N: Tensor  # bool; near misses

    def __len__(self) -> int:
        return len(self.success_N)

    @classmethod
    def joined(cls, parts: "Sequence[LabelledPictures]") -> "LabelledPictures":
        return cls(
            torch.cat([part.pictures_N_H_W_C for part in parts]),
            torch.cat([part.success_N for part in parts]),
            torch.cat([part.near_N for part in parts]),
        )

    def require_both(self, what: str) -> None:
        """Raise where all pictures show the same: a classifier made of them says one thing of every picture."""
        count = int(self.success_N.sum())
        if not 0 < count < len(self):
            raise DataError(
                f"Of {len(self)} pictures {what} {count} show success, but both are needed, success and failure: give"
                " more episodes, or other ones."
            )


def recorded_successes(
    folder: Path, column: str, camera: str | None, *, near: int, val_fraction: float
) -> tuple[list[LabelledPictures], list[LabelledPictures]]:
    """The episodes to learn from, and those that are held out; success is a number above 0.5 in ``column``.

    Of the other frames, those at most ``near`` before a success are near misses.
    """
    source = LeRobotSource.open(folder)
    if column not in source.info.features:
        raise DataError(
            f"{folder} has no column '{column}', which marks success.{close_names(column, source.info.features)}"
        )
    place = source.camera(camera)
    is_held_out = info.held_out(len(source), val_fraction)
    if is_held_out.sum() < LEAST_HELD_OUT:
        raise DataError(
            f"{folder}: {int(is_held_out.sum())} of {len(source)} episodes are held out, but {LEAST_HELD_OUT} are"
            " needed, to calibrate and to measure: give more episodes, or a larger --val_fraction."
        )
    parts: tuple[list[LabelledPictures], list[LabelledPictures]] = ([], [])
    for i in tracked(range(len(source)), "recordings", unit="episode"):
        success = torch.from_numpy(numpy.asarray(source.columns(i, [column])[column]).reshape(-1) > 0.5)
        pictures = source.frames(i, place, range(len(success))).permute(1, 2, 3, 0).contiguous()
        soon = torch.zeros_like(success)
        for step in range(1, near + 1):
            soon[:-step] |= success[step:]
        parts[bool(is_held_out[i])].append(LabelledPictures(pictures, success, soon & ~success))
    return parts


@dataclass(frozen=True)
class TrainingOptions:
    """How long, how fast, and of what a batch consists."""

    steps: int = 1500
    lr: float = 2e-3  # falls to 0 in a line
    batch_size: int = 64
    positives: float = 0.5  # share of a batch
    near_misses: float = 0.3  # share of a batch, where there are some
    mirror: bool = True  # also learn from mirrored pictures: of tasks that have no left and right


def train(
    model: SuccessClassifier, pictures: LabelledPictures, options: TrainingOptions, seed: int, device: str = "cpu"
) -> list[float]:
    """Binary cross-entropy on balanced batches of pictures that are `augmented`; gives the losses."""
    counts = _batch_of(pictures, options)
    draws, losses = generator(seed, 0, "success classifier"), []
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, options.steps)
    with Progress("success classifier", options.steps, unit="step") as progress:
        for step in range(options.steps):
            rows = torch.cat([kind[torch.randint(len(kind), (count,), generator=draws)] for kind, count in counts])
            images = augmented(to_unit(pictures.pictures_N_H_W_C[rows]), draws, mirror=options.mirror).to(device)
            wanted = pictures.success_N[rows].float().to(device)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model.logits(images)[:, 0], wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                raise TrainingError(f"The classifier diverged at step {step} of {options.steps}: lower --lr.")
            progress.update()
    model.eval()
    return losses


def _batch_of(pictures: LabelledPictures, options: TrainingOptions) -> list[tuple[Tensor, int]]:
    """The rows of each kind of picture, and how many of them a batch has."""
    near = pictures.near_N & ~pictures.success_N
    kinds = [k.nonzero()[:, 0] for k in (pictures.success_N, near, ~near & ~pictures.success_N)]
    pictures.require_both("to learn from")
    positives = max(1, round(options.positives * options.batch_size))
    misses = round(options.near_misses * options.batch_size) if len(kinds[1]) else 0
    misses = misses if len(kinds[2]) else options.batch_size - positives
    counts = [positives, misses, options.batch_size - positives - misses]
    return [(kind, count) for kind, count in zip(kinds, counts, strict=True) if count > 0]


def augmented(images_B_C_H_W: Tensor, draws: torch.Generator, shift: int = 2, *, mirror: bool = True) -> Tensor:
    """The same scenes seen otherwise: mirrored, shifted by pixels, brighter or darker, with a little noise."""
    batch = len(images_B_C_H_W)
    mirrored = torch.rand(2, batch, 1, 1, 1, generator=draws) < (0.5 if mirror else 0.0)
    images = torch.where(mirrored[0], images_B_C_H_W.flip(3), images_B_C_H_W)
    images = torch.where(mirrored[1], images.flip(2), images)
    padded = torch.nn.functional.pad(images, [shift] * 4, mode="replicate")
    top, left = torch.randint(0, 2 * shift + 1, (2,), generator=draws).tolist()
    images = padded[:, :, top : top + images.shape[2], left : left + images.shape[3]]
    gain, offset = (torch.rand(2, batch, 1, 1, 1, generator=draws) - 0.5).unbind()
    noise = 0.04 * torch.rand(batch, 1, 1, 1, generator=draws) * torch.randn(images.shape, generator=draws)
    return images * (1 + 0.2 * gain) + 0.2 * offset + noise


@torch.no_grad()
def log_odds(model: SuccessClassifier, pictures_N_H_W_C: Tensor) -> Tensor:
    """What the classifier says of pictures, [N]."""
    device = next(model.parameters()).device
    parts = [model.logits(to_unit(part.to(device)))[:, 0].cpu() for part in pictures_N_H_W_C.split(_AT_ONCE)]
    return torch.cat(parts)


def scale_to(model: SuccessClassifier, held_out: LabelledPictures) -> tuple[float, float]:
    """Put the scale and offset of log-odds that fit held-out pictures best into the last layer (Platt); gives them.

    Training saw balanced batches, so that its probabilities are too high where success is rare.
    """
    logits, wanted = log_odds(model, held_out.pictures_N_H_W_C).double(), held_out.success_N.double()
    scale, offset = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    parameters = [scale.requires_grad_(), offset.requires_grad_()]
    optimizer = torch.optim.LBFGS(parameters, max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scale * logits + offset, wanted)
        loss = loss + 1e-4 * (scale - 1).square()  # finite where the kinds are perfectly apart
        loss.backward()
        return loss

    optimizer.step(closure)
    head = model.net[7]
    assert isinstance(head, torch.nn.Linear)
    with torch.no_grad():
        head.weight.mul_(scale.float())
        head.bias.mul_(scale.float()).add_(offset.float())
    return float(scale.detach()), float(offset.detach())


def calibrated_threshold(model: SuccessClassifier, held_out: LabelledPictures, precision: float) -> float | None:
    """The lowest probability from which on so large a share of pictures truly shows success; None if there is none."""
    probability, order = log_odds(model, held_out.pictures_N_H_W_C).double().sigmoid().sort(descending=True)
    hits = held_out.success_N[order].cumsum(0)
    reached = hits / torch.arange(1, len(hits) + 1)
    least = max(1.0, _LEAST * float(held_out.success_N.sum()))
    is_whole = torch.cat([probability[1:] < probability[:-1], torch.tensor([True])])  # equal ones go together
    good = ((reached >= precision) & (hits >= least) & is_whole).nonzero()
    return float(probability[good[-1, 0]]) if len(good) else None


@dataclass(frozen=True)
class Bin:
    """Pictures of about the same probability, and what share of them truly shows success."""

    low: float
    high: float
    count: int
    probability: float
    rate: float


@dataclass(frozen=True)
class Quality:
    """What a classifier is worth on labelled pictures. Shares of nothing are NaN."""

    count: int
    base_rate: float
    threshold: float
    precision: float
    recall: float
    accuracy: float
    calibration_error: float  # mean |probability - rate| over the bins, by count
    bins: list[Bin]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        return (
            f"{self.count} pictures, {self.base_rate:.3f} with success: precision {self.precision:.3f}, recall"
            f" {self.recall:.3f}, accuracy {self.accuracy:.3f}, calibration error {self.calibration_error:.3f}"
        )


def measure(model: SuccessClassifier, pictures: LabelledPictures, threshold: float) -> Quality:
    """Precision, recall and reliability on labelled pictures."""
    probability = log_odds(model, pictures.pictures_N_H_W_C).double().sigmoid()
    true, judged = pictures.success_N.bool(), probability >= threshold

    def share(values: Tensor) -> float:
        return float(values.double().mean()) if len(values) else math.nan

    bins = []
    place = (probability * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    for k in range(NUM_BINS):
        own = place == k
        if own.any():
            edges = k / NUM_BINS, (k + 1) / NUM_BINS
            bins.append(Bin(*edges, int(own.sum()), share(probability[own]), share(true[own])))
    return Quality(
        count=len(true),
        base_rate=share(true),
        threshold=threshold,
        precision=share(true[judged]),
        recall=share(judged[true]),
        accuracy=share(judged == true),
        calibration_error=sum(b.count * abs(b.probability - b.rate) for b in bins) / max(1, len(true)),
        bins=bins,
    )


def reliability_svg(qualities: dict[str, Quality], side: int = 280) -> str:
    """A picture of probabilities against true shares, one panel for each kind of picture; larger dots hold more."""
    margin, gap = 44, 24
    panels = []
    for i, (name, quality) in enumerate(qualities.items()):
        left = margin + i * (side + gap)
        most = max((one.count for one in quality.bins), default=1)
        dots = "".join(
            f'<circle cx="{left + side * one.probability:.1f}" cy="{margin + side * (1 - one.rate):.1f}"'
            f' r="{3 + 7 * math.sqrt(one.count / most):.1f}" fill="#2a6fb0" fill-opacity="0.8"><title>{one.count}'
            f" pictures: said {one.probability:.2f}, true {one.rate:.2f}</title></circle>"
            for one in quality.bins
        )
        at = left + side * quality.threshold
        panels.append(
            f'<rect x="{left}" y="{margin}" width="{side}" height="{side}" fill="none" stroke="#999"/>'
            f'<line x1="{left}" y1="{margin + side}" x2="{left + side}" y2="{margin}" stroke="#bbb"/>'
            f'<line x1="{at:.1f}" y1="{margin}" x2="{at:.1f}" y2="{margin + side}" stroke="#c33" stroke-dasharray="4"/>'
            f'<text x="{left}" y="{margin - 22}">{name}</text><text x="{left}" y="{margin - 7}">precision'
            f" {quality.precision:.2f}, recall {quality.recall:.2f}</text>{dots}"
        )
    width, height = margin + len(panels) * (side + gap), 2 * margin + side
    caption = f'<text x="{margin}" y="{height - 16}">right: said probability; up: true share of success</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        f' font-size="13" fill="#555">{"".join(panels)}{caption}</svg>\n'
    )
