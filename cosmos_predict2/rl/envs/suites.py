# SPDX-License-Identifier: Apache-2.0
"""Suites to evaluate a policy in, by name: the toy world, robosuite's Lift, LIBERO's suites, BEHAVIOR-1K, every
environment of gymnasium, yours, or the imagination of a server.

place = find("libero_10", tasks=["0", "4"], render="osmesa")
env = place.env(8, policy)
"""

import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cosmos_predict2.rl.envs.remote import address_of, facts_of, of_address
from cosmos_predict2.rl.envs.simulators import rendering
from cosmos_predict2.rl.envs.simulators.workers import WorkerEnv
from cosmos_predict2.rl.interfaces import EnvDefaults, VecEnv
from imaginaire.buildable import buildable, completed, made, resolve
from imaginaire.config import lazy_config
from imaginaire.config.lazy_config import plain_data
from imaginaire.errors import ConfigError, raised_as

log = logging.getLogger(__name__)

TOY, LIFT, GYM = "toy", "lift", "gym:"
TOYS = {TOY: "default", f"{TOY}_hard": "hard", f"{TOY}_covered": "covered"}  # with the setting of each
TOY_EPISODES, TOY_AT_ONCE = 800, 200
LIBERO = tuple(f"libero_{name}" for name in ("spatial", "object", "goal", "90", "10", "all"))
LIFT_TRIALS, AT_ONCE = 50, 8
OWN_EPISODES = 100
_VERSION = re.compile(r"-v\d+(\?|$)")  # the end of an ID of gymnasium
_PACKAGES = ("mujoco", "robosuite", "hf-libero", "omnigibson", "isaacsim", "gymnasium")


@dataclass(frozen=True)
class SuitePlan:
    """A suite: its tasks, how many episodes make an evaluation, how many are played together."""

    tasks: Sequence[str]
    episodes: int
    at_once: int
    build: Callable[[int, Any], VecEnv]  # of so many places, for a policy
    in_blocks: bool  # an environment that goes to another task is built anew
    conditions: Callable[[], Mapping[str, Any]]  # what figures depend on
    fps: float
    has_workers: bool = False  # each place is a process of its own

    def env(self, num_envs: int, policy: Any) -> VecEnv:
        """The environment of so many places, for a policy that decides on as many numbers; one of None takes any."""
        found = self.build(num_envs, policy)
        if policy.action_dim not in (None, needed := found.metadata["action_dim"]):
            found.close()
            suite = found.metadata.get("suite", "the environment")
            cure = "Choose another suite, or what makes an action of its recordings (action_keys)"
            text = f"The policy decides on {policy.action_dim} numbers per action, {suite} takes {needed}. {cure}."
            raise ConfigError(text)
        return found


def find(name: str, tasks: Sequence[str] = (), **settings: Any) -> SuitePlan:
    """The suite of this name with all ``tasks`` or these. ``settings`` are max_steps, and setting and split of the toy
    world, or image_size, num_steps_wait and render of a simulator; None is the published value.

    A suite is a function of tasks and settings that gives a `SuitePlan`, or the class of an environment.
    """
    if not name.startswith(GYM) and _VERSION.search(name):
        raise ConfigError(f"{name}: an environment of gymnasium has {GYM} before its name, {GYM}{name}.")
    make: Any
    if name.startswith(GYM):
        make = partial(_gym, name.removeprefix(GYM))
    else:
        make = partial(_imagined, name) if address_of(name) else resolve(name, "suite")
    if repeated := [task for task in tasks if tasks.count(task) > 1]:
        raise ConfigError(f"--tasks names {repeated[0]} twice: give each task once.")
    given = {key: value for key, value in settings.items() if value is not None}
    if isinstance(make, type):
        make = partial(_own, make)
    return made(make, given, f"--suite {name}: --", tasks=list(tasks))


def environment(env: Any, policy: Any, **arguments: Any) -> VecEnv:
    """The environment of a configuration: a lazy call, a server's address, or a suite's name; None of none."""
    if not isinstance(env, str):
        return completed(lazy_config.instantiate(env, **arguments), EnvDefaults)  # type: ignore[no-any-return]
    if arguments:
        raise ConfigError(f"{env} imagines nothing here: set model.config.world_model=null, and no refinement.")
    if address_of(env):
        return of_address(env)
    suite = find(env)
    return completed(suite.env(suite.at_once, policy), EnvDefaults)  # type: ignore[no-any-return]


