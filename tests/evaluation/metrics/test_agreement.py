# SPDX-License-Identifier: Apache-2.0

import math
from functools import cache

import numpy
import pytest
import torch
from torch import Tensor

from cosmos_predict2.data.toy.videos import SPLITS
from cosmos_predict2.evaluation.metrics.agreement import (
    area_under_curve,
    line,
    mean,
    misordered,
    pearson,
    rank_violation,
    ranks,
    spearman,
    within_groups,
)
from cosmos_predict2.evaluation.metrics.inverse_dynamics import Probe, fit_probe
from cosmos_predict2.toy_world.episodes import make_episodes


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


def test_attempts_of_one_start_count_as_one_where_they_are_alike() -> None:
    random = numpy.random.default_rng(0)
    start_N = numpy.arange(24).repeat(8)
    value, success = random.normal(size=24)[start_N], (random.random(24) < 0.5)[start_N]  # a start decides both
    each, starts = (area_under_curve(value, success, group_N=group) for group in (None, start_N))
    assert each.value == starts.value and starts.high - starts.low > 2 * (each.high - each.low)


def test_a_share_of_none_or_all_has_an_interval() -> None:
    assert mean([0] * 48).low == 0 and mean([0] * 48).high == pytest.approx(0.053, abs=0.001)
    assert mean([True] * 48).high == 1 and mean([True] * 48).low == pytest.approx(0.947, abs=0.001)
    shares = mean([0, 1] * 24), mean([0.0, 1.0, *[0.0, 1.0] * 23, 0.25, 0.75])
    assert shares[0].low == pytest.approx(shares[1].low, abs=0.03), "about that of a bootstrap in the middle"


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
    assert mean([1.5, 1.5, 1.5]).low == 1.5


@cache
def clips(num: int, split: str, **options: object) -> tuple[Tensor, Tensor]:
    episodes = make_episodes(num, first=SPLITS[split], ring_elsewhere=0.0, **options)  # type: ignore[arg-type]
    frames = numpy.stack([episodes.render(i, 0, 13) for i in range(num)])
    return torch.from_numpy(frames).permute(0, 4, 1, 2, 3), torch.from_numpy(episodes.actions[:, :12])


@pytest.fixture(scope="module")
def probe() -> Probe:
    return fit_probe(*clips(96, "train"))


@pytest.fixture(scope="module")
def carrying() -> Probe:
    return fit_probe(*clips(32, "train", tasks=("carry_puck",)))


def test_it_reads_true_frames_that_it_never_saw(probe: Probe) -> None:
    found = probe.score(*clips(32, "val"))
    assert found.r2 > 0.94 and found.error < 0.15
    assert probe.numbers == [0, 1] == list(found.r2_by_number)  # the other two do nothing in this task
    assert len(found.r2_by_step) == 12 and min(found.r2_by_step) > 0.85
    assert found.r2_of_sums > 0.95


def test_frames_that_tremble_spoil_single_steps_and_not_their_sums(probe: Probe) -> None:
    frames, actions = clips(32, "val")
    trembling = torch.where(torch.arange(13)[:, None, None] % 2 == 1, frames.roll(1, dims=4), frames)
    found = probe.score(trembling, actions)
    assert found.r2 < 0.5 and found.r2_of_sums > 0.8


def test_a_still_picture_and_the_actions_of_others_are_told_from_obedience(probe: Probe) -> None:
    frames, actions = clips(32, "val")
    still = frames[:, :, :1].expand_as(frames)
    assert probe.score(still, actions).r2 < 0.05
    assert probe.score(frames, actions.roll(1, 0)).r2 < 0
    assert probe.score(frames.flip(4), actions).r2 < 0.5  # mirrored: every second number has the wrong sign


def test_closing_the_gripper_is_read_too(carrying: Probe) -> None:
    found = carrying.score(*clips(16, "val", tasks=("carry_puck",)))
    assert carrying.numbers == [0, 1, 2] and found.r2_by_number[2] > 0.95


@pytest.mark.filterwarnings("error")
def test_a_number_that_stays_the_same_in_the_clips_asked_about_is_left_out(carrying: Probe) -> None:
    frames, actions = clips(16, "val", tasks=("push_puck",))  # the gripper stays open
    assert carrying.numbers == [0, 1, 2] and float(actions[..., 2].std()) == 0
    found = carrying.score(frames, actions)
    assert list(found.r2_by_number) == [0, 1]
    assert found.r2 == pytest.approx(sum(found.r2_by_number.values()) / 2) and found.r2 > 0.5
    nothing = carrying.score(frames, torch.zeros_like(actions))
    assert math.isnan(nothing.r2) and math.isnan(nothing.r2_of_sums) and nothing.r2_by_number == {}
    assert all(math.isnan(value) for value in nothing.r2_by_step) and nothing.error > 0
