# SPDX-License-Identifier: Apache-2.0
"""The form of a size of model, for the tables of every family."""

from dataclasses import dataclass
from typing import Any

# Where the toy world's dynamics show: times around t = 8 / 9, noise levels around 8.
TINY_SHIFT = 8.0


@dataclass(frozen=True)
class Size:
    """One size of model and its variants; the first resolution, rate and aspect ratio are its defaults."""

    net: dict[str, Any]
    resolutions: tuple[str, ...]
    rates: tuple[int, ...]
    aspect_ratio: str
    sac_mode: str = "none"  # of recomputation in training
