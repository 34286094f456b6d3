# SPDX-License-Identifier: Apache-2.0
"""Figures by chunk: the truth has the best ones, and each fault is seen by the figure that is for it."""

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cosmos_predict2.evaluation.metrics.imagined_chunks import by_chunk, things_by_chunk
from cosmos_predict2.evaluation.metrics.imagined_episodes import held_out_episodes, pictures
from cosmos_predict2.toy_world.episodes import Episodes
from cosmos_predict2.toy_world.physics import GRIPPER, SETTINGS, simulate


@pytest.fixture(scope="module")
def episodes() -> Episodes:
    return held_out_episodes(12, mix="mixed", length=36)


def drawn(episodes: Episodes) -> Tensor:
    return pictures(episodes.states, episodes.size)


def test_the_truth_is_sharp_consistent_and_has_every_thing(episodes: Episodes) -> None:
    truth = drawn(episodes)
    likeness, things = by_chunk(truth, truth, 12), things_by_chunk(episodes, truth, 12)
    assert likeness["sharpness"] == likeness["fine detail"] == pytest.approx([1.0] * 3)
    assert min(likeness["PSNR where something moves"]) > 60
    for thing in ("gripper", "objects"):
        assert things[f"unseen, {thing}"] == [0.0] * 3
        assert max(things[f"consistency (px), {thing}"] + things[f"error (px), {thing}"]) < 0.3
        assert max(things[f"error by chaos (px), {thing}"]) < 1.5


def test_blur_lowers_fine_detail_more_than_sharpness(episodes: Episodes) -> None:
    truth = drawn(episodes)
    flat = truth.float().transpose(1, 2).flatten(0, 1)
    blurred = functional.avg_pool2d(flat, 3, stride=1, padding=1, count_include_pad=False)
    found = by_chunk(blurred.unflatten(0, (len(truth), -1)).transpose(1, 2), truth, 12)
    assert all(a < b < 0.9 for a, b in zip(found["fine detail"], found["sharpness"], strict=True))


def test_a_thing_that_vanishes_is_unseen_and_counts_where_it_was_at_first(episodes: Episodes) -> None:
    video = drawn(episodes)
    video[:, :, 13:] = torch.tensor([205, 200, 190], dtype=torch.uint8).view(1, 3, 1, 1, 1)  # the empty table
    found = things_by_chunk(episodes, video, 12)
    assert found["unseen, gripper"] == found["unseen, objects"] == [0.0, 1.0, 1.0]
    way = numpy.hypot(*(episodes.states[:, 36, GRIPPER] - episodes.states[:, 0, GRIPPER]).T)
    assert found["error (px), gripper"][2] == pytest.approx(way.mean())
    assert numpy.isnan(found["consistency (px), objects"][1])


def test_other_motion_is_inconsistent_and_a_shift_that_obeys_is_not(episodes: Episodes) -> None:
    still = drawn(episodes)[:, :, :1].expand(-1, -1, 37, -1, -1).contiguous()
    assert things_by_chunk(episodes, still, 12)["consistency (px), gripper"][0] > 3
    begun = episodes.states[:, 0].copy()
    begun[:, GRIPPER] += 2.0
    states = simulate(begun, episodes.actions, SETTINGS["default"], episodes.size)
    found = things_by_chunk(episodes, pictures(states, episodes.size), 12)
    assert max(found["consistency (px), gripper"]) < 0.3 < 1.0 < min(found["error (px), gripper"])
