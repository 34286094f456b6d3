# SPDX-License-Identifier: Apache-2.0
"""Recorded episodes: compact states and actions, from which any frame can be drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from cosmos_predict2.toy_world.captions import caption
from cosmos_predict2.toy_world.drivers import DRIVERS, draw_plan, drive
from cosmos_predict2.toy_world.layout import episode_generator, lay_table, random_spot
from cosmos_predict2.toy_world.rendering import Picture, render
from cosmos_predict2.toy_world.scene import GOAL, OBJECTS, Floats, find, find_setting, object_position
from cosmos_predict2.toy_world.tasks import by_task, distance, find_tasks, reward, success, uses_grip


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
