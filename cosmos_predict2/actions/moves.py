# SPDX-License-Identifier: Apache-2.0
"""The numbers of an action that are moves: their sums since the start of a clip are places, which a world model needs.

A number is summed unless it is constant, a switch (a gripper that is open or closed), or a target (a position of a
joint or of the hand, whose sums mean nothing). Targets are recognised by usual values that lie apart from zero, or by a
state of the robot that follows their changes more closely than their sums.
"""

from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

from cosmos_predict2.actions.statistics import column_statistics, order_one_transform

Floats = NDArray[numpy.float64]

WINDOW = 12  # actions
AT_ENDS, NEAR = 0.95, 0.05  # of a switch: this share of its values is within so much of its range from an end


def moving_numbers(actions: Sequence[Floats], states: Sequence[Floats] = ()) -> list[int]:
    """The numbers to sum, of the actions [T, d] of recordings; ``states`` [T, s] are those before each action."""
    rows = numpy.concatenate([numpy.asarray(part, numpy.float64) for part in actions])
    transform = order_one_transform(column_statistics(rows))
    low, high = rows.min(axis=0), rows.max(axis=0)
    spread = high - low
    varies = spread > 1e-6 * numpy.maximum(1.0, numpy.abs(high))
    edge = NEAR * spread
    at_ends = ((rows <= low + edge) | (rows >= high - edge)).mean(axis=0)
    is_target = numpy.array(transform.offset or [0.0] * rows.shape[1]) != 0
    if len(states):
        is_target |= _followed(actions, states)
    return numpy.flatnonzero(varies & (at_ends < AT_ENDS) & ~is_target).tolist()


def _followed(actions: Sequence[Floats], states: Sequence[Floats]) -> NDArray[numpy.bool_]:
    """True for numbers whose change over a window predicts the state's change better than their sum does."""
    sums, changes, moved = [], [], []
    for action, state in zip(actions, states, strict=True):
        for start in range(0, min(len(action), len(state) - 1) - WINDOW + 1, WINDOW):
            part = numpy.asarray(action[start : start + WINDOW], numpy.float64)
            sums.append(part.sum(axis=0))
            changes.append(part[-1] - part[0])
            moved.append(numpy.asarray(state[start + WINDOW], numpy.float64) - state[start])
    if len(sums) < 2 * WINDOW:  # too few for a fit
        return numpy.zeros(actions[0].shape[1], dtype=bool)
    found = [_best_correlation(numpy.stack(values), numpy.stack(moved)) for values in (changes, sums)]
    return found[0] > found[1]


def _best_correlation(values: Floats, moved: Floats) -> Floats:
    """[d], the largest correlation of each number with one of the state."""
    own, other = ((table - table.mean(axis=0)) / numpy.maximum(table.std(axis=0), 1e-12) for table in (values, moved))
    return numpy.abs(own.T @ other / len(own)).max(axis=1)
