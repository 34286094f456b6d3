# SPDX-License-Identifier: Apache-2.0
"""A function as a reward: it is asked in this process, at once."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips, FrameReward, RewardDefaults, Scores, Ticket
from imaginaire.errors import DataError

log = logging.getLogger(__name__)

# (clips, context) -> one number for each clip, or a mapping of named parts of which "value" is the score
ScoreFunction = Callable[[Clips, Mapping[str, Any]], Tensor | Mapping[str, Tensor]]


class LocalReward(RewardDefaults):
    """``function`` gives a number for each clip. What is not finite is invalid, and so is all where it raises."""

    def __init__(self, function: ScoreFunction) -> None:
        self.function = function
        self.needs_pixels = needs_pixels(function)
        self._scores: dict[str, list[Scores]] = {}  # of clips that are alike one after the other

    def submit(self, clips: Clips, context: Mapping[str, Any], request_id: str) -> Ticket:
        self._scores.setdefault(request_id, []).append(self._score(clips, context))
        return Ticket(request_id)

    def fetch(self, ticket: Ticket, deadline: float) -> Scores:
        waiting = self._scores[ticket.request_id]
        found = waiting.pop(0)
        if not waiting:
            del self._scores[ticket.request_id]
        return found

    def _score(self, clips: Clips, context: Mapping[str, Any]) -> Scores:
        size = len(clips.prompts)
        try:
            found = self.function(clips, context)
        except Exception:  # a border: whatever a user's function raises makes these scores invalid
            hint = "" if self.needs_pixels else " (it gets no video, unless it has needs_pixels = True)"
            log.exception("the reward %s failed; its %d scores are invalid%s", _name(self.function), size, hint)
            return Scores(torch.zeros(size), torch.zeros(size, dtype=torch.bool))
        parts = dict(found) if isinstance(found, Mapping) else {"value": found}
        value = torch.as_tensor(parts.pop("value")).detach().float().cpu()
        if value.shape != (size,):
            raise DataError(
                f"The reward {_name(self.function)} gave {tuple(value.shape)} numbers for {size} clips: one for each."
            )
        is_valid = value.isfinite()
        of_parts = {name: torch.as_tensor(part).detach().float().cpu() for name, part in parts.items()}
        return Scores(torch.where(is_valid, value, 0.0), is_valid, of_parts)


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


def needs_pixels(function: ScoreFunction) -> bool:
    """True where a function, or an object that is called, has its clips decoded."""
    return bool(getattr(function, "needs_pixels", False))


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
