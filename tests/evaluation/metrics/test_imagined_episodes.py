# SPDX-License-Identifier: Apache-2.0
"""The measurement of imagined episodes, held against the truth, a standstill and known mistakes."""

from functools import cache

import pytest
import torch
from torch import Tensor

from cosmos_predict2.configs.action_conditioned.networks import get_cosmos_predict2_action_conditioned_pipeline
from cosmos_predict2.data.toy.videos import SPLITS
from cosmos_predict2.evaluation.metrics.imagined_episodes import (
    WEAK_DRIVER,
    agreement,
    held_out_episodes,
    pictures,
    seen_success,
)
from cosmos_predict2.evaluation.reports.toy_world import WEAK, measure
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.toy_world.episodes import Episodes, Mix, make_episodes

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
    figures = agreement(episodes(), ends()[:, :, :1].expand(-1, -1, 25, -1, -1))
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
    assert figures.detector[WEAK].agreement >= 0.99 > figures.ends[WEAK].agreement
    assert WEAK in figures.as_text() and "agreement" in figures.as_text()
