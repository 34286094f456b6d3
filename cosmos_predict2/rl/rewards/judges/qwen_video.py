# SPDX-License-Identifier: Apache-2.0
"""Common parts of judges that ask a Qwen-VL: place and precision, and clips in batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.verifiable import _video
from cosmos_predict2.text import pretrained
from cosmos_predict2.text.qwen_vl import Asked


def place_and_dtype(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Those that are named, else a GPU in bfloat16 where there is one, else the CPU in float32."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = pretrained.dtype_of(dtype or ("bfloat16" if place.type == "cuda" else "float32"))
    assert chosen is not None
    return place, chosen


def in_batches(
    clips: Clips,
    asked: Callable[[Tensor, float, str], Asked],
    judged: Callable[[Sequence[Asked]], Tensor],
    clips_at_once: int,
) -> Tensor:
    """[B, N]: what ``judged`` gives for each clip; those whose questions have one form are judged together.

    ``asked`` makes the question of a video [3, F, H, W], its frame rate and its prompt.
    """
    questions = [asked(video, clips.fps, prompt) for video, prompt in zip(_video(clips), clips.prompts, strict=True)]
    alike: dict[Any, list[int]] = {}
    for k, question in enumerate(questions):
        alike.setdefault(question.form(), []).append(k)
    found: dict[int, Tensor] = {}
    for group in alike.values():
        for start in range(0, len(group), clips_at_once):
            rows = group[start : start + clips_at_once]
            found |= zip(rows, judged([questions[k] for k in rows]), strict=True)
    return torch.stack([found[k] for k in range(len(questions))])
