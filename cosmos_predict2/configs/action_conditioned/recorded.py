# SPDX-License-Identifier: Apache-2.0
"""Values of a configuration that its recordings decide: ``${recorded_action_dim:}`` and others.

They are read from the data set of ``dataloader_train`` when a configuration is composed, and saved as numbers. Where
it cannot be read, the values of the tiny model stand in, and the check of the data set reports what is wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray
from omegaconf import ListConfig, OmegaConf

from cosmos_predict2.actions.statistics import column_statistics, order_one_transform
from cosmos_predict2.configs.action_conditioned.networks import ACTION_DIM
from cosmos_predict2.data.lerobot.info import STATE
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.samples import evenly
from cosmos_predict2.tokenizers.sizes import small_size
from imaginaire.data.facts import facts_of, known

Floats = NDArray[numpy.float64]

TINY_SIZE = (48, 48)
NUM_LOOKED_INTO = 64  # recordings, which show the kind of an action's numbers
WINDOW = 12  # actions
AT_ENDS, NEAR = 0.95, 0.05  # of a switch: this share of its values is within so much of its range from an end

ACTION, MOVES, SIZE = "${recorded_action_dim:}", "${recorded_moves:}", "${recorded_size:}"
LENGTHS = "${steady_and_falling:${trainer.max_iter}}"  # of a scheduler's two cycles
FALLING = 0.25  # of a run


def _action_dim(data: Mapping[str, Any]) -> int:
    facts = known(lambda: facts_of(data))
    return (facts and facts.action_dim) or ACTION_DIM["tiny"]


def _moves(data: Mapping[str, Any]) -> ListConfig:
    """The moves among the numbers of an action, of LeRobot data; none of others."""

    def read() -> list[int]:
        source = LeRobotSource.open(data["root"])
        parts = source.action_parts(data.get("action_keys"), data.get("embodiment"))
        chosen = evenly(len(source), NUM_LOOKED_INTO)
        actions = [source.parts(i, parts)[:-1] for i in chosen]
        has_state = STATE in source.info.features
        states = [source.columns(i, [STATE])[STATE] for i in chosen] if has_state else []
        return moving_numbers(actions, states)

    return ListConfig(known(read) or [])


def _video_size(data: Mapping[str, Any]) -> ListConfig:
    def read() -> tuple[int, int]:
        source = LeRobotSource.open(data["root"])
        shape = dict(source.info.features[source.camera(data.get("camera"))])
        sides = dict(zip(shape.get("names") or ("height", "width", "channels"), shape["shape"], strict=False))
        return small_size(int(sides["height"]), int(sides["width"]))

    return ListConfig(list(known(read) or TINY_SIZE))


def _of_data(read: Callable[[Mapping[str, Any]], Any]) -> Callable[..., Any]:
    def resolve(_root_: Any) -> Any:
        return read(OmegaConf.select(_root_, "dataloader_train.dataset") or {})

    return resolve


def _lengths(max_iter: int) -> ListConfig:
    falling = max(1, round(FALLING * max_iter))
    return ListConfig([max(1, max_iter - falling), falling])


OmegaConf.register_new_resolver("steady_and_falling", _lengths, replace=True)
for _name, _resolve in (
    ("recorded_action_dim", _action_dim),
    ("recorded_moves", _moves),
    ("recorded_size", _video_size),
):
    OmegaConf.register_new_resolver(_name, _of_data(_resolve), replace=True)


# Moves among the numbers of an action ---------------------------------------------------------------------------------


def moving_numbers(actions: Sequence[Floats], states: Sequence[Floats] = ()) -> list[int]:
    """The numbers of an action whose sums since the start of a clip are places, which a world model needs: the moves.

    Of the actions [T, d] of recordings; ``states`` [T, s] are those before each action. A number is summed unless it is
    constant, a switch (a gripper that is open or closed), or a target (a position of a joint or of the hand, whose sums
    mean nothing). Targets are recognised by usual values that lie apart from zero, or by a state of the robot that
    follows their changes more closely than their sums.
    """
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

    def standardised(rows: Sequence[Floats]) -> Floats:
        table = numpy.stack(rows)
        return (table - table.mean(axis=0)) / numpy.maximum(table.std(axis=0), 1e-12)

    # The largest correlation of each number with one of the state, [d].
    of_changes, of_sums = (
        numpy.abs(standardised(values).T @ standardised(moved) / len(moved)).max(axis=1) for values in (changes, sums)
    )
    return of_changes > of_sums
