# SPDX-License-Identifier: Apache-2.0
"""Rewards and ends of imagined chunks are those of a plain loop over the pictures of one environment."""

import itertools
from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.rl.envs.scoring import Scored, Scoring, merged, score
from cosmos_predict2.rl.interfaces import Judgement
from imaginaire.errors import ConfigError

COUNTS, NUM_ACTIONS = [5, 1, 3], 5


def plain(scoring: Scoring, values: Any, successes: Any, differs: Any, count: int, previous: float, streak: int) -> Any:
    """Of one environment: its pictures are those after each of ``count`` executed actions, or the last of them."""
    rewards, of_values, shows = [0.0] * NUM_ACTIONS, [0.0] * NUM_ACTIONS, False
    values = [numpy.mean(values[max(0, k + 1 - scoring.mean_of) : k + 1]) for k in range(len(values))]
    actions = [count - 1] if scoring.judge == "last" else range(count)
    for picture, action in enumerate(actions):
        is_done = (
            values[picture] >= scoring.success_threshold
            if scoring.success_threshold is not None
            else successes[picture]
        )
        paid = scoring.reward_coef * (float(is_done) if scoring.sparse else values[picture])
        if scoring.reward_on == "each" or action == count - 1:
            rewards[action] = paid - (previous if scoring.use_rel_reward else 0.0)
        of_values[action], previous = values[picture], paid
        streak = streak + 1 if is_done else 0
        is_success = streak >= scoring.confirm
        shows = is_success or (shows and scoring.terminate_on_success)
    return rewards, shows, values[picture], of_values, differs[picture], previous, streak


OPTIONS = [
    dict(zip(("judge", "reward_on", "sparse", "use_rel_reward", "success_threshold", "terminate_on_success"), values))
    for values in itertools.product(
        ("all", "last"), ("each", "last"), (False, True), (False, True), (None, 0.5), (False, True)
    )
]


@pytest.mark.parametrize(("confirm", "mean_of"), [(1, 1), (2, 1), (1, 3)])
def test_a_chunk_is_scored_as_by_a_loop_over_its_pictures(confirm: int, mean_of: int) -> None:
    generator = torch.Generator().manual_seed(confirm)
    for options in OPTIONS:
        if options["use_rel_reward"] and options["reward_on"] == "last":
            continue
        if mean_of > 1 and options["judge"] == "last":
            with pytest.raises(ConfigError, match=r"scoring\.mean_of=3 .* scoring\.judge=all"):
                Scoring(mean_of=mean_of, **options)
            continue
        scoring = Scoring(confirm=confirm, mean_of=mean_of, reward_coef=2.0, **options)
        pictures = 1 if scoring.judge == "last" else max(COUNTS)
        values = (torch.randint(0, 5, (3, pictures), generator=generator) / 4).numpy()
        successes, differs = (torch.rand(3, pictures, generator=generator).numpy() < 0.5 for _ in range(2))
        previous, streak = numpy.array([0.5, -1.0, 2.0], dtype=numpy.float32), numpy.array([0, 1, 2])
        found = score(scoring, (values, successes, differs), numpy.array(COUNTS), NUM_ACTIONS, previous, streak)
        for i, count in enumerate(COUNTS):
            expected = plain(scoring, values[i], successes[i], differs[i], count, float(previous[i]), int(streak[i]))
            actual = [getattr(found, name)[i] for name in Scored.__dataclass_fields__]
            for one, other, name in zip(actual, expected, Scored.__dataclass_fields__, strict=True):
                assert numpy.allclose(one, other), (name, options, i)
        assert previous.tolist() == [0.5, -1.0, 2.0] and streak.tolist() == [0, 1, 2]


def test_of_several_noises_the_worst_value_and_the_success_of_all_count() -> None:
    value = torch.tensor([[0.1, 0.9], [0.5, 0.5], [0.3, 0.2], [0.4, 0.8]])
    success = torch.tensor([[True, True], [False, True], [True, False], [False, False]])
    worst, everywhere, differs = merged(Judgement(value, success), 2)
    assert worst == pytest.approx(numpy.array([[0.1, 0.2], [0.4, 0.5]]))
    assert everywhere.tolist() == [[True, False], [False, False]]
    assert differs.tolist() == [[False, True], [False, True]]
