# SPDX-License-Identifier: Apache-2.0
"""Judges of imagined pictures: the toy world's, which needs no weights, and several rewards as one.

rewards = dict(near=L(ToyDetectorReward)(), still=L(Smoothness)())
model.config.env.reward = L(WeightedReward)(rewards=rewards, weights=dict(still=0.2))
"""

from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips, FrameRewardDefaults, Judgement, completed
from cosmos_predict2.rl.rewards.local import reward_of
from cosmos_predict2.toy_world.physics import REWARD_RANGE, find_setting
from cosmos_predict2.toy_world.rendering import detect
from imaginaire.errors import ConfigError, DataError


class ToyDetectorReward(FrameRewardDefaults):
    """The toy world's dense reward, 1 [d < success distance] - min(d, 12) / 12, where d is how far the detector sees
    the puck from ``goal`` [E, 2] of the context. A puck that is not seen counts as farthest."""

    def __init__(self, setting: str = "default") -> None:
        try:
            self.setting, _ = find_setting(setting, None)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.setting.cover is not None:
            cure = "give a reward of recordings (--reward, scripts.train_reward_model)"
            raise ConfigError(f"ToyDetectorReward sees nothing below the cover of the setting '{setting}': {cure}.")

    def judge(self, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Judgement:
        if "goal" not in context:
            raise DataError(f"ToyDetectorReward needs 'goal' of each start, of ToyStarts; there is {[*context]}.")
        goal = numpy.asarray(context["goal"], dtype=numpy.float64)[:, None]
        puck = detect(numpy.ascontiguousarray(frames_E_F_H_W_C.cpu().numpy()), ("puck",)).position["puck"]
        distance = numpy.nan_to_num(numpy.hypot(*numpy.moveaxis(puck - goal, -1, 0)), nan=REWARD_RANGE)
        is_done = distance < self.setting.success_distance
        value = is_done - numpy.minimum(distance, REWARD_RANGE) / REWARD_RANGE
        return Judgement(torch.from_numpy(value).float(), torch.from_numpy(is_done))


class WeightedReward(FrameRewardDefaults):
    """The weighted sum of values; the first `FrameReward` among ``rewards`` decides whether the task is done.

    A reward of clips, a function of (clips, context), takes the pictures of a chunk for a clip of ``fps`` and has the
    same value for each of them. ``weights`` are 1 where none is given.
    """

    def __init__(
        self, rewards: Mapping[str, Any], weights: Mapping[str, float] | None = None, fps: float = 10.0
    ) -> None:
        self.rewards = {name: reward_of(make) for name, make in rewards.items()}
        self.judges = {
            name: completed(one, FrameRewardDefaults) for name, one in self.rewards.items() if hasattr(one, "judge")
        }
        self.weights, self.fps = dict(weights or {}), fps
        if unknown := self.weights.keys() - self.rewards.keys():
            raise ConfigError(f"weights of {sorted(unknown)}, but the rewards are {sorted(self.rewards)}.")
        if unable := [n for n, one in self.rewards.items() if n not in self.judges and not callable(one)]:
            raise ConfigError(
                f"The reward '{unable[0]}' neither judges pictures nor is a function of (clips, context), and others"
                " cannot be asked while an episode is imagined."
            )
        if not self.judges:
            raise ConfigError(
                f"None of the rewards {sorted(self.rewards)} judges whether a task is done: one at least must have"
                " judge (FrameReward), such as ToyDetectorReward or ResnetReward."
            )

    def judge(self, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Judgement:
        judged = {name: reward.judge(frames_E_F_H_W_C, context) for name, reward in self.judges.items()}
        value_E_F = torch.zeros(frames_E_F_H_W_C.shape[:2])
        for name, reward in self.rewards.items():
            if name in judged:
                own_E_F = judged[name].value_E_F
            else:
                own_E_F = self._of_clips(name, reward, frames_E_F_H_W_C, context)[:, None]
            value_E_F = value_E_F + self.weights.get(name, 1.0) * own_E_F.to(value_E_F)
        return Judgement(value_E_F, next(iter(judged.values())).success_E_F.cpu())

    def to(self, device: torch.device | str) -> "WeightedReward":
        for reward in self.judges.values():
            reward.to(device)
        return self

    def _of_clips(self, name: str, reward: Any, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Tensor:
        size = len(frames_E_F_H_W_C)
        prompts = list(context.get("task_description", [""] * size))
        context = {"num_conditional_frames": torch.zeros(size, dtype=torch.long), **context}  # all were generated
        found = reward(Clips(None, frames_E_F_H_W_C.permute(0, 4, 1, 2, 3).cpu(), prompts, self.fps), context)
        value_E = torch.as_tensor(found["value"] if isinstance(found, Mapping) else found).detach().float()
        if value_E.shape != (size,) or not value_E.isfinite().all():
            raise DataError(f"The reward '{name}' must give a finite number for each of {size} chunks.")
        return value_E
