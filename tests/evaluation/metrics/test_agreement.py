# SPDX-License-Identifier: Apache-2.0
import numpy
import pytest

from cosmos_predict2.evaluation.metrics.agreement import (
    area_under_curve,
    line,
    mean,
    misordered,
    nearest_pairs,
    pearson,
    rank_violation,
    ranks,
    spearman,
    within_groups,
)


def array(*values: float) -> numpy.ndarray:
    return numpy.array(values, dtype=float)


def test_the_area_under_the_curve_is_a_share_of_pairs() -> None:
    truth = numpy.array([True, True, False, False])
    assert area_under_curve(array(3, 1, 2, 1), truth).value == (1 + 1 + 0 + 0.5) / 4
    own = numpy.array([[False, False, True, False], [False, False, False, True], [False] * 4, [False] * 4])
    assert area_under_curve(array(3, 1, 2, 1), truth, own).value == 0.75
    assert numpy.isnan(area_under_curve(array(1, 2), numpy.array([True, True])).value)
    random = numpy.random.default_rng(0)
    value, success = random.normal(size=200), random.random(200) < 0.3
    chance = area_under_curve(value, success)
    assert chance.low < 0.5 < chance.high and chance.high - chance.low < 0.2
    shifted = area_under_curve(value + 1.5 * success, success)
    assert shifted.low > 0.75 and shifted.low < shifted.value < shifted.high


def test_pairs_are_of_the_nearest_failures() -> None:
    place = array(0, 1, 2, 9)
    truth = numpy.array([False, True, False, False])
    near = nearest_pairs(abs(place[:, None] - place), truth, 2)
    assert near.sum() == 2 and near[1, 0] and near[1, 2]


def test_correlation_inside_groups_leaves_out_what_groups_differ_by() -> None:
    true = numpy.array([[0.0, 1, 2], [0, 1, 2], [5, 5, 5]])
    assert within_groups(true + array(9, -9, 100)[:, None], true).value == pytest.approx(1)
    assert within_groups(-true, true).value == pytest.approx(-1)
    assert numpy.isnan(within_groups(true, numpy.ones((3, 3))).value), "no group differs in truth"


def test_ranks_and_their_violations() -> None:
    assert ranks(array(3, 1, 1)).tolist() == [2, 0.5, 0.5]
    true = array(0.1, 0.5, 0.9)
    assert spearman(array(1, 2, 100), true) == pytest.approx(1) and pearson(array(1, 2, 100), true) < 0.95
    assert rank_violation(array(1, 2, 3), true) == 0 and not misordered(array(1, 2, 3), true, 0.15)
    assert rank_violation(array(1, 3, 2), true) == pytest.approx((0 + 0.4 + 0.4) / 3)
    assert misordered(array(1, 3, 2), true, 0.15) == [(2, 1)]
    assert numpy.isnan(pearson(array(1, 1), array(1, 2)))
    assert line(array(0, 1, 2), array(1, 3, 5)) == pytest.approx((2, 1)) and line(array(1, 1), array(2, 4)) == (0, 3)
    assert mean([1, 1, 1]).low == 1
