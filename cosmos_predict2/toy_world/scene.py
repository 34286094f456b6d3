# SPDX-License-Identifier: Apache-2.0
"""Things on the table: the columns of a state, sizes and colours of the things, and the two settings.

All lengths are pixels; x runs to the right and y downwards, and pixel (row i, column j) covers [j, j+1) x [i, i+1).
A state is one row of ten float64 numbers, so that whole batches of episodes are one array.
"""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

Floats = NDArray[numpy.float64]

COLUMNS = (
    "gripper_x", "gripper_y", "closed", "held", "puck_x", "puck_y", "box_x", "box_y", "goal_x", "goal_y",
)  # fmt: skip
GRIPPER_X, GRIPPER_Y, CLOSED, HELD, PUCK_X, PUCK_Y, BOX_X, BOX_Y, GOAL_X, GOAL_Y = range(10)
STATE_SIZE = len(COLUMNS)
GRIPPER = slice(GRIPPER_X, GRIPPER_Y + 1)
GOAL = slice(GOAL_X, GOAL_Y + 1)

OBJECTS = ("puck", "box")  # an object's number; `held` is that number, or NOTHING
NOTHING = -1.0
PARKED = -1000.0  # both coordinates of an object that is not on the table

GRIPPER_RADIUS = 4.5
PUCK_RADIUS = 5.5
BOX_HALF_SIDE = 5.0
OBJECT_RADII = (PUCK_RADIUS, BOX_HALF_SIDE)  # towards a wall
RING_RADIUS = 8.5
RING_WIDTH = 2.2

# Far enough apart that a colour identifies the thing, also where soft edges mix two of them.
COLOURS: dict[str, tuple[int, int, int]] = {
    "table": (205, 200, 190),
    "ring": (40, 160, 70),
    "puck": (215, 40, 40),
    "box": (40, 80, 220),
    "open gripper": (40, 40, 60),
    "closed gripper": (120, 30, 130),
}

# Positions are kept on this grid: differences in the last bit between mathematical libraries do not add up.
GRID = 2.0**16


@dataclass(frozen=True)
class Setting:
    """Constants of one difficulty."""

    size: int  # side of the table
    speed: float  # of the gripper at full action, per step
    friction: float  # Coulomb coefficient of a push
    goal_distance: tuple[float, float]  # object to goal at the start
    gripper_clearance: tuple[float, float] | None  # gap to the object at the start; None: anywhere on the table
    success_distance: float
    num_steps: int  # of an episode
    behind: float  # how far off the line to the goal the expert still pushes


SETTINGS = {
    "default": Setting(
        size=48,
        speed=1.5,
        friction=2.5,
        goal_distance=(6.0, 14.0),
        gripper_clearance=(1.0, 8.0),
        success_distance=4.0,
        num_steps=24,
        behind=5.0,
    ),
    "hard": Setting(
        size=64,
        speed=2.0,
        friction=1.2,
        goal_distance=(10.0, 22.0),
        gripper_clearance=None,
        success_distance=4.5,
        num_steps=36,
        behind=4.0,
    ),
}
SMALLEST_SIZE = 40


def object_position(number: int) -> slice:
    """The columns of an object's centre."""
    return slice(PUCK_X + 2 * number, PUCK_X + 2 * number + 2)


def to_grid(values: Floats) -> Floats:
    """The nearest numbers on the grid that positions are kept on."""
    return numpy.rint(values * GRID) / GRID


def find(kind: str, name: str, known: Iterable[str]) -> str:
    """``name`` if it is known, else an error that offers what is."""
    names = list(known)
    if name in names:
        return name
    close = difflib.get_close_matches(str(name), names, n=3)
    hint = f"Did you mean {', '.join(close)}?" if close else f"Known: {', '.join(names)}."
    raise ValueError(f"The toy world has no {kind} called '{name}'. {hint}")


def find_setting(name: str, size: int | None) -> tuple[Setting, int]:
    """The constants of a setting, and the side of the table: ``size``, or the setting's own."""
    setting = SETTINGS[find("setting", name, SETTINGS)]
    size = setting.size if size is None else size
    if size < SMALLEST_SIZE:
        raise ValueError(f"The toy world's table has size {size}; things fit on {SMALLEST_SIZE} pixels or more.")
    return setting, size
