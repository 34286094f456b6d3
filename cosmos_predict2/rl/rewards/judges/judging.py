# SPDX-License-Identifier: Apache-2.0
"""What judges have in common: where they compute, how they are loaded, and that they see one clip at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.verifiable import _video
from cosmos_predict2.text import pretrained


def place_and_dtype(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Those that are named, else a GPU in bfloat16 where there is one, else the CPU in float32."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = pretrained.dtype_of(dtype or ("bfloat16" if place.type == "cuda" else "float32"))
    assert chosen is not None
    return place, chosen


def of_each(clips: Clips, judged: Callable[[Tensor, float, str], Tensor]) -> Tensor:
    """[B, N]: what ``judged`` gives for the video [3, F, H, W], the frame rate and the prompt of each clip."""
    rows = zip(_video(clips), clips.prompts, strict=True)
    return torch.stack([judged(video, clips.fps, prompt) for video, prompt in rows])
