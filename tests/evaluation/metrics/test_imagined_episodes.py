# SPDX-License-Identifier: Apache-2.0
"""The measurement of imagined episodes, held against the truth, a standstill and known mistakes."""

import json
from functools import cache
from itertools import pairwise

import numpy
import pytest
import torch
from torch import Tensor

from cosmos_predict2.configs.action_conditioned.networks import get_cosmos_predict2_action_conditioned_pipeline
from cosmos_predict2.data.toy.videos import SPLITS
from cosmos_predict2.evaluation.metrics.imagined_episodes import (
    WEAK_DRIVER,
    agreement,
    held_out_episodes,
    horizon_table,
    pictures,
    psnr_by_horizon,
    repeat_first,
    repeat_motion,
    seen_success,
    windows_of,
)
from cosmos_predict2.evaluation.reports.toy_world import MODEL, STANDSTILL, WEAK, measure
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.toy_world.episodes import Episodes, Mix, make_episodes
from cosmos_predict2.toy_world.scene import PUCK_X

NUM = 60


@cache
def episodes() -> Episodes:
    return held_out_episodes(NUM)


@cache
def ends() -> Tensor:
    """The true pictures of whole episodes, at their beginning and end."""
    return pictures(episodes().states[:, [0, -1]], episodes().size)


# Episodes -------------------------------------------------------------------------------------------------------------


def test_held_out_episodes_are_of_another_split_than_training() -> None:
    assert episodes().first == SPLITS["val"]
    assert SPLITS["val"] - SPLITS["train"] > 10**9, "no training run draws so many"
    ours, training = episodes().states[:, 0], make_episodes(NUM, 0, mix="mixed").states[:, 0]
    assert not (ours[:, None] == training[None]).all(-1).any()


def test_a_window_begins_after_a_frame_and_its_actions_lead_through_it() -> None:
    windows = windows_of(episodes())
    assert windows.video_B_C_F_H_W.shape == (NUM, 3, 13, 48, 48) and windows.states.shape == (NUM, 14, 10)
    starts = [1 + i % 12 for i in range(NUM)]
    for i, start in enumerate(starts):
        assert numpy.array_equal(windows.states[i], episodes().states[i, start - 1 : start + 13])
        assert numpy.array_equal(windows.action_B_A_D[i].numpy(), episodes().actions[i, start : start + 12])
    with pytest.raises(ValueError, match="no windows of 24"):
        windows_of(episodes(), 24)


# Frame by frame -------------------------------------------------------------------------------------------------------


def test_the_truth_is_beyond_all_and_a_standstill_is_its_own_row() -> None:
    windows = windows_of(episodes())
    table = horizon_table(windows, {"truth": windows.video_B_C_F_H_W}, model().world)
    assert set(table["truth"]) == {"all", "changed", "object"}
    assert all(value == float("inf") for values in table["truth"].values() for value in values)
    still = table["repeat first frame"]["all"]
    assert all(later < sooner for sooner, later in pairwise(still[::3])), "things move away"
    assert still[0] > 26 and still[-1] < 19
    ceiling = table["truth, coded"]["all"]
    assert min(ceiling) > 30 and max(ceiling) < 36
    motion, coded_motion = (table[f"repeat last motion{name}"]["all"] for name in ("", ", coded"))
    assert motion[0] > still[0] + 3 and still[0] + 1 < coded_motion[0] < motion[0]


def test_regions_hold_what_their_names_say() -> None:
    windows = windows_of(episodes())
    truth = windows.video_B_C_F_H_W
    wrong = truth.clone()
    wrong[:, :, 5] = 255 - wrong[:, :, 5]
    found = psnr_by_horizon(wrong, windows)
    for values in found.values():
        assert [value < 20 for value in values] == [h == 5 for h in range(1, 13)]
    # A mistake beside everything that moved is no mistake of the objects.
    corner = truth.clone()
    is_changed = (truth.float() - truth[:, :, :1].float()).abs().amax(dim=1) > 32
    corner = torch.where(is_changed[:, None], corner, 255 - corner)
    assert all(value == float("inf") for value in psnr_by_horizon(corner, windows)["changed"])
    assert all(value < 20 for value in psnr_by_horizon(corner, windows)["all"])


def test_the_last_motion_is_right_while_it_lasts() -> None:
    straight = held_out_episodes(8, mix=Mix({"wander": 1.0}, {"wander": (1.0, 1.0)}, 0.0))
    windows = windows_of(straight)
    states = windows.states.copy()
    for i in range(2, 14):  # everything goes on by a quarter of a pixel, and nothing reaches a wall
        states[:, i] = states[:, 1]
        states[:, i, PUCK_X] += 0.25 * (i - 1)
    states[:, 0] = states[:, 1]
    states[:, 0, PUCK_X] -= 0.25
    moved = type(windows)(pictures(states[:, 1:], straight.size), windows.action_B_A_D, states)
    assert torch.equal(repeat_motion(moved), moved.video_B_C_F_H_W)


# Whole episodes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "mix", "tasks"),
    [
        ("default", "mixed", ("push_puck",)),
        ("default", WEAK_DRIVER, ("push_puck",)),
        ("hard", "mixed", ("push_puck",)),
        ("default", "mixed", ("push_box", "carry_puck", "choose_box")),
    ],
)
def test_the_detector_is_right_on_true_pictures(setting: str, mix: str | Mix, tasks: tuple[str, ...]) -> None:
    shown = held_out_episodes(200, setting=setting, mix=mix, tasks=tasks)
    figures = agreement(shown, pictures(shown.states[:, [0, -1]], shown.size))
    assert figures.agreement >= 0.99
    assert 0.15 < figures.base_rate < 0.85
    assert figures.moved_mean < 0.5 and figures.gripper_mean < 0.5 and figures.lost < 0.01


def test_a_standstill_scores_the_base_rate() -> None:
    figures = agreement(episodes(), repeat_first(ends()[:, :, :1], torch.zeros(NUM, 24, 4)))
    begins = seen_success(*([ends()[:, :, 0].permute(0, 2, 3, 1).numpy()] * 2), episodes().tasks, "default")
    assert figures.imagined_rate == begins.mean() == 0
    assert figures.agreement == pytest.approx(1 - figures.base_rate)
    assert (figures.true_positive_rate, figures.false_positive_rate) == (0, 0)
    assert figures.moved_mean > 4 and figures.still_mean < 1.5


# All of it ------------------------------------------------------------------------------------------------------------


def model(device: str = "cpu", **changes: object) -> Video2WorldActionConditionedPipeline:
    config = get_cosmos_predict2_action_conditioned_pipeline(model_size="tiny", network="chunk")
    config.guardrail_config.enabled = False
    config.prompt_refiner_config.enabled = False
    config.action_transform = dict(kind="controller", scale=[1.0] * 4)
    config.net.update(model_channels=32, num_blocks=1, **changes)
    return Video2WorldActionConditionedPipeline.from_config(config, use_text_encoder=False, device=device)


@pytest.mark.slow
def test_the_figures_of_a_model_that_knows_nothing() -> None:
    torch.manual_seed(0)
    figures = measure(model(), num_episodes=12)
    assert figures.gap is not None and figures.gap.mean == pytest.approx(1.0), "new weights do not read actions"
    assert figures.gain(12) < 0
    assert figures.detector[WEAK].agreement >= 0.99 > figures.ends[WEAK].agreement
    for word in (MODEL, STANDSTILL, WEAK, "sigma", "agreement"):
        assert word in figures.as_text()
    assert json.loads(json.dumps(figures.as_dict()))["ends"][WEAK]["num_episodes"] == 12
