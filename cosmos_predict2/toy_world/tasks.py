# SPDX-License-Identifier: Apache-2.0
"""Tasks on the table: how an episode of each is laid out, when it is done, and its reward.

Each episode has its own stream of random numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

from cosmos_predict2.toy_world.physics import (
    BOX_HALF_SIDE,
    CLOSED,
    GOAL,
    GOAL_X,
    GOAL_Y,
    GRASP_GAP,
    GRIPPER,
    GRIPPER_RADIUS,
    GRIPPER_X,
    GRIPPER_Y,
    HELD,
    NOTHING,
    OBJECTS,
    PARKED,
    PUCK_RADIUS,
    PUCK_X,
    PUCK_Y,
    STATE_SIZE,
    Floats,
    Setting,
    find,
    gap,
    gap_to_target,
    object_position,
    to_grid,
)

REWARD_RANGE = 12.0  # pixels; farther away the dense reward is flat
TOUCH_GAP = GRASP_GAP
THINGS = ("red puck", "blue box")  # by the number of the object
STILL = 2.0  # an object that ends this near to its start counts as not moved

OBJECT_MARGIN = 12.0  # to the walls, of target and goal
OTHER_MARGIN = 7.0
GRIPPER_MARGIN = 6.0
MOST_SIDEWAYS = numpy.deg2rad(80.0)  # of the gripper's place, off the line through goal and object

Bools = NDArray[numpy.bool_]

_TRIES = 16  # drawn at a time
_GIVE_UP = 400


@dataclass(frozen=True)
class Task:
    """One thing to do to one object, with the other object beside it or not."""

    verb: str  # push, carry or touch
    target: int  # number of the object
    is_crowded: bool = False

    @property
    def sentence(self) -> str:
        thing = THINGS[self.target]
        return f"touch the {thing}" if self.verb == "touch" else f"{self.verb} the {thing} to the green ring"


_PUCK, _BOX = range(len(OBJECTS))
TASKS = {
    "push_puck": Task("push", _PUCK),
    "push_box": Task("push", _BOX),
    "carry_puck": Task("carry", _PUCK),
    "carry_box": Task("carry", _BOX),
    "touch_puck": Task("touch", _PUCK),
    "touch_box": Task("touch", _BOX),
    "choose_puck": Task("push", _PUCK, is_crowded=True),
    "choose_box": Task("push", _BOX, is_crowded=True),
}


def find_tasks(names: Sequence[str]) -> list[Task]:
    if isinstance(names, str) or not names:
        raise ValueError(f"The toy world's tasks are a list of names, at least one; got {names!r}.")
    return [TASKS[find("task", name, TASKS)] for name in names]


def uses_grip(tasks: Sequence[Task]) -> bool:
    """True where some task needs the gripper closed; else the grip is fixed and no part of a policy."""
    return any(task.verb == "carry" for task in tasks)


Groups = Sequence[tuple[Task, NDArray[numpy.intp]]]  # each task with the numbers of the environments that have it


def by_task(tasks: Sequence[Task]) -> Groups:
    """The environments of each task."""
    return [
        (task, numpy.flatnonzero([other is task or other == task for other in tasks])) for task in dict.fromkeys(tasks)
    ]


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


def distance(states: Floats, start: Floats, groups: Groups) -> Floats:
    """Pixels that are left to do in states [N, ..., 10] of episodes that began in ``start`` [N, 10].

    From object to goal; for a touch from gripper to object, or how far it was shoved if that is too far.
    """
    left = numpy.empty(states.shape[:-1])
    for task, who in groups:
        s = states[who]
        x, y = PUCK_X + 2 * task.target, PUCK_Y + 2 * task.target
        if task.verb == "touch":
            first = start[who].reshape(len(who), *[1] * (s.ndim - 2), -1)
            shoved = numpy.hypot(s[..., x] - first[..., x], s[..., y] - first[..., y])
            free = gap(s[..., GRIPPER_X], s[..., GRIPPER_Y], s[..., x], s[..., y], task.target)
            left[who] = numpy.where(shoved > STILL, shoved, numpy.maximum(free, 0.0))
        else:
            left[who] = numpy.hypot(s[..., x] - s[..., GOAL_X], s[..., y] - s[..., GOAL_Y])
    return left


def success(states: Floats, left: Floats, groups: Groups, setting: Setting) -> Bools:
    """True for each state in which the task is done, given what is left to do there."""
    done = numpy.empty(left.shape, dtype=bool)
    for task, who in groups:
        if task.verb == "touch":
            done[who] = left[who] <= TOUCH_GAP
        else:
            done[who] = left[who] < setting.success_distance
            if task.verb == "carry":  # put down, not only brought
                done[who] &= states[who][..., CLOSED] == 0.0
    return done


def reward(left: Floats, done: Bools) -> Floats:
    """1 where the task is done, less what is left to do: between -1 and 1."""
    return done - numpy.minimum(left, REWARD_RANGE) / REWARD_RANGE
