# SPDX-License-Identifier: Apache-2.0
"""Rewards by name, by import path and as lazy calls: what a service or a config can ask for."""

import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from cosmos_predict2.rl.rewards.local import ScoreFunction
from imaginaire.config import lazy_config
from imaginaire.config.names import target_of as lazy_target_of
from imaginaire.errors import ConfigError, near

_HERE = "cosmos_predict2.rl.rewards"

# name -> "module:function" or "module:Class"; a module of your own may add to it
REWARDS: dict[str, str] = {
    "agreement": f"{_HERE}.verifiable:Agreement",
    "latent_agreement": f"{_HERE}.verifiable:LatentAgreement",
    "static_background": f"{_HERE}.verifiable:StaticBackground",
    "smoothness": f"{_HERE}.verifiable:Smoothness",
    "motion": f"{_HERE}.verifiable:Motion",
    "cosmos_reason1": f"{_HERE}.judges.reason1_reward:Reason1Reward",
    "dance_grpo": f"{_HERE}.judges.video_align:VideoAlign",
}


def path_of(name: str) -> tuple[str, str]:
    """The name that a reward is served by, and its import path: of NAME, NAME=module:Class or module:Class."""
    served, equals, path = name.partition("=")
    if not equals and ":" not in name:
        if name not in REWARDS:
            raise ConfigError(f"No reward is called '{name}'.{near(name, REWARDS)} One of your own: NAME=module:Class.")
        return name, REWARDS[name]
    path = path if equals else name
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute and served):
        raise ConfigError(f"The reward '{name}' is no import path: expected NAME=module:Class.")
    return (served if equals else attribute), path


def imported(path: str, what: str) -> Any:
    """What is at module:attribute, also below the present folder; ``what`` names it in errors."""
    module, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"The {what} '{path}' cannot be imported: {error}.") from error


def target_of(make: Any) -> Any:
    """The class or function of a config's ``make``: a name, module:function, a lazy call, or what one has made."""
    if isinstance(make, str):
        return imported(path_of(make)[1], "reward")
    return lazy_target_of(make) if isinstance(make, Mapping) else type(make)


def reward_of(make: Any) -> Any:
    """The reward of a config's ``make``: an object with submit and fetch, or a function of (clips, context)."""
    if isinstance(make, str):
        return build(path_of(make)[1])
    if (
        inspect.isfunction(target := target_of(make))
        and next(iter(inspect.signature(target).parameters), "") == "clips"
    ):
        path = f"{target.__module__}:{target.__qualname__}"
        raise ConfigError(f"A lazy call of {path} would call it without clips: name the function, make={path}.")
    return lazy_config.instantiate(make)


def build(path: str, arguments: Mapping[str, Any] | None = None, **optional: Any) -> ScoreFunction:
    """The function at an import path, or an object of the class there.

    The class gets ``arguments``, and of the ``optional`` ones those that are set and that its constructor takes.
    """
    found = imported(path, "reward")
    if not inspect.isclass(found):
        if arguments or not callable(found):
            raise ConfigError(f"'{path}' takes no arguments: a reward with arguments is a class with __call__.")
        return found  # type: ignore[no-any-return]
    taken = inspect.signature(found).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
    known = {name: value for name, value in optional.items() if value not in (None, "") and name in taken}
    given = dict(arguments or {})
    if unknown := [name for name in given if name not in taken and not takes_all]:
        raise ConfigError(f"The reward '{path}' takes no argument '{unknown[0]}'.{near(unknown[0], taken)}")
    try:
        made = found(**(known | given))
    except TypeError as error:  # it takes what was not given
        raise ConfigError(f"The reward '{path}' could not be built: {error}.") from error
    if not callable(made):
        raise ConfigError(f"'{path}' is no reward: it must be callable with (clips, context).")
    return made  # type: ignore[no-any-return]
