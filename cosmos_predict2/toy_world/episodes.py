# SPDX-License-Identifier: Apache-2.0
"""Episodes that drivers of the gripper play: states and actions, from which any frame can be drawn, and captions.

Drivers are a scripted expert of any skill, and others with other intentions. An expert of skill 1 does the task. Less
skill is a wrong idea of the direction (constant over an episode), a shaking hand (Ornstein-Uhlenbeck noise) and a
slower one. Drivers see states, never pictures, and all their random numbers come from the episode's own generator. A
caption is a sentence of at most 63 bytes about what happened, not what was intended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.random import Generator
from numpy.typing import NDArray

from cosmos_predict2.toy_world.physics import (
    BOX_HALF_SIDE,
    GOAL,
    GRASP_GAP,
    GRIPPER,
    GRIPPER_RADIUS,
    HELD,
    OBJECT_MARGIN,
    OBJECTS,
    PUCK_RADIUS,
    SETTINGS,
    STATE_SIZE,
    STILL,
    THINGS,
    TOUCH_GAP,
    Floats,
    Setting,
    Task,
    action_layout,
    advance,
    by_task,
    distance,
    episode_generator,
    find,
    find_setting,
    find_tasks,
    gap_to_target,
    lay_table,
    object_position,
    random_spot,
    reward,
    success,
)
from cosmos_predict2.toy_world.rendering import Picture, render, render_wrist

DRIVERS = ("expert", "noisy", "push", "wander")

_ROUND = 3.0  # pixels that the way round an object stays clear of it
_ROUND_STEP = 0.6  # radians of that way per step
_DECAY, _KICK = 0.8, 0.45  # of the Ornstein-Uhlenbeck noise
_NEAR_ENOUGH = 1.5  # pixels from the aim at which an expert stops
_KNOT = 3  # steps that a wanderer keeps a direction
_ACTION_GRID = 1024.0  # actions are multiples of 1/1024: exact in float32


@dataclass(frozen=True)
class DriverPlan:
    """Intentions of N episodes' drivers, with all random numbers drawn."""

    driver: list[str]
    skill: Floats  # [N]
    aim: Floats  # [N, 2], where the object shall go
    error: Floats  # [N], radians by which the aim is misjudged
    noise: Floats  # [N, steps, 3], Ornstein-Uhlenbeck: dx, dy, grip
    has_grip: bool  # some task needs the gripper closed; else the grip is fixed


def draw_plan(
    generators: Sequence[Generator],
    drivers: Sequence[str],
    skills: Sequence[tuple[float, float]],
    states: Floats,
    tasks: Sequence[Task],
    num_steps: int,
    size: int,
    has_grip: bool,
) -> DriverPlan:
    """Plans for episodes that begin in ``states``; skill is uniform in each one's range."""
    draws = numpy.stack([generator.random(4) for generator in generators])
    normals = numpy.stack([generator.standard_normal((num_steps + 1, 3)) for generator in generators])
    low, high = numpy.array(skills, dtype=numpy.float64).T
    skill = low + (high - low) * draws[:, 0]
    noise = numpy.empty((len(generators), num_steps, 3))
    value = normals[:, 0]
    for i in range(num_steps):
        value = _DECAY * value + _KICK * normals[:, i + 1]
        noise[:, i] = value
    place = _targets(states, tasks)
    angle, away = 2 * numpy.pi * draws[:, 1], 4.0 + 20.0 * draws[:, 2]
    spot = place + away[:, None] * numpy.stack([numpy.cos(angle), numpy.sin(angle)], -1)
    spot = numpy.clip(spot, OBJECT_MARGIN / 2, size - OBJECT_MARGIN / 2)
    is_push = numpy.array([driver == "push" for driver in drivers])
    return DriverPlan(
        driver=list(drivers),
        skill=skill,
        aim=numpy.where(is_push[:, None], spot, states[:, GOAL]),
        error=normals[:, 0, 2] * 0.6 * (1.0 - skill),
        noise=noise,
        has_grip=has_grip,
    )


def drive(
    states: Floats, tasks: Sequence[Task], plan: DriverPlan, setting: Setting, size: int, action_dim: int
) -> tuple[Floats, NDArray[numpy.float32]]:
    """States [N, steps + 1, 10] and actions [N, steps, action_dim] of episodes driven by their plans."""
    num_steps = plan.noise.shape[1]
    where = action_layout(action_dim)
    actions = numpy.zeros((len(states), num_steps, action_dim), dtype=numpy.float32)
    path = numpy.empty((len(states), num_steps + 1, STATE_SIZE))
    path[:, 0] = states
    for i in range(num_steps):
        action = numpy.clip(_decide(path[:, i], tasks, plan, i, setting), -1.0, 1.0)
        actions[:, i, where] = numpy.rint(action * _ACTION_GRID) / _ACTION_GRID
        path[:, i + 1] = advance(path[:, i], actions[:, i], setting, size)
    return path, actions


