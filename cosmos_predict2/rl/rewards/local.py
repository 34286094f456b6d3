# SPDX-License-Identifier: Apache-2.0
"""Rewards in this process: what a name, an import path or a lazy call makes, and functions that are asked at once."""

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips, FrameReward, Reward, RewardDefaults, Scores, SeesPixels, Ticket
from imaginaire import buildable
from imaginaire.config import lazy_config
from imaginaire.errors import ConfigError, DataError, raised_as

log = logging.getLogger(__name__)

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
        "topreward": f"{_HERE}.judges.robot_progress:TOPReward",
        "robometer": f"{_HERE}.judges.robot_progress:Robometer",
    },
)


class ScoreFunction(Protocol):
    """A function that is asked for scores at once. One that `SeesPixels` has the clips decoded."""

    def __call__(self, clips: Clips, context: Mapping[str, Any], /) -> Tensor | Mapping[str, Any]:
        """One number for each clip, or a mapping of named parts of which "value" is the score.

        A part in words is shown by a service alone.
        """


@dataclass(frozen=True)
class _Scored(Ticket):
    scores: Scores


class LocalReward(RewardDefaults):
    """``function`` gives a number for each clip. What is not finite is invalid, and so is all where it raises."""

    def __init__(self, function: ScoreFunction) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.needs_pixels = isinstance(function, SeesPixels) and function.needs_pixels

    def submit(self, clips: Clips, context: Mapping[str, Any], request_id: str) -> Ticket:
        return _Scored(request_id, self._score(clips, context))

    def fetch(self, ticket: Ticket, deadline: float) -> Scores:
        if not isinstance(ticket, _Scored):
            raise ConfigError("fetch takes the ticket that submit gave, which a reward around this one hands on.")
        return ticket.scores

    def _score(self, clips: Clips, context: Mapping[str, Any]) -> Scores:
        size = len(clips.prompts)
        try:
            found = self.function(clips, context)
        except Exception:  # a border: whatever a user's function raises makes these scores invalid
            hint = "" if self.needs_pixels else " (it gets no video, unless it has needs_pixels = True)"
            log.exception("the reward %s failed; its %d scores are invalid%s", self.name, size, hint)
            return Scores(torch.zeros(size), torch.zeros(size, dtype=torch.bool))
        parts = dict(found) if isinstance(found, Mapping) else {"value": found}
        parts = {
            name: torch.as_tensor(part).detach().float().cpu()
            for name, part in parts.items()
            if not (isinstance(part, list) and any(isinstance(one, str) for one in part))
        }
        value = parts.pop("value")
        if value.shape != (size,):
            raise DataError(f"The reward {self.name} gave {tuple(value.shape)} numbers for {size} clips: one for each.")
        is_valid = value.isfinite()
        return Scores(torch.where(is_valid, value, 0.0), is_valid, parts)


class PicturesOfClips:
    """A `FrameReward` as a function of clips: the value of the last picture, and whether it shows the task done."""

    needs_pixels = True

    def __init__(self, reward: FrameReward) -> None:
        self.reward = reward

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Tensor]:
        assert clips.video_B_C_F_H_W is not None
        pictures = clips.video_B_C_F_H_W.permute(0, 2, 3, 4, 1)
        judged = self.reward.judge(pictures, {"task_description": clips.prompts, **context})
        return {"value": judged.value_E_F[:, -1], "success": judged.success_E_F[:, -1].float()}


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
    """The thing that a config's ``make`` names: a `Reward`, a `FrameReward`, or a function of (clips, context)."""
    if isinstance(make, str):
        return _built(make, {})
    if not isinstance(make, Mapping):
        return make
    target = buildable.resolve(make, "reward")
    if inspect.isfunction(target) and next(iter(inspect.signature(target).parameters), "") == "clips":
        path = buildable.path_of(target)
        raise ConfigError(f"A lazy call of {path} would call it without clips: name the function, make={path}.")
    return lazy_config.instantiate(make)


def scored_by(make: Any, key: str) -> Reward:
    """The same as a `Reward` of clips: functions and judges of pictures are asked at once."""
    made = reward_of(make)
    if all(callable(getattr(made, method, None)) for method in ("submit", "fetch")):
        return buildable.completed(made, RewardDefaults)  # type: ignore[no-any-return]
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
    found = buildable.resolve(path, "reward")
    if not inspect.isclass(found):
        if arguments or not callable(found):
            raise ConfigError(f"'{path}' takes no arguments: a reward with arguments is a class with __call__.")
        return found
    with raised_as(ConfigError, f"The reward '{path}' could not be built", TypeError):  # it takes what was not given
        return buildable.made(found, arguments, f"The reward '{path}': ", **optional)


def _function_of(made: Any) -> ScoreFunction | None:
    if hasattr(made, "judge"):
        return PicturesOfClips(made)
    return made if callable(made) else None
