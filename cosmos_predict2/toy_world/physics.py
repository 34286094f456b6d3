# SPDX-License-Identifier: Apache-2.0
"""The table: what is on it, how gripper and objects move, and tasks: how each is laid out, when it is done, its reward.

All lengths are pixels; x runs to the right and y downwards, and pixel (row i, column j) covers [j, j+1) x [i, i+1).
A state is one row of ten float64 numbers, so that whole batches of episodes are one array: everything is vectorised
over the first dimension and a pure function of states and actions. Each episode has its own stream of random numbers.

Contact and nothing else moves an object. A push follows Coulomb's law: an object that the gripper presses into yields
along the contact normal, and is dragged along the tangent as far as friction reaches; inside the friction cone it
sticks to the gripper. A closed gripper that is within a pixel of an object holds it until it opens.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from numpy.random import Generator
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
    cover: int | None = None  # width of the rim that a cover leaves free: what lies under it is hidden from above
    task: str = "push_puck"  # unless another one is asked for

    @property
    def goal_margin(self) -> float:
        """Distance of a ring's centre to the walls, at least: a cover hides all of it."""
        hidden = 0.0 if self.cover is None else self.cover + RING_RADIUS + RING_WIDTH / 2 + 1.0
        return max(OBJECT_MARGIN, hidden)


