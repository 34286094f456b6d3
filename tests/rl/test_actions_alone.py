# SPDX-License-Identifier: Apache-2.0
"""What actions tell without a picture: it is learnt where there is something to learn, and is chance elsewhere."""

import math

import numpy
import torch

from cosmos_predict2.evaluation.metrics.agreement import Estimate, area_under_curve
from cosmos_predict2.rl.imagined.actions_alone import ActionsAlone
from cosmos_predict2.rl.imagined.verdict import judge


def episodes(count: int, seed: int) -> tuple[list[torch.Tensor], numpy.ndarray]:
    """Motions of other lengths; those succeed that end on the right, wherever they were before."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 10, (count,), generator=generator).tolist()
    actions = [torch.randn(length, 2, generator=generator) for length in lengths]
    return actions, numpy.array([float(rows[:, 0].sum()) > 0 for rows in actions])


def test_success_is_told_by_actions_that_decide_it_and_only_by_them() -> None:
    (learnt, success), (others, truth) = episodes(200, 0), episodes(100, 1)
    alone = ActionsAlone(learnt, success)
    assert area_under_curve(alone(others), truth).value > 0.85
    shuffled = [numpy.random.default_rng(seed).permutation(success) for seed in range(20)]
    areas = [area_under_curve(ActionsAlone(learnt, drawn)(others), truth).value for drawn in shuffled]
    assert abs(numpy.mean(areas) - 0.5) < 0.1
    scaled = ActionsAlone([100 * rows - 7 for rows in learnt], success)([100 * rows - 7 for rows in others])
    assert area_under_curve(scaled, truth).value > 0.85, "units do not count"
    far = [torch.full((8, 2), 1e3)]
    assert math.isclose(alone(far)[0], success.mean(), abs_tol=1e-6), "where nothing is known it is their mean"


def test_an_imagination_that_adds_nothing_is_named() -> None:
    figures = {"episodes": 40, "successes": 20, "recall_imagined": 0.5}
    for imagined, is_named in ((0.71, True), (0.75, False)):
        found = {"true_ends": Estimate(imagined), "true_ends_by_actions": Estimate(0.72)}
        warnings = judge(figures, {"policy": found}).warnings
        assert any("the actions alone" in text for text in warnings) is is_named


def test_an_imagination_that_actions_alone_beat_is_no_go() -> None:
    figures = {"episodes": 40, "successes": 20, "recall_imagined": 0.5}
    for low, expected in ((0.83, "doubtful"), (0.81, "go")):
        found = {"played_ends": Estimate(0.76, 0.71, 0.82), "played_ends_by_actions": Estimate(0.86, low, 0.90)}
        judged = judge(figures, {"policy": found})
        assert judge(figures, {"policy": found}, ["played_ends"]).verdict == "go", "it was allowed"
        assert judged.verdict == expected and (judged.warnings == ()) is (expected == "doubtful")
    assert any(
        "predicted better from the actions alone" in text
        for text in judge(
            figures, {"": {"true_ends": Estimate(0.3, 0.2, 0.4), "true_ends_by_actions": Estimate(0.8, 0.7, 0.9)}}
        ).reasons
    )
