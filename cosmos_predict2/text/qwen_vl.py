# SPDX-License-Identifier: Apache-2.0
"""Input of a Qwen-VL: a video as it takes it, and the question about it.

Written out here because the processors of transformers need torchvision.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PATCH, MERGE, FRAMES = 14, 2, 2  # pixels of a patch, patches of a token along a side, frames of a patch
SIDE = PATCH * MERGE
MEAN = (0.48145466, 0.4578275, 0.40821073)  # of the pictures that CLIP was trained with
STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Patches:
    """Patches [N, 3 * 2 * 14 * 14] of one video, and its grid (time, height, width)."""

    values: Tensor
    grid: tuple[int, int, int]

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid) // MERGE**2


def patches_of(
    frames_F_C_H_W: Tensor,
    least: int,
    most: int,
    patch: int = PATCH,
    mean: tuple[float, ...] = MEAN,
    std: tuple[float, ...] = STD,
) -> Patches:
    """The patches of uint8 frames with ``least`` to ``most`` pixels each and sides of multiples of two patches.

    A last odd frame is left out; a single one is there twice.
    """
    frames = frames_F_C_H_W.float()
    if len(frames) == 1:
        frames = frames.repeat(FRAMES, 1, 1, 1)
    frames = frames[: len(frames) // FRAMES * FRAMES]
    height, width = size_within(frames.shape[2], frames.shape[3], least, most, patch * MERGE)
    frames = F.interpolate(frames, (height, width), mode="bicubic", antialias=True).round().clamp(0, 255) / 255
    frames = (frames - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    t, h, w = len(frames) // FRAMES, height // patch, width // patch
    cut = frames.reshape(t, FRAMES, 3, h // MERGE, MERGE, patch, w // MERGE, MERGE, patch)
    return Patches(cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1), (t, h, w))


def size_within(height: int, width: int, least: int, most: int, step: int = SIDE) -> tuple[int, int]:
    """Multiples of ``step`` nearest to the sides, with at least ``least`` and at most ``most`` pixels, if both can
    be."""
    sides = [max(step, round(side / step) * step) for side in (height, width)]
    if math.prod(sides) > most:
        scale = math.sqrt(height * width / most)
        sides = [max(step, math.floor(side / scale / step) * step) for side in (height, width)]
    elif math.prod(sides) < least:
        scale = math.sqrt(least / (height * width))
        sides = [math.ceil(side * scale / step) * step for side in (height, width)]
    return sides[0], sides[1]


def conversation(system: str, question: str) -> str:
    """The text of a request: the video, then the question; the model's answer follows."""
    turns = [("system", system), ("user", f"<|vision_start|><|video_pad|><|vision_end|>{question}")]
    turns_text = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns if text)
    return f"{turns_text}<|im_start|>assistant\n"


@dataclass(frozen=True)
class VideoQuestion:
    """A question about a video: the ids of its text, with a place for each token of the video, and the patches."""

    ids: list[int]
    patches: Patches
    seconds: float = 0.0  # between its grid times

    def form(self) -> tuple[Any, ...]:
        """Sizes that agree among questions that pass a network together: none of them is padded."""
        return len(self.ids), self.patches.grid, self.seconds


def question_of(tokenizer: Any, text: str, patches: Patches, video_token: int, seconds: float = 0.0) -> VideoQuestion:
    """The question of a text whose places of videos share the patches evenly."""
    words = tokenizer.encode(text, add_special_tokens=False)
    each = patches.num_tokens // words.count(video_token)
    ids = [word for word in words for _ in range(each if word == video_token else 1)]
    return VideoQuestion(ids, patches, seconds)


def model_input(batch: Sequence[VideoQuestion], video_token: int, model: Any) -> dict[str, Tensor]:
    """Arguments of the network for questions of one form."""
    ids_B_S = torch.tensor([one.ids for one in batch], device=model.device)
    return dict(
        input_ids=ids_B_S,
        attention_mask=torch.ones_like(ids_B_S),
        mm_token_type_ids=(ids_B_S == video_token).int() * 2,
        pixel_values_videos=torch.cat([one.patches.values for one in batch]).to(model.device, model.dtype),
        video_grid_thw=torch.tensor([one.patches.grid for one in batch], device=model.device),
    )


def plain(text: str) -> str:
    """A user's text without special tokens: such as the place of a video stays text."""
    return text.replace("<|", "< |")
