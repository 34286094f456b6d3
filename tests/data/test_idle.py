# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.action_conditioned.dataset_lerobot: openpi's rule for DROID, frame by frame."""

from itertools import pairwise

import numpy
import pytest

from cosmos_predict2.data.action_conditioned.dataset_lerobot import IdleRule


def slowly(commands: numpy.ndarray, below: float, idle_run: int, moving_run: int, cut: int) -> list[bool]:
    """The rule in plain loops."""
    count = len(commands)
    idle = [k > 0 and all(abs(a - b) < below for a, b in zip(commands[k], commands[k - 1])) for k in range(count)]
    keep, starts = [True] * count, [False] * count
    for first, end in runs(idle):
        if idle[first] and end - first >= idle_run:
            keep[first:end] = [False] * (end - first)
    for first, end in runs(keep):
        if keep[first] and end - first >= moving_run:
            for k in range(first, end - cut):
                starts[k] = True
    return starts


def runs(flags: list[bool]) -> list[tuple[int, int]]:
    edges = [0, *(k for k in range(1, len(flags)) if flags[k] != flags[k - 1]), len(flags)]
    return list(pairwise(edges))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("values", [(7, 16, 10), (3, 4, 6), (1, 1, 0)])
def test_the_rule_is_that_of_plain_loops(seed: int, values: tuple[int, int, int]) -> None:
    draws = numpy.random.default_rng(seed)
    moves = numpy.repeat(draws.random(60) < 0.6, draws.integers(1, 14, 60))
    commands = numpy.cumsum(moves[:, None] * draws.normal(0, 1, (len(moves), 7)), axis=0)
    rule = IdleRule(idle_run=values[0], moving_run=values[1], cut=values[2])
    assert rule.starts(commands).tolist() == slowly(commands, 1e-3, *values)


def test_a_pause_is_kept_and_a_rest_is_not() -> None:
    commands = numpy.arange(60.0)[:, None].repeat(2, axis=1)
    commands[30:37] = commands[30]  # six frames like the one before
    assert IdleRule().starts(commands).sum() == 50
    commands[30:38] = commands[30]  # seven
    assert numpy.flatnonzero(IdleRule().starts(commands)).tolist() == [*range(21), *range(38, 50)]
    assert not IdleRule().starts(numpy.ones((40, 2))).any() and len(IdleRule().starts(numpy.ones((1, 2)))) == 1
