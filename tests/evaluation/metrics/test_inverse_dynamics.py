# SPDX-License-Identifier: Apache-2.0
"""Reading actions from frames: right on true frames that it was not fitted to, and telling where nothing is obeyed."""

import math
from functools import cache

import numpy
import pytest
import torch
from torch import Tensor

from cosmos_predict2.data.toy.videos import SPLITS
from cosmos_predict2.evaluation.metrics.inverse_dynamics import Probe, fit_probe
from cosmos_predict2.toy_world.episodes import make_episodes


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