def size_of_recordings(name: str, height: int) -> dict[str, Any]:
    """The settings with which a suite draws as recordings of this height were drawn, unless its name has a size."""
    return {"image_size": height} if name.startswith(GYM) and "image_size=" not in name else {}


def _toy(
    suite: str, tasks: list[str], setting: str | None = None, split: str = "val", max_steps: int | None = None
) -> SuitePlan:
    from cosmos_predict2.rl.envs.toy import ToyEnv  # which the other suites know nothing of
    from cosmos_predict2.toy_world.physics import find_setting

    if suite != TOY and setting not in (None, TOYS[suite]):
        cure = f"the suite's setting is {TOYS[suite]}. Leave --setting out, or use --suite {TOY}"
        raise ConfigError(f"--suite {suite} --setting {setting}: {cure}.")
    setting = setting or TOYS[suite]
    given = {"setting": setting, "split": split, **({"max_steps": max_steps} if max_steps else {})}
    with raised_as(ConfigError, "--setting", ValueError):
        tasks = tasks or [find_setting(setting, None)[0].task]

    def build(num_envs: int, policy: Any) -> VecEnv:
        width = {} if policy.action_dim is None else {"action_dim": policy.action_dim}
        return ToyEnv(num_envs, **width, tasks=tasks, setting=setting, split=split, num_steps=max_steps)

    return SuitePlan(tasks, TOY_EPISODES, TOY_AT_ONCE, build, False, lambda: given, fps=8.0)


for _name in TOYS:
    buildable("suite", _name)(partial(_toy, _name))


@buildable("suite", LIFT)
def _lift(
    tasks: list[str], render: str = "auto", image_size: int | None = None, max_steps: int | None = None
) -> SuitePlan:
    from cosmos_predict2.rl.envs.simulators.lift import LiftTask

    if tasks and tasks != [LIFT]:
        raise ConfigError(f"--tasks {' '.join(tasks)}: the suite lift has one task, {LIFT}.")
    return _simulated([LIFT], LIFT_TRIALS, LiftTask, render, image_size=image_size, max_steps=max_steps)


def _libero(
    suite: str,
    tasks: list[str],
    render: str = "auto",
    image_size: int | None = None,
    max_steps: int | None = None,
    num_steps_wait: int | None = None,
) -> SuitePlan:
    from cosmos_predict2.rl.envs.simulators import libero

    names = [task.name for task in libero.chosen_tasks(suite, tasks)]
    make = partial(libero.LiberoTask, suite, tasks=names)
    settings: Any = dict(image_size=image_size, max_steps=max_steps, num_steps_wait=num_steps_wait)
    return _simulated(names, libero.TRIALS, make, render, **settings)


for _name in LIBERO:
    buildable("suite", _name)(partial(_libero, _name))


def _gym(text: str, tasks: list[str], render: str = "auto", **settings: Any) -> SuitePlan:
    """``ID?KEY=VALUE&...``: a registered environment and arguments of `GymTask`, where ``settings`` win."""
    from cosmos_predict2.rl.envs.simulators import gym

    env_id, _, query = text.partition("?")
    words = [word.partition("=") for word in query.split("&") if word]
    if tasks and tasks != [env_id]:
        raise ConfigError(f"--tasks {' '.join(tasks)}: {GYM}{env_id} is one task.")
    own = {key: plain_data(value, f"--suite {GYM}{text}: {key}") for key, _, value in words}
    drawn_by = render if importlib.util.find_spec("mujoco") else None
    make = partial(gym.GymTask, gym.for_workers(env_id), **own)
    return _simulated([env_id], OWN_EPISODES, make, drawn_by, is_named="sentence" in own, **settings)


def _imagined(address: str, tasks: list[str]) -> SuitePlan:
    """The world model of a server, from starts that its training never had, unless the address has a ``part``."""
    facts = facts_of(address)
    parts, card = facts["parts"], facts["card"]
    verdict = f"the card of its server says {card['verdict']}" if card else "unchecked: its server has no card"
    log.warning("%s: what succeeds there is imagined (%s)", address, verdict)
    options = {"part": "held_out"} if "held_out" in parts else {}
    names = tasks or [f"imagined {i + 1}" for i in range(facts["metadata"]["num_tasks"])]

    def build(num_envs: int, policy: Any) -> VecEnv:
        return of_address(address, num_envs=num_envs, **options)

    conditions = {"imagined_by": facts["inputs"], "verdict": card and card["verdict"]}
    episodes = len(parts.get("held_out", ())) or OWN_EPISODES
    return SuitePlan(names, episodes, facts["num_envs"], build, False, lambda: conditions, fps=facts["fps"])