_DEFAULT = Setting(
    size=48,
    speed=1.5,
    friction=2.5,
    goal_distance=(6.0, 14.0),
    gripper_clearance=(1.0, 8.0),
    success_distance=4.0,
    num_steps=24,
    behind=5.0,
)
SETTINGS = {
    "default": _DEFAULT,
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
    # a camera at the wrist sees what the one above does not
    "covered": replace(_DEFAULT, cover=2, task="reach_ring"),
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


# Where dx, dy and grip stand in an action; the other entries of a robot's action are accepted and do nothing.
ACTION_LAYOUTS = {4: (0, 1, 2), 7: (0, 1, 6)}
NUM_SUBSTEPS = 2
GRASP_GAP = TOUCH_GAP = 1.0

_PUCK, _BOX = 0, 1


def advance(states: Floats, actions: NDArray[numpy.floating], setting: Setting, size: int) -> Floats:
    """States [N, 10] one step later; actions are [N, 4] or [N, 7], clipped to [-1, 1]."""
    where = action_layout(actions.shape[-1])
    motion = numpy.clip(actions[:, where].T.astype(numpy.float64), -1.0, 1.0)
    rows = numpy.array(states.T, order="C")  # a copy with one contiguous row per quantity
    step = motion[:2] * (setting.speed / NUM_SUBSTEPS)
    _open_or_close(rows, motion[2] > 0.0)
    is_holding = bool((rows[HELD] != NOTHING).any())
    is_crowded = bool(((rows[PUCK_X] > 0.0) & (rows[BOX_X] > 0.0)).any())
    present = [k for k in (_PUCK, _BOX) if (rows[PUCK_X + 2 * k] > 0.0).any()]
    for _ in range(NUM_SUBSTEPS):
        _substep(rows, step, setting.friction, size, present, is_holding, is_crowded)
    return numpy.ascontiguousarray(to_grid(rows).T)


def simulate(states: Floats, actions: NDArray[numpy.floating], setting: Setting, size: int) -> Floats:
    """States [N, T + 1, 10] from first states [N, 10] and actions [N, T, A]."""
    out = numpy.empty((states.shape[0], actions.shape[1] + 1, STATE_SIZE))
    out[:, 0] = states
    for i in range(actions.shape[1]):
        out[:, i + 1] = advance(out[:, i], actions[:, i], setting, size)
    return out


def action_layout(action_dim: int) -> list[int]:
    """Positions of dx, dy and grip in an action."""
    if action_dim not in ACTION_LAYOUTS:
        raise ValueError(f"The toy world's actions have 4 or 7 numbers, got {action_dim}.")
    return list(ACTION_LAYOUTS[action_dim])


def gap(x: Floats, y: Floats, object_x: Floats, object_y: Floats, number: int) -> Floats:
    """Free pixels between the gripper at (x, y) and an object's edge; negative inside it."""
    return -_press((x, y), (object_x, object_y), number, GRIPPER_RADIUS)[0]


def gap_to_target(points: Floats, places: Floats, numbers: NDArray[Any]) -> Floats:
    """`gap` of grippers at ``points`` [..., 2] and objects at ``places`` [..., 2], whose numbers differ."""
    x, y, object_x, object_y = *numpy.moveaxis(points, -1, 0), *numpy.moveaxis(places, -1, 0)
    return numpy.where(numbers == _PUCK, gap(x, y, object_x, object_y, _PUCK), gap(x, y, object_x, object_y, _BOX))


def _open_or_close(rows: Floats, is_closed: NDArray[numpy.bool_]) -> None:
    rows[CLOSED] = is_closed
    rows[HELD][~is_closed] = NOTHING
    reaching = is_closed & (rows[HELD] == NOTHING)
    if not reaching.any():
        return
    gaps = numpy.stack([-_press(rows[GRIPPER], rows[object_position(k)], k, GRIPPER_RADIUS)[0] for k in (_PUCK, _BOX)])
    grasped = reaching & (gaps.min(0) <= GRASP_GAP)
    rows[HELD][grasped] = gaps.argmin(0)[grasped]


def _substep(
    rows: Floats, step: Floats, friction: float, size: int, present: list[int], is_holding: bool, is_crowded: bool
) -> None:
    gripper = rows[GRIPPER]
    before = gripper.copy()
    gripper += step
    numpy.clip(gripper, GRIPPER_RADIUS, size - GRIPPER_RADIUS, out=gripper)
    if is_holding:
        _carry(rows, before, size)
    moved = gripper - before
    pushed = []
    for k in present:
        place = rows[object_position(k)]
        depth, normal_x, normal_y = _press(gripper, place, k, GRIPPER_RADIUS)
        hit = depth > 0.0
        if is_holding:
            hit &= rows[HELD] != k
        pushed.append(hit | (rows[HELD] == k) if is_holding else hit)
        if not hit.any():
            continue
        along = moved[0] * normal_x + moved[1] * normal_y
        across = moved[1] * normal_x - moved[0] * normal_y  # along the tangent (-normal_y, normal_x)
        presses = along > 0.0
        slide = numpy.clip(across / numpy.where(presses, along, 1.0), -friction, friction)
        slide = numpy.where(presses, slide, 0.0)
        depth = numpy.where(hit, depth, 0.0)
        _shift(rows, k, depth * (normal_x - slide * normal_y), depth * (normal_y + slide * normal_x), hit, size)
    if is_crowded:
        _objects_yield(rows, pushed, size)
    for k, was_pushed in zip(present, pushed, strict=True):
        if not is_crowded and not was_pushed.any():
            continue
        place = rows[object_position(k)]
        depth, normal_x, normal_y = _press(gripper, place, k, GRIPPER_RADIUS)
        hit = depth > 1e-9
        if is_holding:
            hit &= rows[HELD] != k
        if hit.any():  # a wall or another object stopped the object: the gripper stops at it
            back = numpy.where(hit, depth, 0.0)
            _shift_gripper(rows, -back * normal_x, -back * normal_y)


def _press(
    centre: Floats | tuple[Floats, Floats], place: Floats | tuple[Floats, Floats], number: int, radius: float
) -> tuple[Floats, Floats, Floats]:
    """Depth to which a disc presses into an object, each at its (x, y), and the unit normal from the disc into it."""
    dx, dy = place[0] - centre[0], place[1] - centre[1]
    if number == _PUCK:
        distance = numpy.sqrt(dx * dx + dy * dy)
        inverse = 1.0 / numpy.maximum(distance, 1e-9)
        return radius + PUCK_RADIUS - distance, dx * inverse, dy * inverse
    # the box never turns: its nearest point to the disc's centre
    outside_x = dx - numpy.clip(dx, -BOX_HALF_SIDE, BOX_HALF_SIDE)
    outside_y = dy - numpy.clip(dy, -BOX_HALF_SIDE, BOX_HALF_SIDE)
    distance = numpy.sqrt(outside_x * outside_x + outside_y * outside_y)
    inverse = 1.0 / numpy.maximum(distance, 1e-9)
    depth, normal_x, normal_y = radius - distance, outside_x * inverse, outside_y * inverse
    inside = distance < 1e-9
    if inside.any():  # the centre is in the box: out through the nearest side
        is_side = numpy.abs(dx) >= numpy.abs(dy)
        normal_x = numpy.where(inside, numpy.where(is_side, numpy.copysign(1.0, dx), 0.0), normal_x)
        normal_y = numpy.where(inside, numpy.where(is_side, 0.0, numpy.copysign(1.0, dy)), normal_y)
        inner = radius + BOX_HALF_SIDE - numpy.maximum(numpy.abs(dx), numpy.abs(dy))
        depth = numpy.where(inside, inner, depth)
    return depth, normal_x, normal_y


def _shift(rows: Floats, number: int, dx: Floats, dy: Floats, who: NDArray[numpy.bool_], size: int) -> None:
    """Move an object and keep it on the table."""
    place = rows[object_position(number)]
    low, high = OBJECT_RADII[number], size - OBJECT_RADII[number]
    place[0] = numpy.where(who, numpy.clip(place[0] + dx, low, high), place[0])
    place[1] = numpy.where(who, numpy.clip(place[1] + dy, low, high), place[1])


def _shift_gripper(rows: Floats, dx: Floats, dy: Floats) -> None:
    """Move the gripper, and with it what it holds."""
    rows[GRIPPER_X] += dx
    rows[GRIPPER_Y] += dy
    for k in (_PUCK, _BOX):
        held = rows[HELD] == k
        if held.any():
            place = rows[object_position(k)]
            place[0] += numpy.where(held, dx, 0.0)
            place[1] += numpy.where(held, dy, 0.0)


def _carry(rows: Floats, before: Floats, size: int) -> None:
    """Take held objects along; a wall that stops the object stops the gripper."""
    gripper = rows[GRIPPER]
    for k in (_PUCK, _BOX):
        held = rows[HELD] == k
        if not held.any():
            continue
        place = rows[object_position(k)]
        offset = place - before
        low, high = OBJECT_RADII[k], size - OBJECT_RADII[k]
        stopped = numpy.clip(gripper, low - offset, high - offset)
        gripper[:] = numpy.where(held, stopped, gripper)
        place[:] = numpy.where(held, gripper + offset, place)


def _objects_yield(rows: Floats, pushed: list[NDArray[numpy.bool_]], size: int) -> None:
    """If puck and box overlap, the one that was not pushed yields; if a wall stops it, both stop."""
    puck, box = rows[object_position(_PUCK)], rows[object_position(_BOX)]
    depth, normal_x, normal_y = _press(puck, box, _BOX, PUCK_RADIUS)
    hit = depth > 0.0
    if not hit.any():
        return
    box_yields = pushed[_PUCK] | ~pushed[_BOX]
    for yields, number, sign in ((hit & box_yields, _BOX, 1.0), (hit & ~box_yields, _PUCK, -1.0)):
        if yields.any():
            _shift(rows, number, sign * depth * normal_x, sign * depth * normal_y, yields, size)
    depth, normal_x, normal_y = _press(puck, box, _BOX, PUCK_RADIUS)
    for stops, number, sign in ((hit & box_yields, _PUCK, -1.0), (hit & ~box_yields, _BOX, 1.0)):
        stops = stops & (depth > 1e-9)
        if not stops.any():
            continue
        back_x, back_y = (numpy.where(stops, sign * depth * n, 0.0) for n in (normal_x, normal_y))
        held = rows[HELD] == number
        _shift(rows, number, back_x, back_y, stops & ~held, size)
        _shift_gripper(rows, numpy.where(held, back_x, 0.0), numpy.where(held, back_y, 0.0))


# --- tasks


REWARD_RANGE = 12.0  # pixels; farther away the dense reward is flat
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

    verb: str  # push, carry, touch or reach
    target: int  # number of the object
    is_crowded: bool = False

    @property
    def sentence(self) -> str:
        thing = THINGS[self.target]
        if self.verb == "reach":
            return "reach the green ring"
        return f"touch the {thing}" if self.verb == "touch" else f"{self.verb} the {thing} to the green ring"


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
ALL_TASKS = TASKS | {"reach_ring": Task("reach", _PUCK)}  # the last with no object on the table


def find_tasks(names: Sequence[str]) -> list[Task]:
    if isinstance(names, str) or not names:
        raise ValueError(f"The toy world's tasks are a list of names, at least one; got {names!r}.")
    return [ALL_TASKS[find("task", name, ALL_TASKS)] for name in names]


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
            states[[task.verb == "reach" for task in tasks], PUCK_X : BOX_Y + 1] = PARKED
            return to_grid(states)
        draws = numpy.stack([generators[i].random((_TRIES, 8)) for i in pending.tolist()])
        tried, is_good = _try(draws, target[pending, None], is_crowded[pending, None], setting, size)
        first = is_good.argmax(1)
        done = is_good[numpy.arange(len(pending)), first]
        states[pending[done]] = tried[done, first[done]]
        pending = pending[~done]
    raise ValueError(f"The toy world found no room for these things on a table of size {size}; take a larger size.")


def random_spot(uniform: Floats, size: int, margin: float = OBJECT_MARGIN) -> Floats:
    """A place [N, 2] for a goal, from two uniform numbers."""
    return to_grid(margin + uniform * (size - 2 * margin))


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
    is_good = within(goal, setting.goal_margin) & within(gripper, GRIPPER_MARGIN) & within(room_behind, GRIPPER_RADIUS)
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

    From object to goal, for a reach from gripper to goal; for a touch from gripper to object, or how far it was shoved
    if that is too far.
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
            x, y = (GRIPPER_X, GRIPPER_Y) if task.verb == "reach" else (x, y)
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
