# SPDX-License-Identifier: Apache-2.0
"""Recorded episodes: compact states and actions, from which any frame can be drawn, and captions.

A caption is a sentence of at most 63 bytes about what happened, not what was intended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from cosmos_predict2.toy_world.drivers import DRIVERS, draw_plan, drive
from cosmos_predict2.toy_world.physics import (
    GOAL,
    GRIPPER_X,
    GRIPPER_Y,
    HELD,
    OBJECTS,
    PUCK_X,
    PUCK_Y,
    Floats,
    find,
    find_setting,
    gap,
    object_position,
)
from cosmos_predict2.toy_world.rendering import Picture, render
from cosmos_predict2.toy_world.tasks import (
    STILL,
    THINGS,
    TOUCH_GAP,
    Task,
    by_task,
    distance,
    episode_generator,
    find_tasks,
    lay_table,
    random_spot,
    reward,
    success,
    uses_grip,
)

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


@dataclass(frozen=True)
class Mix:
    """Shares of the drivers, their skill, and the share of episodes whose ring moves once the driver has chosen."""

    drivers: Mapping[str, float]
    skill: Mapping[str, tuple[float, float]]
    ring_elsewhere: float


MIXES = {
    # what happens follows nearly from first frame and caption
    "expert": Mix({"expert": 1.0}, {"expert": (0.85, 1.0)}, ring_elsewhere=0.0),
    # what happens follows from first frame and caption alone
    "full_skill": Mix({"expert": 1.0}, {"expert": (1.0, 1.0)}, ring_elsewhere=0.0),
    # the same, but now and then the object goes to another place, which the caption names
    "varied": Mix({"expert": 0.9, "push": 0.1}, {"expert": (1.0, 1.0), "push": (1.0, 1.0)}, ring_elsewhere=0.0),
    # what happens follows from the actions only: the ring mostly does not show where the object goes
    "mixed": Mix(
        {"expert": 0.3, "noisy": 0.3, "push": 0.25, "wander": 0.15},
        {"expert": (0.6, 1.0), "noisy": (0.1, 0.6), "push": (0.5, 1.0), "wander": (0.0, 0.0)},
        ring_elsewhere=0.75,
    ),
    # a hand that goes where chance takes it, as a policy that explores
    "wander": Mix({"wander": 1.0}, {"wander": (0.0, 0.0)}, ring_elsewhere=0.75),
}


@dataclass(frozen=True)
class Episodes:
    """N episodes of T actions and T + 1 states. Success, reward and captions are those of the ring that is drawn."""

    states: Floats  # [N, T + 1, 10], see scene.COLUMNS
    actions: NDArray[numpy.float32]  # [N, T, action_dim]
    rewards: Floats  # [N, T], of the state that each action leads to
    success: NDArray[numpy.bool_]  # [N], at the end
    ever: NDArray[numpy.bool_]  # [N], at any time
    captions: list[str]
    tasks: list[str]
    drivers: list[str]
    skill: Floats  # [N]
    size: int
    setting: str
    seed: int
    first: int

    def __len__(self) -> int:
        return len(self.states)

    def render(self, i: int, start: int = 0, stop: int | None = None) -> Picture:
        """Frames start ... stop - 1 of episode i, uint8 [F, H, W, 3]."""
        return render(self.states[i, start:stop], self.size)

    def travel(self, num_steps: int) -> Floats:
        """Distance of the object that gets furthest, in each window of so many steps: [N, T + 1 - num_steps]."""
        ways = []
        for k in range(len(OBJECTS)):
            place = self.states[:, :, object_position(k)]
            way = place[:, num_steps:] - place[:, :-num_steps]
            ways.append(numpy.hypot(way[..., 0], way[..., 1]))
        return numpy.maximum(*ways)


def make_episodes(
    num: int,
    seed: int = 0,
    *,
    mix: str | Mix = "mixed",
    length: int | None = None,
    size: int | None = None,
    setting: str = "default",
    tasks: Sequence[str] = ("push_puck",),
    action_dim: int = 4,
    ring_elsewhere: float | None = None,
    first: int = 0,
) -> Episodes:
    """Episodes ``first`` ... ``first + num - 1`` of the endless series that seed and settings define.

    ``length`` is the number of actions, the setting's own by default. ``ring_elsewhere`` replaces the mix's share: 0
    keeps every ring where the driver saw it.
    """
    if num < 1 or first < 0 or not 0 <= seed < 2**63:
        raise ValueError(f"make_episodes needs num >= 1, first >= 0 and 0 <= seed < 2**63; got {num}, {first}, {seed}.")
    mix = MIXES[find("mix", mix, MIXES)] if isinstance(mix, str) else mix
    for driver in mix.drivers:
        find("driver", driver, DRIVERS)
    constants, size = find_setting(setting, size)
    length = constants.num_steps if length is None else length
    choices = find_tasks(tasks)
    generators = [episode_generator(seed, index) for index in range(first, first + num)]
    chosen = [int(generator.integers(len(choices))) for generator in generators]
    todo = [choices[i] for i in chosen]
    states = lay_table(generators, todo, constants, size)
    draws = numpy.stack([generator.random(5) for generator in generators])
    names = list(mix.drivers)
    shares = numpy.cumsum([mix.drivers[name] for name in names])
    drivers = [names[i] for i in numpy.searchsorted(shares / shares[-1], draws[:, 0], side="right")]
    skills = [mix.skill[driver] for driver in drivers]
    plan = draw_plan(generators, drivers, skills, states, todo, length, size, uses_grip(choices))
    path, actions = drive(states, todo, plan, constants, size, action_dim)

    share = mix.ring_elsewhere if ring_elsewhere is None else ring_elsewhere
    is_elsewhere = draws[:, 1] < share  # the ring stops and moves nothing, so it may be drawn anew
    path[is_elsewhere, :, GOAL] = random_spot(draws[is_elsewhere, 2:4], size)[:, None]
    groups = by_task(todo)
    left = distance(path, path[:, 0], groups)
    done = success(path, left, groups, constants)
    captions = [caption(path[i], todo[i], bool(done[i, -1]), drivers[i], float(draws[i, 4])) for i in range(num)]
    return Episodes(
        states=path,
        actions=actions,
        rewards=reward(left, done)[:, 1:],
        success=done[:, -1],
        ever=numpy.logical_or.reduce(done, axis=1),
        captions=captions,
        tasks=[tasks[i] for i in chosen],
        drivers=drivers,
        skill=plan.skill,
        size=size,
        setting=setting,
        seed=seed,
        first=first,
    )


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