def _decide(states: Floats, tasks: Sequence[Task], plan: DriverPlan, i: int, setting: Setting) -> Floats:
    # who pushes somewhere at random also pushes what is only to be touched
    verbs = ["push" if (d, t.verb) == ("push", "touch") else t.verb for d, t in zip(plan.driver, tasks, strict=True)]
    skilled = _perform(states, plan.aim, plan.error, tasks, verbs, setting)
    gain = 1.0 - 0.5 * (1.0 - plan.skill)
    shake = 0.9 * (1.0 - plan.skill)
    action = skilled.copy()
    action[:, :2] = gain[:, None] * skilled[:, :2] + shake[:, None] * plan.noise[:, i, :2]
    if not plan.has_grip:
        action[:, 2] = 0.0
    else:
        slips = abs(plan.noise[:, i, 2]) > 0.6 + 4.0 * plan.skill  # an unskilled hand opens and closes by itself
        action[:, 2] = numpy.where(slips, numpy.sign(plan.noise[:, i, 2]), action[:, 2])
    wanders = numpy.array([driver == "wander" for driver in plan.driver])
    if wanders.any():
        to_object = _targets(states, tasks) - states[:, GRIPPER]
        drawn = 0.6 * to_object / numpy.maximum(_length(to_object), 1e-9)[:, None]
        action[wanders, :2] = (plan.noise[:, i - i % _KNOT, :2] + drawn)[wanders]
        if plan.has_grip:
            action[wanders, 2] = numpy.sign(plan.noise[:, i - i % _KNOT, 2])[wanders]
    return action


def _perform(
    states: Floats, aim: Floats, error: Floats, tasks: Sequence[Task], verbs: Sequence[str], setting: Setting
) -> Floats:
    action = numpy.zeros((len(states), 3))
    place = _targets(states, tasks)
    number = numpy.array([task.target for task in tasks])
    for name, act in (("push", _push), ("carry", _carry), ("touch", _touch), ("reach", _reach)):
        own = numpy.array(verbs) == name  # rows with this verb
        if own.any():
            action[own] = act(states[own], place[own], number[own], aim[own], error[own], setting)
    return action


def _push(states: Floats, place: Floats, number: Floats, aim: Floats, error: Floats, setting: Setting) -> Floats:
    """Get behind the object, then push it along the line to the aim."""
    gripper = states[:, GRIPPER]
    to_aim = aim - place
    left = _length(to_aim)
    ahead = _turn(to_aim / numpy.maximum(left, 1e-9)[:, None], error)
    behind = gripper - place
    along = (behind * ahead).sum(-1)
    across = behind[:, 1] * ahead[:, 0] - behind[:, 0] * ahead[:, 1]
    pushes = (along < 0.0) & (abs(across) < setting.behind)
    # the way round: along a circle about the object, by the shorter arc
    reach = numpy.where(number == 0, PUCK_RADIUS, BOX_HALF_SIDE * 1.2) + GRIPPER_RADIUS + _ROUND
    now = numpy.arctan2(behind[:, 1], behind[:, 0])
    wanted = numpy.arctan2(-ahead[:, 1], -ahead[:, 0])
    turn = (wanted - now + numpy.pi) % (2 * numpy.pi) - numpy.pi
    angle = now + numpy.clip(turn, -_ROUND_STEP, _ROUND_STEP)
    waypoint = place + reach[:, None] * numpy.stack([numpy.cos(angle), numpy.sin(angle)], -1)
    motion = numpy.where(pushes[:, None], ahead * left[:, None], waypoint - gripper)
    motion[left < _NEAR_ENOUGH] = 0.0
    return _with_grip(_limited(motion, setting), -1.0)


def _carry(states: Floats, place: Floats, number: Floats, aim: Floats, error: Floats, setting: Setting) -> Floats:
    """Come near, close, bring the object to the aim, open."""
    to_aim = aim - place
    is_there = _length(to_aim) < _NEAR_ENOUGH
    holds = states[:, HELD] == number
    free = gap_to_target(states[:, GRIPPER], place, number)
    reaches = free <= 0.8 * GRASP_GAP
    approach = _approach(states, place, free - 0.5 * GRASP_GAP)
    motion = numpy.where(holds[:, None], _turn(to_aim, error), numpy.where(reaches[:, None], 0.0, approach))
    motion[is_there] = 0.0
    return _with_grip(_limited(motion, setting), numpy.where(reaches & ~is_there, 1.0, -1.0))


def _touch(states: Floats, place: Floats, number: Floats, aim: Floats, error: Floats, setting: Setting) -> Floats:
    """Come within half a pixel and stay."""
    motion = _turn(_approach(states, place, gap_to_target(states[:, GRIPPER], place, number) - 0.5), error)
    return _with_grip(_limited(motion, setting), -1.0)


def _reach(states: Floats, place: Floats, number: Floats, aim: Floats, error: Floats, setting: Setting) -> Floats:
    """Go to the aim."""
    return _with_grip(_limited(_turn(aim - states[:, GRIPPER], error), setting), -1.0)


