# SPDX-License-Identifier: Apache-2.0
"""Rewards by name, by import path and as lazy calls: what a service or a config can ask for."""

import inspect
from collections.abc import Mapping
from typing import Any

from cosmos_predict2.rl.rewards.local import ScoreFunction
from imaginaire import buildable
from imaginaire.buildable import resolve
from imaginaire.config import lazy_config
from imaginaire.errors import ConfigError

_HERE = "cosmos_predict2.rl.rewards"

REWARDS = buildable.shipped(
    "reward",
    {
        "agreement": f"{_HERE}.verifiable:Agreement",
        "latent_agreement": f"{_HERE}.verifiable:LatentAgreement",
        "static_background": f"{_HERE}.verifiable:StaticBackground",
        "smoothness": f"{_HERE}.verifiable:Smoothness",
        "motion": f"{_HERE}.verifiable:Motion",
        "cosmos_reason1": f"{_HERE}.judges.reason1_reward:Reason1Reward",
        "dance_grpo": f"{_HERE}.judges.video_align:VideoAlign",
    },
)


def path_of(name: str) -> tuple[str, str]:
    """The name that a reward is served by, and its import path: of NAME, NAME=module:Class or module:Class."""
    served, equals, path = name.partition("=")
    if not equals:
        path = buildable.path_of(buildable.find(name, "reward"))
        return name if name in REWARDS else path.rpartition(":")[2], path
    module, _, attribute = path.partition(":")
    if not (module and attribute and served):
        raise ConfigError(f"The reward '{name}' is no import path: expected NAME=module:Class.")
    return served, path


def reward_of(make: Any) -> Any:
    """The reward of a config's ``make``: an object with submit and fetch, or a function of (clips, context)."""
    if isinstance(make, str):
        return build(make)
    if not isinstance(make, Mapping):
        return make
    target = resolve(make, "reward")
    if inspect.isfunction(target) and next(iter(inspect.signature(target).parameters), "") == "clips":
        path = buildable.path_of(target)
        raise ConfigError(f"A lazy call of {path} would call it without clips: name the function, make={path}.")
    return lazy_config.instantiate(make)


def build(path: str, arguments: Mapping[str, Any] | None = None, **optional: Any) -> ScoreFunction:
    """The function of a name or an import path, or an object of the class there.

    The class gets ``arguments``, and of the ``optional`` ones those that are set and that its constructor takes.
    """
    found = resolve(path, "reward")
    if not inspect.isclass(found):
        if arguments or not callable(found):
            raise ConfigError(f"'{path}' takes no arguments: a reward with arguments is a class with __call__.")
        return found  # type: ignore[no-any-return]
    known = {name: value for name, value in optional.items() if value not in (None, "")}
    try:
        made: Any = buildable.made(found, arguments or {}, f"The reward '{path}': ", **known)
    except TypeError as error:  # it takes what was not given
        raise ConfigError(f"The reward '{path}' could not be built: {error}.") from error
    if not callable(made):
        raise ConfigError(f"'{path}' is no reward: it must be callable with (clips, context).")
    return made  # type: ignore[no-any-return]
