# SPDX-License-Identifier: Apache-2.0
"""Layout of the table at the start of an episode. Each episode has its own stream of random numbers."""

from collections.abc import Sequence

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

from cosmos_predict2.toy_world.physics import gap_to_target
from cosmos_predict2.toy_world.scene import (
    BOX_HALF_SIDE,
    GOAL,
    GRIPPER,
    GRIPPER_RADIUS,
    HELD,
    NOTHING,
    PARKED,
    PUCK_RADIUS,
    STATE_SIZE,
    Floats,
    Setting,
    object_position,
    to_grid,
)
from cosmos_predict2.toy_world.tasks import Task

OBJECT_MARGIN = 12.0  # to the walls, of target and goal
OTHER_MARGIN = 7.0
GRIPPER_MARGIN = 6.0
MOST_SIDEWAYS = numpy.deg2rad(80.0)  # of the gripper's place, off the line through goal and object

Bools = NDArray[numpy.bool_]

_TRIES = 16  # drawn at a time
_GIVE_UP = 400


def episode_generator(seed: int, index: int) -> Generator:
    """The random numbers of one episode: they depend on the two numbers and on nothing else."""
    return Generator(numpy.random.Philox(key=numpy.array([seed, index], dtype=numpy.uint64)))


def lay_table(generators: Sequence[Generator], tasks: Sequence[Task], setting: Setting, size: int) -> Floats:
    """First states [N, 10], one from each generator."""
    states = numpy.empty((len(tasks), STATE_SIZE))
    target = numpy.array([task.target for task in tasks])
    is_crowded = numpy.array([task.is_crowded for task in tasks])
    pending = numpy.arange(len(tasks))
    for _ in range(_GIVE_UP):
        if pending.size == 0:
            return to_grid(states)
        draws = numpy.stack([generators[i].random((_TRIES, 8)) for i in pending.tolist()])
        tried, is_good = _try(draws, target[pending, None], is_crowded[pending, None], setting, size)
        first = is_good.argmax(1)
        done = is_good[numpy.arange(len(pending)), first]
        states[pending[done]] = tried[done, first[done]]
        pending = pending[~done]
    raise ValueError(f"The toy world found no room for these things on a table of size {size}; take a larger size.")


def random_spot(uniform: Floats, size: int) -> Floats:
    """A place [N, 2] for a goal, from two uniform numbers."""
    return to_grid(OBJECT_MARGIN + uniform * (size - 2 * OBJECT_MARGIN))


def _try(
    draws: Floats, target: NDArray[numpy.intp], is_crowded: Bools, setting: Setting, size: int
) -> tuple[Floats, Bools]:
    """States of all draws [N, tries, 8], and which of them are good."""
    place = random_spot(draws[..., 0:2], size)
    angle = 2 * numpy.pi * draws[..., 2]
    low, high = setting.goal_distance
    ahead = numpy.stack([numpy.cos(angle), numpy.sin(angle)], -1)
    away = low + (high - low) * draws[..., 3]
    goal = place + away[..., None] * ahead
    # towards the object's edge
    reach = numpy.where(target == 0, PUCK_RADIUS, BOX_HALF_SIDE / abs(ahead).max(-1)) + GRIPPER_RADIUS
    if setting.gripper_clearance is None:
        gripper = GRIPPER_MARGIN + draws[..., 4:6] * (size - 2 * GRIPPER_MARGIN)
        least = 1.0
    else:
        least, most = setting.gripper_clearance
        sideways = angle + MOST_SIDEWAYS * (2 * draws[..., 4] - 1)
        back = numpy.stack([numpy.cos(sideways), numpy.sin(sideways)], -1)
        edge = numpy.where(target == 0, PUCK_RADIUS, BOX_HALF_SIDE / abs(back).max(-1))
        clearance = least + (most - least) * draws[..., 5]
        gripper = place - (edge + GRIPPER_RADIUS + clearance)[..., None] * back
    other = OTHER_MARGIN + draws[..., 6:8] * (size - 2 * OTHER_MARGIN)

    def within(points: Floats, margin: float) -> Bools:
        return (points.min(axis=-1) >= margin) & (points.max(axis=-1) <= size - margin)

    room_behind = place - (reach + 0.5)[..., None] * ahead  # where the gripper must fit to push towards the goal
    is_good = within(goal, OBJECT_MARGIN) & within(gripper, GRIPPER_MARGIN) & within(room_behind, GRIPPER_RADIUS)
    is_good &= gap_to_target(gripper, place, target) >= 0.7 * least
    is_good &= ~is_crowded | _is_out_of_the_way(other, place, goal, gripper, away)

    states = numpy.zeros((*draws.shape[:-1], STATE_SIZE))
    states[..., GRIPPER] = gripper
    states[..., HELD] = NOTHING
    states[..., GOAL] = goal
    beside = numpy.where(is_crowded[..., None], other, PARKED)
    for k in (0, 1):
        states[..., object_position(k)] = numpy.where(target[..., None] == k, place, beside)
    return states, is_good


def _is_out_of_the_way(other: Floats, place: Floats, goal: Floats, gripper: Floats, away: Floats) -> Bools:
    """True if the second object touches nothing and does not stand between object and goal."""
    along = (((other - place) * (goal - place)).sum(-1) / away**2).clip(0.0, 1.0)
    nearest = place + along[..., None] * (goal - place)
    is_far = numpy.hypot(*numpy.moveaxis(other - nearest, -1, 0)) > 13.0
    return is_far & (numpy.hypot(*numpy.moveaxis(other - gripper, -1, 0)) > 12.0)
