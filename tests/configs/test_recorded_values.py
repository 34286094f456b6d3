# SPDX-License-Identifier: Apache-2.0
"""The numbers of an action that are summed: moves, not switches, constants or targets."""

import numpy
import pytest

from cosmos_predict2.configs.action_conditioned.experiment.recordings import moving_numbers


def _recordings(num: int = 12, length: int = 48) -> tuple[list[numpy.ndarray], list[numpy.ndarray]]:
    """Moves of a hand in x and y, a gripper, a constant; and the places of the hand and a joint that follows them."""
    draws = numpy.random.default_rng(0)
    actions, states = [], []
    for _ in range(num):
        moves = draws.normal(0, 0.3, (length, 2))
        gripper = numpy.where(numpy.arange(length) < draws.integers(5, length), -1.0, 1.0)
        target = numpy.cumsum(draws.normal(0, 0.2, length))  # of a joint, about zero
        place = numpy.concatenate([numpy.zeros((1, 2)), moves.cumsum(axis=0)])
        joint = numpy.concatenate([target[:1], target])
        actions.append(numpy.stack([*moves.T, gripper, numpy.full(length, 0.5), target], axis=1))
        states.append(numpy.stack([*place.T, joint], axis=1))
    return actions, states


def test_moves_are_summed_and_targets_are_told_by_the_state() -> None:
    actions, states = _recordings()
    assert moving_numbers(actions, states) == [0, 1]
    assert moving_numbers([rows[:, :4] for rows in actions]) == [0, 1]


@pytest.mark.parametrize("offset", [3.0, -200.0])
def test_targets_apart_from_zero_need_no_state(offset: float) -> None:
    actions, _ = _recordings()
    assert moving_numbers([numpy.concatenate([rows[:, :2], offset + rows[:, 4:]], axis=1) for rows in actions]) == [
        0,
        1,
    ]


def test_a_driver_that_is_often_at_its_limit_is_no_switch() -> None:
    actions, _ = _recordings()
    clipped = [numpy.clip(8 * rows[:, :2], -1, 1) for rows in actions]
    assert (numpy.abs(numpy.concatenate(clipped)) == 1).mean() > 0.5
    assert moving_numbers(clipped) == [0, 1]
