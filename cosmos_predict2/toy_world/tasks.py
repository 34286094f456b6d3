# SPDX-License-Identifier: Apache-2.0
"""Tasks on the table, their ends and their rewards."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from cosmos_predict2.toy_world.physics import GRASP_GAP, gap
from cosmos_predict2.toy_world.scene import (
    CLOSED,
    GOAL_X,
    GOAL_Y,
    GRIPPER_X,
    GRIPPER_Y,
    OBJECTS,
    PUCK_X,
    PUCK_Y,
    Floats,
    Setting,
    find,
)

REWARD_RANGE = 12.0  # pixels; farther away the dense reward is flat
TOUCH_GAP = GRASP_GAP
THINGS = ("red puck", "blue box")  # by the number of the object
STILL = 2.0  # an object that ends this near to its start counts as not moved


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


def success(states: Floats, left: Floats, groups: Groups, setting: Setting) -> NDArray[numpy.bool_]:
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


def reward(left: Floats, done: NDArray[numpy.bool_]) -> Floats:
    """1 where the task is done, less what is left to do: between -1 and 1."""
    return done - numpy.minimum(left, REWARD_RANGE) / REWARD_RANGE
