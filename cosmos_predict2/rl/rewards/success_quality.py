# SPDX-License-Identifier: Apache-2.0
"""The worth of a success classifier on pictures that it never saw: picture by picture, and at the ends of episodes.

Letters: N pictures.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from cosmos_predict2.evaluation.metrics.agreement import area_under_curve
from cosmos_predict2.rl.rewards.resnet import SuccessClassifier
from cosmos_predict2.rl.rewards.success_training import LabelledPictures, log_odds

# Kinds of pictures: of recordings as they are, as the tokenizer leaves them, and with their actions imagined.
TRUE, ROUND_TRIP, OUTCOME = "held out", "tokenizer round trip", "imagined, by the outcome"
NUM_BINS = 10
_ONE_SIDED = 1.645  # deviations that chance exceeds in 5 of 100 cases


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
    probability = log_odds(model, pictures.pictures_N_H_W_C)[:, 0].double().sigmoid()
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
    true_positive_rate: float  # by the threshold
    false_positive_rate: float
    value_of_successes: float  # means of what is paid
    value_of_failures: float

    def as_text(self) -> str:
        return (
            f"{self.episodes} ends, {self.successes} with success: area under the curve {self.area_under_curve:.3f}"
            f" (chance: up to {self.chance:.3f}), true positives {self.true_positive_rate:.3f}, false positives"
            f" {self.false_positive_rate:.3f}"
        )


def measure_ends(model: SuccessClassifier, ends: LabelledPictures, threshold: float) -> Ends:
    """The worth of a classifier on the last pictures of episodes."""
    outputs_N_K = log_odds(model, ends.pictures_N_H_W_C).double().sigmoid()
    truth, judged, value = ends.success_N.bool(), outputs_N_K[:, 0] >= threshold, outputs_N_K[:, -1]
    positives, negatives = int(truth.sum()), int((~truth).sum())
    deviation = math.sqrt((positives + negatives + 1) / (12 * max(1, positives * negatives)))  # of ranks (Mann-Whitney)
    return Ends(
        episodes=len(truth),
        successes=positives,
        area_under_curve=area_under_curve(value.numpy(), truth.numpy()).value,
        chance=min(1.0, 0.5 + _ONE_SIDED * deviation),
        true_positive_rate=_share(judged[truth]),
        false_positive_rate=_share(judged[~truth]),
        value_of_successes=_share(value[truth]),
        value_of_failures=_share(value[~truth]),
    )


def _share(values: Tensor) -> float:
    """The mean, NaN of nothing."""
    return float(values.double().mean()) if values.numel() else math.nan