class OwnDefaults:
    """Optional of a class that is a suite."""

    num_trials: int | None = None  # starts of a task: more would be the same again


def _own(cls: type, tasks: list[str]) -> SuitePlan:
    """A class that is called with the number of environments and keeps `VecEnv`, or one of a `TaskEnv`."""
    name = cls.__name__
    if any(base.__module__.startswith("gymnasium.") for base in cls.__mro__):
        cure = f"register it in {cls.__module__} (gymnasium.register), and name it {GYM}{cls.__module__}:ID"
        raise ConfigError(f"{name} is a class of gymnasium: {cure}.")
    names = tasks or [name]

    def build(num_envs: int, policy: Any) -> VecEnv:
        found: VecEnv = cls(num_envs) if hasattr(cls, "chunk_step") else WorkerEnv(cls, num_envs, chunk=policy.chunk)
        if len(names) > (num_tasks := found.metadata.get("num_tasks", len(names))):
            found.close()
            raise ConfigError(f"--tasks names {len(names)}, but {name} has {num_tasks}: a name for each, in order.")
        if len(names) < num_tasks:
            text = "played: %d of the %d tasks of %s; --tasks with a name for each, in their order, plays all"
            log.warning(text, len(names), num_tasks, name)
        return found

    own: Any = completed(cls, OwnDefaults)
    episodes = min(OWN_EPISODES, own.num_trials * len(names)) if isinstance(own.num_trials, int) else OWN_EPISODES
    return SuitePlan(names, episodes, AT_ONCE, build, False, dict, fps=10.0)


def _words(name: str, sentences: Sequence[str]) -> dict[str, str]:
    """The sentence of an environment that has none: the policy's only one."""
    if len(sentences) > 1:
        raise ConfigError(
            f"The policy was cloned on {len(sentences)} tasks, and gymnasium has no words for {name}. Give them:"
            f" 'gym:{name}?sentence={sentences[0]}', or another of {', '.join(sentences)}."
        )
    return {"sentence": sentences[0]} if sentences else {}


def _simulated(
    tasks: list[str], trials: int, make: Any, render: str | None, *, is_named: bool = True, **settings: Any
) -> SuitePlan:
    """``is_named``: the simulator has words for its tasks; one without takes those that the policy knows."""
    given = {key: value for key, value in settings.items() if value is not None}

    def build(num_envs: int, policy: Any) -> VecEnv:
        words = {} if is_named else _words(tasks[0], policy.sentences)
        return WorkerEnv(partial(make, **words, **given), num_envs, render=render, chunk=policy.chunk)

    def conditions() -> Mapping[str, Any]:
        drawn = {"renderer": rendering.works(render)[0]} if render else {}
        return {**given, **drawn, "packages": _versions()}

    return SuitePlan(tasks, trials * len(tasks), AT_ONCE, build, True, conditions, 20.0, has_workers=True)


@buildable("suite", "b1k")
def _behavior(tasks: list[str], image_size: int | None = None, max_steps: int | None = None) -> SuitePlan:
    """Its places share one simulator, which takes a GPU: one episode at a time, unless more are asked for."""
    from cosmos_predict2.rl.envs.simulators.behavior import ACTION_DIM, CONTROL_HZ, BehaviorEnv
    from cosmos_predict2.rl.envs.simulators.omnigibson import TRIALS

    given = {key: value for key, value in dict(image_size=image_size, max_steps=max_steps).items() if value is not None}
    options: dict[str, Any] = dict(tasks=tasks or None, max_steps=max_steps, height=image_size, width=image_size)

    def build(num_envs: int, policy: Any) -> VecEnv:
        if policy.action_dim not in (None, ACTION_DIM):  # before the simulator starts
            raise ConfigError(f"The policy decides on {policy.action_dim} numbers per action, b1k takes {ACTION_DIM}.")
        return BehaviorEnv(num_envs, chunk=policy.chunk, **options)

    names = tasks or BehaviorEnv(**options).metadata["tasks"]
    episodes = TRIALS * len(names)
    return SuitePlan(names, episodes, 1, build, True, lambda: {**given, "packages": _versions()}, fps=float(CONTROL_HZ))


def _versions() -> dict[str, str]:
    found = importlib.metadata.distributions()  # a wheel of hf-libero calls itself hf_libero
    installed = {str(each.metadata["Name"]).lower().replace("_", "-"): each.version for each in found}
    return {name: installed[name] for name in _PACKAGES if name in installed}
