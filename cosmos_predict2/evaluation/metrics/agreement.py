# SPDX-License-Identifier: Apache-2.0
"""Agreement of imagined with true: areas under curves, correlations and ranks, with bootstrap intervals.

Letters: N episodes, P policies.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

Floats = NDArray[numpy.float64]
Bools = NDArray[numpy.bool_]

DRAWS = 500  # of a bootstrap
INTERVAL = (5.0, 95.0)  # percentiles: of ten intervals nine hold the truth
Z = 1.645  # the same in deviations


@dataclass(frozen=True)
class Estimate:
    """A figure with the interval that holds the truth in nine of ten cases. NaN: of nothing."""

    value: float
    low: float = math.nan
    high: float = math.nan
    count: int = 0  # episodes, pairs or policies that it is of

    def less(self, other: "Estimate") -> "Estimate":
        """The difference, with the interval of independent figures: too wide for two that rise together."""
        value = self.value - other.value
        low = value - math.hypot(self.value - self.low, other.high - other.value)
        high = value + math.hypot(self.high - self.value, other.value - other.low)
        return Estimate(value, low, high, self.count)

    def as_text(self) -> str:
        if math.isnan(self.value):
            return "-"
        return f"{self.value:.2f}" + ("" if math.isnan(self.low) else f" [{self.low:.2f}, {self.high:.2f}]")


def area_under_curve(
    value_N: Floats,
    truth_N: Bools,
    is_pair_N_N: Bools | None = None,
    seed: int = 0,
    group_N: NDArray[Any] | None = None,
) -> Estimate:
    """The share of pairs of a success and a failure in which the success has the higher value; equal ones are half.

    ``is_pair_N_N`` marks the pairs that are compared, null: all. Episodes are drawn anew, each outcome by itself. Those
    of one of ``group_N`` are alike, such as attempts from one start: whole groups are drawn.
    """
    won, lost = value_N[truth_N], value_N[~truth_N]
    wins = (won[:, None] > lost[None]) + 0.5 * (won[:, None] == lost[None])
    pairs = numpy.ones_like(wins) if is_pair_N_N is None else is_pair_N_N[truth_N][:, ~truth_N].astype(float)
    if not pairs.sum():
        return Estimate(math.nan)
    random = numpy.random.default_rng(seed)
    if group_N is None:
        draws_P = random.multinomial(len(won), [1 / len(won)] * len(won), DRAWS)
        draws_N = random.multinomial(len(lost), [1 / len(lost)] * len(lost), DRAWS)
    else:
        names, of_group_N = numpy.unique(group_N, return_inverse=True)
        draws = random.multinomial(len(names), [1 / len(names)] * len(names), DRAWS)[:, of_group_N]
        draws_P, draws_N = draws[:, truth_N], draws[:, ~truth_N]
    number = numpy.einsum("dp,pn,dn->d", draws_P, pairs, draws_N)
    found = numpy.einsum("dp,pn,dn->d", draws_P, wins * pairs, draws_N)[number > 0] / number[number > 0]
    low, high = numpy.percentile(found, INTERVAL)
    return Estimate(float((wins * pairs).sum() / pairs.sum()), float(low), float(high), int(pairs.sum()))


def mean(values: Any, seed: int = 0) -> Estimate:
    """The mean of episodes, each of which is drawn anew. A share of them has Wilson's interval: where all are alike,
    drawing them anew changes nothing."""
    value_N = as_floats(values)
    if (n := len(value_N)) and numpy.isin(value_N, (0, 1)).all():
        share = float(value_N.mean())
        return Estimate(share, *wilson(share, n, Z), n)
    return bootstrapped(lambda rows: float(value_N[rows].mean()), len(value_N), seed)


def wilson(share: float, count: float, z: float) -> tuple[float, float]:
    """Wilson's interval of a share of so many independent episodes, ``z`` deviations to either side."""
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def within_groups(imagined_G_M: Floats, true_G_M: Floats, seed: int = 0) -> Estimate:
    """Pearson's correlation inside groups: of the distances to the group's mean, over groups that differ in truth."""
    differs = numpy.ptp(true_G_M, axis=1) > 0
    x, y = (values[differs] - values[differs].mean(axis=1, keepdims=True) for values in (imagined_G_M, true_G_M))
    return bootstrapped(lambda rows: pearson(x[rows].ravel(), y[rows].ravel()), len(x), seed)


def bootstrapped(figure: Callable[[NDArray[Any]], float], count: int, seed: int = 0) -> Estimate:
    """A figure of rows, and its interval where the rows are drawn anew."""
    if not count:
        return Estimate(math.nan)
    random = numpy.random.default_rng(seed)
    found = numpy.array([figure(random.integers(0, count, count)) for _ in range(DRAWS)])
    found = found[~numpy.isnan(found)]
    low, high = numpy.percentile(found, INTERVAL) if len(found) else (math.nan, math.nan)
    return Estimate(figure(numpy.arange(count)), float(low), float(high), count)


def pearson(x_N: Floats, y_N: Floats) -> float:
    """Pearson's correlation; NaN where either does not vary."""
    if len(x_N) < 2 or not numpy.ptp(x_N) or not numpy.ptp(y_N):
        return math.nan
    return float(numpy.corrcoef(x_N, y_N)[0, 1])


def ranks(x_N: Floats) -> Floats:
    """Ranks from 0; equal values have the mean of theirs."""
    return (x_N[:, None] > x_N).sum(axis=1) + ((x_N[:, None] == x_N).sum(axis=1) - 1) / 2


def spearman(x_N: Floats, y_N: Floats) -> float:
    """Spearman's correlation, of ranks."""
    return pearson(ranks(x_N), ranks(y_N))


def rank_violation(imagined_P: Floats, true_P: Floats) -> float:
    """Mean maximum rank violation (MMRV, SIMPLER, arXiv 2405.05941): the largest true gap that a policy is on the wrong
    side of, as the mean over policies."""
    is_wrong = (imagined_P[:, None] > imagined_P) != (true_P[:, None] > true_P)
    return float((abs(true_P[:, None] - true_P) * is_wrong).max(axis=1).mean())


def misordered(imagined_P: Floats, true_P: Floats, gap: float) -> list[tuple[int, int]]:
    """Pairs (i, j) in which i is valued below j but is better by more than ``gap``."""
    wrong = (true_P[:, None] - true_P > gap) & (imagined_P[:, None] < imagined_P)
    return [(int(i), int(j)) for i, j in zip(*numpy.nonzero(wrong), strict=True)]


def line(x_P: Floats, y_P: Floats) -> tuple[float, float]:
    """Slope and offset of the least squares of y on x; a slope of 0 where x does not vary."""
    if len(x_P) < 2 or not numpy.ptp(x_P):
        return 0.0, float(y_P.mean())
    slope, offset = numpy.polyfit(x_P, y_P, 1)
    return float(slope), float(offset)


def as_floats(values: Sequence[float] | Any) -> Floats:
    return numpy.asarray(values, dtype=numpy.float64)