def _targets(states: Floats, tasks: Sequence[Task]) -> Floats:
    number = numpy.array([task.target for task in tasks])
    place = numpy.where(number[:, None] == 0, states[:, object_position(0)], states[:, object_position(1)])
    return numpy.where(numpy.array([task.verb == "reach" for task in tasks])[:, None], states[:, GOAL], place)


def _approach(states: Floats, place: Floats, distance: Floats) -> Floats:
    """The motion of so many pixels towards the object."""
    towards = place - states[:, GRIPPER]
    return towards * (numpy.maximum(distance, 0.0) / numpy.maximum(_length(towards), 1e-9))[:, None]


def _limited(motion: Floats, setting: Setting) -> Floats:
    """The action for a motion in pixels, no faster than the gripper moves."""
    return motion / numpy.maximum(_length(motion), setting.speed)[:, None]


def _with_grip(motion: Floats, grip: Floats | float) -> Floats:
    return numpy.concatenate([motion, numpy.broadcast_to(grip, len(motion))[:, None]], axis=1)


def _turn(vectors: Floats, angle: Floats) -> Floats:
    cos, sin = numpy.cos(angle), numpy.sin(angle)
    return numpy.stack([cos * vectors[:, 0] - sin * vectors[:, 1], sin * vectors[:, 0] + cos * vectors[:, 1]], -1)


def _length(vectors: Floats) -> Floats:
    return numpy.hypot(vectors[:, 0], vectors[:, 1])


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
    # successes, failures and near misses, as rollouts of policies of all skills
    "outcomes": Mix(
        {"expert": 0.4, "noisy": 0.35, "push": 0.25},
        {"expert": (0.6, 1.0), "noisy": (0.1, 0.6), "push": (0.5, 1.0)},
        ring_elsewhere=0.0,
    ),
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

    states: Floats  # [N, T + 1, 10], see physics.COLUMNS
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
        """Frames start ... stop - 1 of episode i, uint8 [F, H, W, 3], of the camera above."""
        return render(self.states[i, start:stop], self.size, SETTINGS[self.setting].cover)

    def cameras(self, i: int, start: int = 0, stop: int | None = None) -> dict[str, Picture]:
        """The same of each camera; where the table has a cover, there are two."""
        has_cover = SETTINGS[self.setting].cover is not None
        wrist = {"wrist": render_wrist(self.states[i, start:stop], self.size)} if has_cover else {}
        return {"front": self.render(i, start, stop), **wrist}

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
    has_grip = any(task.verb == "carry" for task in choices)
    plan = draw_plan(generators, drivers, skills, states, todo, length, size, has_grip)
    path, actions = drive(states, todo, plan, constants, size, action_dim)

    share = mix.ring_elsewhere if ring_elsewhere is None else ring_elsewhere
    is_elsewhere = draws[:, 1] < share  # the ring stops and moves nothing, so it may be drawn anew
    path[is_elsewhere, :, GOAL] = random_spot(draws[is_elsewhere, 2:4], size, constants.goal_margin)[:, None]
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
    """The sentence for an episode's states [steps + 1, 10]; ``uniform`` in [0, 1) chooses among wordings. A reach moves
    nothing: it has that of its task."""
    if task.verb == "reach":
        return task.sentence
    number = _subject(states, task, is_success)
    thing = THINGS[number]
    place = states[:, object_position(number)]
    dx, dy = place[-1] - place[0]
    if numpy.hypot(dx, dy) > STILL:
        way = numpy.hypot(*numpy.diff(place, axis=0).T)
        is_held = states[1:, HELD] == number
        verb = "carry" if way[is_held].sum() > 0.5 * way.sum() else "push"  # held over most of its way
        if is_success and task.verb != "touch":
            return _word(f"{verb} to goal", uniform).format(thing)
        sentence = _word(verb, uniform).format(thing, direction(dx, dy))
    else:
        free = gap_to_target(states[:, GRIPPER], place, numpy.array(number))
        sentence = _word("touch" if free.min() <= TOUCH_GAP else "miss", uniform).format(thing)
    return f"wander about and {sentence}" if driver == "wander" else sentence


def direction(dx: float, dy: float) -> str:
    """The nearest of eight directions on the picture."""
    return DIRECTIONS[int(numpy.rint(numpy.arctan2(dy, dx) / (numpy.pi / 4))) % 8]


def _subject(states: Floats, task: Task, is_success: bool) -> int:
    """The object that the sentence is about: the task's, or the other one if only that one moved."""
    places = (states[:, object_position(k)] for k in range(len(OBJECTS)))
    moved = [numpy.hypot(*(place[-1] - place[0])) > STILL for place in places]
    other = 1 - task.target
    return other if moved[other] and not moved[task.target] and not is_success else task.target


def _word(event: str, uniform: float) -> str:
    wordings: Sequence[str] = WORDINGS[event]
    if uniform < FIRST_WORDING:
        return wordings[0]
    rest = (uniform - FIRST_WORDING) / (1 - FIRST_WORDING)
    return wordings[1 + int(rest * (len(wordings) - 1))]
