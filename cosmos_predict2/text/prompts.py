# SPDX-License-Identifier: Apache-2.0
"""Prompts before an encoder: the default negative one, the batch that every encoder takes, and the refiner's settings.

No refiner is built in yet; any ``interfaces.PromptRefiner`` can be plugged in.
"""

from collections.abc import Sequence

import attrs

from cosmos_predict2.interfaces import PromptRefiner
from imaginaire.config.schema import Section
from imaginaire.errors import ConfigError, DataError

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


@attrs.define(kw_only=True, slots=False)
class PromptRefinerConfig(Section):
    """Rewriting of prompts before generation: on or off, and the folder of its weights."""

    checkpoint_dir: str = "checkpoints"
    offload_model_to_cpu: bool = True
    enabled: bool = True


def create_prompt_refiner(config: PromptRefinerConfig, *, is_explicit: bool = False) -> PromptRefiner | None:
    """None: no refiner is built in yet. An error where one was asked for by name rather than by default."""
    if config.enabled and is_explicit:
        raise ConfigError(
            "The prompt refiner (Cosmos-Reason1-7B) is not built in yet. Write the prompt in full, or leave this"
            " option out (--disable_prompt_refiner)."
        )
    return None
