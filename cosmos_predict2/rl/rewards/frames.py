# SPDX-License-Identifier: Apache-2.0
"""Judges of imagined pictures that need no weights."""

from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import FrameRewardDefaults, Judgement
from cosmos_predict2.toy_world.detector import detect
from cosmos_predict2.toy_world.scene import find_setting
from cosmos_predict2.toy_world.tasks import REWARD_RANGE
from imaginaire.errors import ConfigError, DataError


class ToyDetectorReward(FrameRewardDefaults):
    """The toy world's dense reward, 1 [d < success distance] - min(d, 12) / 12, where d is how far the detector sees
    the puck from ``goal`` [E, 2] of the context. A puck that is not seen counts as farthest."""

    def __init__(self, setting: str = "default") -> None:
        try:
            self.setting, _ = find_setting(setting, None)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    def judge(self, frames_E_F_H_W_C: Tensor, context: Mapping[str, Any]) -> Judgement:
        if "goal" not in context:
            raise DataError(f"ToyDetectorReward needs 'goal' of each start, of ToyStarts; there is {[*context]}.")
        goal = numpy.asarray(context["goal"], dtype=numpy.float64)[:, None]
        puck = detect(numpy.ascontiguousarray(frames_E_F_H_W_C.cpu().numpy()), ("puck",)).position["puck"]
        distance = numpy.nan_to_num(numpy.hypot(*numpy.moveaxis(puck - goal, -1, 0)), nan=REWARD_RANGE)
        is_done = distance < self.setting.success_distance
        value = is_done - numpy.minimum(distance, REWARD_RANGE) / REWARD_RANGE
        return Judgement(torch.from_numpy(value).float(), torch.from_numpy(is_done))
