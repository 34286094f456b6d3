# SPDX-License-Identifier: Apache-2.0
"""Captions of episodes: a sentence of at most 63 bytes about what happened, not what was intended."""

from collections.abc import Sequence

import numpy

from cosmos_predict2.toy_world.physics import gap
from cosmos_predict2.toy_world.scene import (
    GRIPPER_X,
    GRIPPER_Y,
    HELD,
    OBJECTS,
    PUCK_X,
    PUCK_Y,
    Floats,
)
from cosmos_predict2.toy_world.tasks import STILL, THINGS, TOUCH_GAP, Task

# by what happened; the first wording is the task's own sentence and the most frequent one
WORDINGS: dict[str, tuple[str, ...]] = {
    "push to goal": ("push the {} to the green ring", "move the {} to the green ring", "slide the {} onto the ring"),
    "carry to goal": ("carry the {} to the green ring", "take the {} to the green ring", "bring the {} to the ring"),
    "push": ("push the {} {}", "shove the {} {}", "move the {} {}"),
    "carry": ("carry the {} {}", "drag the {} {}", "take the {} {}"),
    "touch": ("touch the {}", "reach for the {} and touch it"),
    "miss": ("move near the {} without touching it", "stay away from the {}"),
}
DIRECTIONS = ("right", "down and right", "down", "down and left", "left", "up and left", "up", "up and right")
FIRST_WORDING = 0.6  # its share


def caption(states: Floats, task: Task, is_success: bool, driver: str, uniform: float) -> str:
    """The sentence for an episode's states [steps + 1, 10]; ``uniform`` in [0, 1) chooses among wordings."""
    number = _subject(states, task, is_success)
    thing = THINGS[number]
    x, y = PUCK_X + 2 * number, PUCK_Y + 2 * number
    dx, dy = states[-1, x] - states[0, x], states[-1, y] - states[0, y]
    if numpy.hypot(dx, dy) > STILL:
        way = numpy.hypot(numpy.diff(states[:, x]), numpy.diff(states[:, y]))
        is_held = states[1:, HELD] == number
        verb = "carry" if way[is_held].sum() > 0.5 * way.sum() else "push"  # held over most of its way
        if is_success and task.verb != "touch":
            return _word(f"{verb} to goal", uniform).format(thing)
        sentence = _word(verb, uniform).format(thing, direction(dx, dy))
    else:
        free = gap(states[:, GRIPPER_X], states[:, GRIPPER_Y], states[:, x], states[:, y], number)
        sentence = _word("touch" if free.min() <= TOUCH_GAP else "miss", uniform).format(thing)
    return f"wander about and {sentence}" if driver == "wander" else sentence


def direction(dx: float, dy: float) -> str:
    """The nearest of eight directions on the picture."""
    return DIRECTIONS[int(numpy.rint(numpy.arctan2(dy, dx) / (numpy.pi / 4))) % 8]


def _subject(states: Floats, task: Task, is_success: bool) -> int:
    """The object that the sentence is about: the task's, or the other one if only that one moved."""
    moved = [
        numpy.hypot(*(states[-1, c] - states[0, c] for c in (PUCK_X + 2 * k, PUCK_Y + 2 * k))) > STILL
        for k in range(len(OBJECTS))
    ]
    other = 1 - task.target
    return other if moved[other] and not moved[task.target] and not is_success else task.target


def _word(event: str, uniform: float) -> str:
    wordings: Sequence[str] = WORDINGS[event]
    if uniform < FIRST_WORDING:
        return wordings[0]
    rest = (uniform - FIRST_WORDING) / (1 - FIRST_WORDING)
    return wordings[1 + int(rest * (len(wordings) - 1))]
