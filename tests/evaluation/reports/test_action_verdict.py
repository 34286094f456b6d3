# SPDX-License-Identifier: Apache-2.0
"""The verdict: what ignores its actions is not called obedient; what could not be measured does not count."""

import pytest

from cosmos_predict2.evaluation.metrics.controllability import ActionGap, Distances
from cosmos_predict2.evaluation.metrics.inverse_dynamics import ActionFollowing
from cosmos_predict2.evaluation.reports.action_evaluation import CODED, EXCHANGED, IMAGINED, verdict


def gap(ratio: float, share: float = 1.0) -> ActionGap:
    return ActionGap([5.0], [1.0], [ratio], 8, share)


def read(imagined: float, coded: float = 0.9) -> dict[str, ActionFollowing]:
    of = {CODED: coded, IMAGINED: imagined, EXCHANGED: -0.1}
    return {kind: ActionFollowing(r2, r2, {}, [], 0.0) for kind, r2 in of.items()}


FAR, NEAR = Distances(10.0, 1.0), Distances(0.1, 1.0)


@pytest.mark.parametrize(
    ("signs", "word"),
    [
        ((gap(3.0), FAR, read(0.8)), "follows"),
        ((gap(1.0, 0.5), NEAR, read(0.0)), "ignores"),
        ((gap(1.2, 0.6), NEAR, read(0.4)), "ignores"),  # a larger loss on some clips alone, and a poor reading
        ((gap(1.001, 1.0), Distances(0.0, 0.0), read(-1.0)), "ignores"),
        ((gap(3.0), NEAR, read(0.8)), "in part"),
        ((gap(1.0, 0.5), FAR, read(0.0)), "in part"),  # it moves with actions, but not as they command
        ((gap(3.0), FAR, {}), "follows"),
        ((gap(3.0), FAR, read(0.0, coded=0.1)), "follows"),  # the probe reads nothing of true frames: it does not count
        ((None, None, {}), "unknown"),
    ],
)
def test_the_word_follows_from_all_signs_that_were_measured(signs: tuple, word: str) -> None:
    found = verdict(*signs, reason="there is one clip")
    assert found.word == word
    assert ("there is one clip" in found.sentence) == (word == "unknown")


def test_the_controls_are_named_beside_the_figures() -> None:
    sentence = verdict(gap(3.0), FAR, read(0.8)).sentence
    for words in ("3.00 times as large", "50%", "another seed by 1.00", "R2 0.80", "with 0.90", "actions with -0.10"):
        assert words in sentence
