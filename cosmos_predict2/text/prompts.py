# SPDX-License-Identifier: Apache-2.0
"""Prompts as data: the default negative prompt, and the batch of prompts that every encoder takes."""

from collections.abc import Sequence

from imaginaire.errors import DataError

# Part of the released models' behaviour: a functional constant, so every character counts.
DEFAULT_NEGATIVE_PROMPT = (
    "The video captures a series of frames showing ugly scenes, static with no motion, motion blur, over-saturation, "
    "shaky footage, low resolution, grainy texture, pixelated images, poorly lit areas, underexposed and overexposed "
    "scenes, poor color balance, washed out colors, choppy sequences, jerky movements, low frame rate, artifacting, "
    "color banding, unnatural transitions, outdated special effects, fake elements, unconvincing visuals, poorly "
    "edited content, jump cuts, visual noise, and flickering. Overall, the video is of poor quality."
)


def prompt_list(prompts: str | Sequence[str]) -> list[str]:
    """The prompts of a batch; a string is a batch of one."""
    batch = [prompts] if isinstance(prompts, str) else list(prompts)
    if not batch:
        raise DataError("There are no prompts to encode: give one or more strings (an empty string is a prompt).")
    if wrong := [prompt for prompt in batch if not isinstance(prompt, str)]:
        raise DataError(f"A prompt is a string; found {type(wrong[0]).__name__} ({wrong[0]!r}).")
    return batch
