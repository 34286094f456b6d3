# SPDX-License-Identifier: Apache-2.0
"""The prompt refiner's settings. No refiner is built in yet; any ``interfaces.PromptRefiner`` can be plugged in."""

import attrs

from cosmos_predict2.interfaces import PromptRefiner
from imaginaire.config.schema import Section
from imaginaire.errors import ConfigError


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
