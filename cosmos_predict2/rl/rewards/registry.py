# SPDX-License-Identifier: Apache-2.0
"""Rewards by name, by import path and as lazy calls: what a service or a config can ask for."""

import inspect
from collections.abc import Mapping
from typing import Any

from cosmos_predict2.rl.interfaces import Reward, RewardDefaults, completed
from cosmos_predict2.rl.rewards.local import LocalReward, PicturesOfClips, ScoreFunction
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
    """What a config's ``make`` is: a `Reward`, a `FrameReward`, or a function of (clips, context)."""
    if isinstance(make, str):
        return _built(make, {})
    if not isinstance(make, Mapping):
        return make
    target = resolve(make, "reward")
    if inspect.isfunction(target) and next(iter(inspect.signature(target).parameters), "") == "clips":
        path = buildable.path_of(target)
        raise ConfigError(f"A lazy call of {path} would call it without clips: name the function, make={path}.")
    return lazy_config.instantiate(make)


def scored_by(make: Any, key: str) -> Reward:
    """The same as a `Reward` of clips: functions and judges of pictures are asked at once."""
    made = reward_of(make)
    if all(callable(getattr(made, method, None)) for method in ("submit", "fetch")):
        return completed(made, RewardDefaults)  # type: ignore[no-any-return]
    if (function := _function_of(made)) is None:
        raise ConfigError(f"{key} made {made!r}: it has no submit and fetch, no judge, and is no function.")
    return LocalReward(function)


def build(path: str, arguments: Mapping[str, Any] | None = None, **optional: Any) -> ScoreFunction:
    """The function of a name or an import path, or an object of the class there.

    The class gets ``arguments``, and of the ``optional`` ones those that are set and that its constructor takes.
    """
    known = {name: value for name, value in optional.items() if value not in (None, "")}
    if (function := _function_of(_built(path, arguments or {}, **known))) is None:
        raise ConfigError(f"'{path}' is no reward: it must be callable with (clips, context), or judge pictures.")
    return function


def _built(path: str, arguments: Mapping[str, Any], **optional: Any) -> Any:
    found = resolve(path, "reward")
    if not inspect.isclass(found):
        if arguments or not callable(found):
            raise ConfigError(f"'{path}' takes no arguments: a reward with arguments is a class with __call__.")
        return found
    try:
        return buildable.made(found, arguments, f"The reward '{path}': ", **optional)
    except TypeError as error:  # it takes what was not given
        raise ConfigError(f"The reward '{path}' could not be built: {error}.") from error


def _function_of(made: Any) -> ScoreFunction | None:
    if hasattr(made, "judge"):
        return PicturesOfClips(made)
    return made if callable(made) else None
