# SPDX-License-Identifier: Apache-2.0
"""Where a policy is evaluated, by name: the toy world, robosuite's Lift, LIBERO's suites, BEHAVIOR-1K, or yours.

place = find("libero_10", tasks=["0", "4"], render="osmesa")
env = place.env(8, policy)
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cosmos_predict2.rl.envs.simulators import behavior_tasks, libero_suites, rendering
from cosmos_predict2.rl.envs.simulators.behavior import ACTION_DIM, CONTROL_HZ, BehaviorEnv
from cosmos_predict2.rl.envs.simulators.libero import LiberoTask
from cosmos_predict2.rl.envs.simulators.lift import LiftTask
from cosmos_predict2.rl.envs.simulators.workers import WorkerEnv
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.interfaces import VecEnv
from imaginaire.errors import ConfigError, near

TOY, LIFT, BEHAVIOR = "toy", "lift", "b1k"
SUITES = (TOY, LIFT, *libero_suites.SUITES, BEHAVIOR)
TOY_TASK, TOY_EPISODES, TOY_AT_ONCE = "push_puck", 800, 200
LIFT_TRIALS, AT_ONCE = 50, 8
OWN_EPISODES = 100
_PACKAGES = ("mujoco", "robosuite", "hf-libero", "omnigibson", "isaacsim")
_OF_TOY = {"setting": "default", "split": "val"}


@dataclass(frozen=True)
class Place:
    """A suite: its tasks, how many episodes make an evaluation, how many are played together."""

    tasks: Sequence[str]
    episodes: int
    at_once: int
    env: Callable[[int, Any], VecEnv]  # of so many places, for a policy
    in_blocks: bool  # an environment that goes to another task is built anew
    conditions: Callable[[], Mapping[str, Any]]  # what figures depend on
    fps: float


def has_workers(name: str) -> bool:
    """Whether each place of a suite is a process of its own."""
    return name == LIFT or name in libero_suites.SUITES


def find(name: str, tasks: Sequence[str] = (), **settings: Any) -> Place:
    """The suite of this name with all ``tasks`` or these. ``settings`` are setting and split of the toy world, or
    image_size, max_steps, num_steps_wait and render of a simulator; None is the published value."""
    if name not in SUITES and ":" not in name:
        raise ConfigError(f"--suite {name}: nothing is called so.{near(name, SUITES)} Your own: MODULE:CLASS.")
    if repeated := [task for task in tasks if tasks.count(task) > 1]:
        raise ConfigError(f"--tasks names {repeated[0]} twice: give each task once.")
    given = {key: value for key, value in settings.items() if value is not None}
    if ":" in name:
        if given:
            raise ConfigError(f"--{min(given)} has no meaning for --suite {name}: leave it out.")
        return _own(name, list(tasks))
    allowed = tuple(_OF_TOY) if name == TOY else ("image_size", "max_steps")
    allowed += ("render",) if has_workers(name) else ()
    allowed += ("num_steps_wait",) if name in libero_suites.SUITES else ()
    if wrong := [key for key in given if key not in allowed]:
        raise ConfigError(f"--{wrong[0]} has no meaning for --suite {name}: leave it out.")
    if name == TOY:
        return _toy(list(tasks) or [TOY_TASK], {**_OF_TOY, **given})
    render = given.pop("render", "auto")
    if name == LIFT:
        if tasks and list(tasks) != [LIFT]:
            raise ConfigError(f"--tasks {' '.join(tasks)}: the suite lift has one task, {LIFT}.")
        return _simulated([LIFT], LIFT_TRIALS, partial(LiftTask, **given), render, given)
    if name == BEHAVIOR:
        return _behavior(list(tasks), given)
    names = [task.name for task in libero_suites.chosen_tasks(name, tasks)]
    make = partial(LiberoTask, name, tasks=names, **given)
    return _simulated(names, libero_suites.TRIALS, make, render, given)


def _toy(tasks: list[str], given: Mapping[str, Any]) -> Place:
    def env(num_envs: int, policy: Any) -> VecEnv:
        return ToyEnv(num_envs, action_dim=policy.action_dim, tasks=tasks, **given)

    return Place(tasks, TOY_EPISODES, TOY_AT_ONCE, env, False, lambda: given, fps=8.0)


def _own(name: str, tasks: list[str]) -> Place:
    """The class of "MODULE:CLASS", called with the number of environments; it keeps `VecEnv`."""
    module, _, attribute = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"--suite {name}: {error}. MODULE:CLASS names an environment's class that Python finds from here, as in"
            " my_robot:MyEnv of my_robot.py in this folder."
        ) from error

    def env(num_envs: int, policy: Any) -> VecEnv:
        found: VecEnv = make(num_envs)
        if (needed := found.metadata["action_dim"]) != policy.action_dim:
            raise ConfigError(f"The policy decides on {policy.action_dim} numbers per action, {name} takes {needed}.")
        return found

    return Place(tasks or [attribute], OWN_EPISODES, AT_ONCE, env, False, dict, fps=10.0)


def _simulated(tasks: list[str], trials: int, make: Any, render: str, given: Mapping[str, Any]) -> Place:
    def env(num_envs: int, policy: Any) -> VecEnv:
        found = WorkerEnv(make, num_envs, render=render, chunk=policy.chunk)
        if (needed := found.metadata["action_dim"]) != policy.action_dim:
            found.close()
            raise ConfigError(
                f"The policy decides on {policy.action_dim} numbers per action, but the simulator's have {needed}."
            )
        return found

    def conditions() -> Mapping[str, Any]:
        return {**given, "renderer": rendering.works(render)[0], "packages": _versions()}

    return Place(tasks, trials * len(tasks), AT_ONCE, env, True, conditions, fps=20.0)


def _behavior(tasks: list[str], given: Mapping[str, Any]) -> Place:
    """Its places share one simulator, which takes a GPU: one episode at a time, unless more are asked for."""
    size = given.get("image_size")
    options: dict[str, Any] = dict(tasks=tasks or None, max_steps=given.get("max_steps"), height=size, width=size)

    def env(num_envs: int, policy: Any) -> VecEnv:
        if policy.action_dim != ACTION_DIM:
            raise ConfigError(f"The policy decides on {policy.action_dim} numbers per action, b1k takes {ACTION_DIM}.")
        return BehaviorEnv(num_envs, chunk=policy.chunk, **options)

    names = tasks or BehaviorEnv(**options).metadata["tasks"]
    episodes = behavior_tasks.TRIALS * len(names)
    return Place(names, episodes, 1, env, True, lambda: {**given, "packages": _versions()}, fps=float(CONTROL_HZ))


def _versions() -> dict[str, str]:
    found = importlib.metadata.distributions()  # a wheel of hf-libero calls itself hf_libero
    installed = {str(each.metadata["Name"]).lower().replace("_", "-"): each.version for each in found}
    return {name: installed[name] for name in _PACKAGES if name in installed}
