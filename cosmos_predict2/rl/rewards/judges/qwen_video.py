# SPDX-License-Identifier: Apache-2.0
"""A video as the Qwen-VL models take it: frames chosen and resized, cut into patches, and their place in the text.

Written out here because the processors of transformers need torchvision.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PATCH, MERGE, FRAMES = 14, 2, 2  # pixels of a patch, patches of a token along a side, frames of a patch
SIDE = PATCH * MERGE
MEAN = (0.48145466, 0.4578275, 0.40821073)  # of the pictures that CLIP was trained with
STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Patches:
    """Patches [N, 3 * 2 * 14 * 14] of one video, its grid (time, height, width), and seconds between grid times."""

    values: Tensor
    grid: tuple[int, int, int]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return math.prod(self.grid) // MERGE**2


def patches_of(video_C_F_H_W: Tensor, fps: float, *, max_frames: int, max_tokens: int) -> Patches:
    """The patches of a uint8 video: every k-th frame, an even number of them, sides multiples of 28 pixels."""
    interval = max(1, -(-video_C_F_H_W.shape[1] // max_frames))
    frames = video_C_F_H_W[:, ::interval].permute(1, 0, 2, 3).float()
    if len(frames) == 1:
        frames = frames.repeat(FRAMES, 1, 1, 1)
    frames = frames[: len(frames) // FRAMES * FRAMES]
    most = max_tokens * SIDE**2 * FRAMES // len(frames)
    height, width = size_within(frames.shape[2], frames.shape[3], 16 * SIDE**2 * FRAMES, most)
    frames = F.interpolate(frames, (height, width), mode="bicubic", antialias=True).round().clamp(0, 255) / 255
    frames = (frames - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    grid = (len(frames) // FRAMES, height // PATCH, width // PATCH)
    t, h, w = grid
    cut = frames.reshape(t, FRAMES, 3, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH)
    values = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, -1)
    return Patches(values, grid, FRAMES * interval / fps)


def size_within(height: int, width: int, least: int, most: int) -> tuple[int, int]:
    """Multiples of 28 nearest to the sides, with at least ``least`` and at most ``most`` pixels, if both can be."""
    sides = [max(SIDE, round(side / SIDE) * SIDE) for side in (height, width)]
    if math.prod(sides) > most:
        scale = math.sqrt(height * width / most)
        sides = [max(SIDE, math.floor(side / scale / SIDE) * SIDE) for side in (height, width)]
    elif math.prod(sides) < least:
        scale = math.sqrt(least / (height * width))
        sides = [math.ceil(side * scale / SIDE) * SIDE for side in (height, width)]
    return sides[0], sides[1]


def conversation(system: str, question: str) -> str:
    """What the models are asked: the video, then the question; their answer follows."""
    turns = [("system", system), ("user", f"<|vision_start|><|video_pad|><|vision_end|>{question}")]
    turns_text = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns if text)
    return f"{turns_text}<|im_start|>assistant\n"
