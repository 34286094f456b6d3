# SPDX-License-Identifier: Apache-2.0
"""Observations of policies in tests, and generators of their draws."""

from typing import Any

import torch

SENTENCES = ("push the puck", "touch it", "push the puck to the ring")


def observation(num: int = 3, *, views: int = 1, size: tuple[int, int] = (48, 64), state: int = 3) -> Any:
    """Noise from so many wrists, too; sentences of several lengths."""
    draws = torch.Generator().manual_seed(3)
    pictures = torch.randint(256, (num, 1 + views, *size, 3), generator=draws, dtype=torch.uint8)
    return dict(
        full_image=pictures[:, 0],
        wrist_image=pictures[:, 1:],
        state=torch.randn(num, state, generator=draws),
        task_description=[SENTENCES[i % len(SENTENCES)] for i in range(num)],
    )


def generators(num: int = 3, first: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(first + i) for i in range(num)]
