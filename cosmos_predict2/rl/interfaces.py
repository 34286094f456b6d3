# SPDX-License-Identifier: Apache-2.0
"""The contracts of reinforcement learning."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Clips:
    """Generated clips. Rewards with ``needs_pixels`` get ``video``, others may find it None."""

    latents_B_C_T_H_W: Tensor | None
    video_B_C_F_H_W: Tensor | None  # uint8
    prompts: list[str]
    fps: float


@dataclass(frozen=True)
class Ticket:
    request_id: str


@dataclass(frozen=True)
class Scores:
    """One number for each clip. Of an invalid one the value is 0 and never used."""

    value_B: Tensor
    is_valid_B: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)


class Reward(Protocol):
    """Scores clips, now or later. ``context`` holds what the clips were conditioned on, and the true clips if known.

    A reward may set ``needs_pixels = True`` to have the clips decoded for it.
    """

    def submit(self, clips: Clips, context: Mapping[str, Any], request_id: str) -> Ticket: ...

    def fetch(self, ticket: Ticket, deadline: float) -> Scores:
        """The scores, at most ``deadline`` seconds from now; what is not there by then is invalid."""
