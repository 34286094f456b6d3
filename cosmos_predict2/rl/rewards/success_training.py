# SPDX-License-Identifier: Apache-2.0
"""Training a success classifier from labelled pictures; its calibration and its worth on pictures that it never saw.

    train(model, LabelledPictures.joined(learnt), TrainingOptions(), seed=0)
    scale_to(model, held_out)                                    # probabilities that mean what they say
    threshold = middle_threshold(model, [held_out], precision=0.9, recall=0.5)
    quality = measure(model, others, threshold.value)            # picture by picture, and by ends of episodes

Letters: N pictures.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as binary_cross_entropy

from cosmos_predict2.evaluation.metrics.agreement import area_under_curve
from cosmos_predict2.rl.rewards.resnet import SuccessClassifier, log_odds, to_unit
from imaginaire.errors import DataError, TrainingError
from imaginaire.log import Progress
from imaginaire.random import generator

_SHIFT = 2  # pixels, by which pictures are moved at most
_LEAST = 0.02  # share of positives, below which a threshold is no choice
_NEARLY = 0.9  # of the best
# Kinds of pictures: of recordings as they are, as the tokenizer leaves them, and with their actions imagined.
TRUE, ROUND_TRIP, OUTCOME = "held out", "tokenizer round trip", "imagined, by the outcome"
NUM_BINS = 10
_ONE_SIDED = 1.645  # deviations that chance exceeds in 5 of 100 cases


@dataclass(frozen=True)
class LabelledPictures:
    """Pictures, whether the task is done on each, and which of the others nearly show it."""

    pictures_N_H_W_C: Tensor  # uint8
    success_N: Tensor  # bool
    near_N: Tensor  # bool; near misses
    progress_N: Tensor | None = None  # in [0, 1], 1 where the task is done; of classifiers that say it

    def __len__(self) -> int:
        return len(self.success_N)

    @classmethod
    def joined(cls, parts: "Sequence[LabelledPictures]") -> "LabelledPictures":
        progress = [part.progress_N for part in parts if part.progress_N is not None]
        return cls(
            torch.cat([part.pictures_N_H_W_C for part in parts]),
            torch.cat([part.success_N for part in parts]),
            torch.cat([part.near_N for part in parts]),
            torch.cat(progress) if len(progress) == len(parts) else None,
        )

    def rows(self, rows: slice) -> "LabelledPictures":
        progress = None if self.progress_N is None else self.progress_N[rows]
        # A copy: the part of a larger tensor would hold all of it in memory.
        pictures = self.pictures_N_H_W_C[rows].clone()
        return LabelledPictures(pictures, self.success_N[rows], self.near_N[rows], progress)

    def thinned(self, every: int) -> "LabelledPictures":
        """Every so many pictures, the last one among them."""
        return self.rows(slice((len(self) - 1) % every, None, every)) if every > 1 else self

    def wanted(self, num_heads: int) -> Tensor:
        """Targets of the outputs of a classifier, [N, K]: success, and progress where it has that."""
        success_N = self.success_N.float()
        if num_heads == 1:
            return success_N[:, None]
        assert self.progress_N is not None, "a classifier with progress learns from pictures that have it"
        return torch.stack([success_N, self.progress_N.float()], dim=1)

    @property
    def has_both(self) -> bool:
        return 0 < int(self.success_N.sum()) < len(self)

    def require_both(self, what: str) -> None:
        """Raise where all pictures show the same: a classifier made of them gives every picture the same answer."""
        if not self.has_both:
            count = int(self.success_N.sum())
            raise DataError(
                f"Of {len(self)} pictures {what} {count} show success, but both are needed, success and failure: give"
                " more episodes, or other ones."
            )


@dataclass(frozen=True)
class TrainingOptions:
    """Length, learning rate, and the parts of a batch."""

    steps: int = 1500
    lr: float = 2e-3  # falls to 0 in a line
    batch_size: int = 64
    positives: float = 0.5  # share of a batch
    near_misses: float = 0.3  # share of a batch, where there are some


def train(
    model: SuccessClassifier, pictures: LabelledPictures, options: TrainingOptions, seed: int, device: str = "cpu"
) -> list[float]:
    """Binary cross-entropy of each output, on balanced batches of pictures that are `augmented`; gives the losses."""
    counts, wanted_N_K = _batch_of(pictures, options), pictures.wanted(len(model.heads))
    draws, losses = generator(seed, 0, "success classifier"), []
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, options.steps)
    with Progress("success classifier", options.steps, unit="step") as progress:
        for step in range(options.steps):
            rows = torch.cat([kind[torch.randint(len(kind), (count,), generator=draws)] for kind, count in counts])
            images = augmented(to_unit(pictures.pictures_N_H_W_C[rows]), draws).to(device)
            outputs = zip(model.logits(images).T, wanted_N_K[rows].to(device).T, strict=True)
            loss = torch.stack([binary_cross_entropy(logits, wanted) for logits, wanted in outputs]).sum()
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


def augmented(images_B_C_H_W: Tensor, draws: torch.Generator) -> Tensor:
    """The same scenes seen otherwise: shifted by pixels, brighter or darker, with a little noise. They are not
    mirrored: a task may have a left and a right."""
    batch, _, height, width = images_B_C_H_W.shape
    torch.rand(2, batch, generator=draws)  # decided about mirroring once: what follows is drawn as it was
    padded = torch.nn.functional.pad(images_B_C_H_W, [_SHIFT] * 4, mode="replicate")
    top, left = torch.randint(0, 2 * _SHIFT + 1, (2,), generator=draws).tolist()
    images = padded[:, :, top : top + height, left : left + width]
    gain, offset = (torch.rand(2, batch, 1, 1, 1, generator=draws) - 0.5).unbind()
    noise = 0.04 * torch.rand(batch, 1, 1, 1, generator=draws) * torch.randn(images.shape, generator=draws)
    return images * (1 + 0.2 * gain) + 0.2 * offset + noise


def scale_to(model: SuccessClassifier, held_out: LabelledPictures) -> list[tuple[float, float]]:
    """Put the scale and offset of log-odds that fit held-out pictures best into the last layers (Platt); gives them.

    Training saw balanced batches, so that its probabilities are too high where success is rare.
    """
    logits_N_K, found = log_odds(model, held_out.pictures_N_H_W_C).cpu().double(), []
    wanted_N_K = held_out.wanted(len(model.heads)).double()
    for head, logits, wanted in zip(model.heads, logits_N_K.T, wanted_N_K.T, strict=True):
        scale, offset = _fitted(logits, wanted)
        with torch.no_grad():
            head.weight.mul_(scale.float())
            head.bias.mul_(scale.float()).add_(offset.float())
        found.append((float(scale), float(offset)))
    return found


def _fitted(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    scale, offset = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    parameters = [scale.requires_grad_(), offset.requires_grad_()]
    optimizer = torch.optim.LBFGS(parameters, max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = binary_cross_entropy(scale * logits + offset, wanted)
        loss = loss + 1e-4 * (scale - 1).square()  # finite where the kinds are perfectly apart
        loss.backward()
        return loss

    optimizer.step(closure)
    return scale.detach(), offset.detach()


@dataclass(frozen=True)
class Threshold:
    """The middle of a range of thresholds of the probability, any of which would do."""

    value: float
    low: float
    high: float
    is_precise: bool  # else none is as precise as was asked for, and the range is that of the best ones


def middle_threshold(
    model: SuccessClassifier, kinds: Sequence[LabelledPictures], precision: float, recall: float
) -> Threshold:
    """The middle, by log-odds, of the widest range of thresholds with this precision and recall on each of these kinds
    of held-out pictures that has successes and failures.

    At the edge of the range a picture more or less decides, in its middle none. Where no threshold is so precise, the
    range is that of those whose share of successes found, less the share of failures taken for one, is at least 0.9
    of the best (`_NEARLY`); of several kinds the worst counts.
    """
    kinds = [kind for kind in kinds if kind.has_both]
    logits = [log_odds(model, kind.pictures_N_H_W_C)[:, 0].cpu().double() for kind in kinds]
    thresholds_N = torch.cat(logits).unique().flip(0)  # falling
    precise, found, gains = [], [], []
    for of_kind, kind in zip(logits, kinds, strict=True):
        hits_N, misses_N = (_at_least(of_kind[rows], thresholds_N) for rows in (kind.success_N, ~kind.success_N))
        precise.append(hits_N / (hits_N + misses_N).clamp(min=1))
        found.append(hits_N / kind.success_N.sum())
        gains.append(found[-1] - misses_N / (~kind.success_N).sum())
    worst_N = torch.stack(gains).amin(0)
    is_good = (torch.stack(precise) >= precision).all(0) & (torch.stack(found) >= max(recall, _LEAST)).all(0)
    if not (is_precise := bool(is_good.any())):
        is_good = worst_N >= _NEARLY * worst_N.max()
    # The same pictures are taken until the next threshold below: a range reaches until there.
    ranges = []
    for good, run in itertools.groupby(range(len(thresholds_N)), key=lambda k: bool(is_good[k])):
        rows = list(run)
        if good:
            ranges.append((float(thresholds_N[min(rows[-1] + 1, len(thresholds_N) - 1)]), float(thresholds_N[rows[0]])))
    low, high = max(ranges, key=lambda edges: edges[1] - edges[0])
    value, low, high = torch.tensor([(low + high) / 2, low, high], dtype=torch.float64).sigmoid().tolist()
    return Threshold(value, low, high, is_precise)


def _at_least(values: Tensor, thresholds_N: Tensor) -> Tensor:
    """Number of values that reach each threshold."""
    return len(values) - torch.searchsorted(values.sort().values, thresholds_N.contiguous())


# --- what a classifier is worth


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
    """The quality of a classifier on labelled pictures. Shares of nothing are NaN."""

    count: int
    base_rate: float
    threshold: float
    precision: float
    recall: float
    accuracy: float
    calibration_error: float  # mean |probability - rate| over the bins, by count
    bins: list[Bin]

    def as_text(self) -> str:
        return (
            f"{self.count} pictures, {self.base_rate:.3f} with success: precision {self.precision:.3f}, recall"
            f" {self.recall:.3f}, accuracy {self.accuracy:.3f}, calibration error {self.calibration_error:.3f}"
        )


def measure(model: SuccessClassifier, pictures: LabelledPictures, threshold: float) -> Quality:
    """Precision, recall and reliability on labelled pictures."""
    probability = log_odds(model, pictures.pictures_N_H_W_C)[:, 0].cpu().double().sigmoid()
    true, judged = pictures.success_N.bool(), probability >= threshold

    bins = []
    place = (probability * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    for k in range(NUM_BINS):
        own = place == k
        if own.any():
            edges = k / NUM_BINS, (k + 1) / NUM_BINS
            bins.append(Bin(*edges, int(own.sum()), _share(probability[own]), _share(true[own])))
    return Quality(
        count=len(true),
        base_rate=_share(true),
        threshold=threshold,
        precision=_share(true[judged]),
        recall=_share(judged[true]),
        accuracy=_share(judged == true),
        calibration_error=sum(b.count * abs(b.probability - b.rate) for b in bins) / max(1, len(true)),
        bins=bins,
    )


@dataclass(frozen=True)
class Ends:
    """The quality of a reward at the ends of episodes, where it is paid: one picture of each, by what truly happened.

    The area under the curve is the probability that the value of a success is above that of a failure: 0.5 by chance,
    which stays below ``chance`` in 95 of 100 cases.
    """

    episodes: int
    successes: int
    area_under_curve: float
    chance: float
    rated: int  # episodes that the rates by the threshold are of: those that did not set it, if they have both outcomes
    true_positive_rate: float
    false_positive_rate: float
    value_of_successes: float  # means of what is paid
    value_of_failures: float

    def as_text(self) -> str:
        return (
            f"{self.episodes} ends, {self.successes} with success: area under the curve {self.area_under_curve:.3f}"
            f" (chance: up to {self.chance:.3f}), true positives {self.true_positive_rate:.3f}, false positives"
            f" {self.false_positive_rate:.3f} (of {self.rated})"
        )


def measure_ends(model: SuccessClassifier, ends: LabelledPictures, threshold: float, num_setting: int = 0) -> Ends:
    """The worth of a classifier on the last pictures of episodes, of which the first so many set the threshold."""
    outputs_N_K = log_odds(model, ends.pictures_N_H_W_C).cpu().double().sigmoid()
    truth, judged, value = ends.success_N.bool(), outputs_N_K[:, 0] >= threshold, outputs_N_K[:, -1]
    positives, negatives = int(truth.sum()), int((~truth).sum())
    rated = slice(num_setting if ends.rows(slice(num_setting, None)).has_both else 0, None)
    deviation = math.sqrt((positives + negatives + 1) / (12 * max(1, positives * negatives)))  # of ranks (Mann-Whitney)
    return Ends(
        episodes=len(truth),
        successes=positives,
        area_under_curve=area_under_curve(value.numpy(), truth.numpy()).value,
        chance=min(1.0, 0.5 + _ONE_SIDED * deviation),
        rated=len(truth[rated]),
        true_positive_rate=_share(judged[rated][truth[rated]]),
        false_positive_rate=_share(judged[rated][~truth[rated]]),
        value_of_successes=_share(value[truth]),
        value_of_failures=_share(value[~truth]),
    )


def _share(values: Tensor) -> float:
    """The mean, NaN of nothing."""
    return float(values.double().mean()) if values.numel() else math.nan
