# SPDX-License-Identifier: Apache-2.0
"""Guardrails in a row: the first that objects decides, and one that fails counts as an objection."""

import logging
from collections.abc import Sequence
from typing import Any

import attrs

from cosmos_predict2.guardrail.blocklist import Blocklist
from cosmos_predict2.interfaces import Guardrail, PromptRefiner, Verdict
from cosmos_predict2.text.prompts import PromptRefinerConfig
from imaginaire.config.schema import Section
from imaginaire.errors import ConfigError, UserError

log = logging.getLogger(__name__)

BLOCKLIST = "blocklist"
LICENCE_NOTICE = (
    "the licence of the released weights asks for a substantially similar guardrail where this one is switched off"
)
# What the released models come with and this version does not have yet.
NOT_BUILT_IN = "Llama-Guard-3, Qwen3Guard, video filter, face blur"


class BlockedError(UserError):
    """A guardrail refused the prompt; the message names the rule."""


@attrs.define(kw_only=True, slots=False)
class GuardrailConfig(Section):
    """Settings of the check of prompts before a generation: on or off, its parts, and the place of their files."""

    checkpoint_dir: str = "checkpoints"
    offload_model_to_cpu: bool = True
    enabled: bool = True
    parts: list[str] = attrs.field(factory=lambda: [BLOCKLIST])


class GuardrailRunner:
    """Several guardrails as one."""

    def __init__(self, guardrails: Sequence[Guardrail]) -> None:
        self.guardrails = tuple(guardrails)

    def run_safety_check(self, prompt: str) -> Verdict:
        """Safe where no guardrail objects; else the first objection, "name: reason"."""
        if not self.guardrails:
            log.warning("no guardrail is set up: every prompt counts as safe")
        for guardrail in self.guardrails:
            try:
                verdict = guardrail.check_prompt(prompt)
            except Exception as error:  # a guardrail is foreign code, and one that fails has cleared nothing
                log.exception("guardrail %s failed", guardrail.name)
                return Verdict(False, f"{guardrail.name}: the check failed ({type(error).__name__}: {error})")
            if not verdict.is_safe:
                return Verdict(False, f"{guardrail.name}: {verdict.message}")
        return Verdict(True)


def create_text_guardrail_runner(
    checkpoint_dir: str | None = None, offload_model_to_cpu: bool = False, parts: Sequence[str] = (BLOCKLIST,)
) -> GuardrailRunner:
    """The guardrails of prompts. ``offload_model_to_cpu`` has nothing to move yet: a blocklist has no weights."""
    return GuardrailRunner([_create(part, checkpoint_dir) for part in parts])


def create_guardrail(config: GuardrailConfig) -> GuardrailRunner | None:
    """The guardrails of a config; None where they are switched off."""
    if not config.enabled:
        return None
    return create_text_guardrail_runner(config.checkpoint_dir, config.offload_model_to_cpu, config.parts)


def create_video_guardrail_runner(
    checkpoint_dir: str | None = None, offload_model_to_cpu: bool = False
) -> GuardrailRunner:
    """An error: guardrails of videos are not here yet."""
    raise ConfigError(
        "The guardrails of videos (video filter, face blur) are not built in yet; prompts are checked by the blocklist."
    )


def require_safe(guardrail: GuardrailRunner, prompt: str, stage: str = "prompt") -> None:
    """Raise BlockedError where the guardrail refuses a prompt."""
    if not (verdict := guardrail.run_safety_check(prompt)).is_safe:
        raise BlockedError(f"The {stage} was refused: {verdict.message}.")


def run_text_guardrail(prompt: str, runner: GuardrailRunner) -> bool:
    """True for a prompt that may be used; the reason against another goes to the log."""
    verdict = runner.run_safety_check(prompt)
    if not verdict.is_safe:
        log.warning("prompt refused: %s", verdict.message)
    return verdict.is_safe


def status_line(
    guardrail_config: GuardrailConfig,
    refiner_config: PromptRefinerConfig,
    guardrail: GuardrailRunner | None,
    refiner: PromptRefiner | None = None,
    *,
    is_released: bool = True,
) -> str:
    """``guardrail: blocklist (...), asked: on; prompt refiner: off, asked: on (not built in yet)``."""
    if guardrail is None:
        first = f"guardrail: off, asked: {_asked(guardrail_config)}"
        first += f" ({LICENCE_NOTICE})" if is_released and not guardrail_config.enabled else ""
    else:
        parts = ", ".join(_described(part) for part in guardrail.guardrails) or "nothing"
        first = f"guardrail: {parts}, asked: {_asked(guardrail_config)} (not built in yet: {NOT_BUILT_IN})"
    second = f"prompt refiner: {'off' if refiner is None else 'on'}, asked: {_asked(refiner_config)}"
    return f"{first}; {second}" + (" (not built in yet)" if refiner is None and refiner_config.enabled else "")


def _asked(config: GuardrailConfig | PromptRefinerConfig) -> str:
    return "on" if config.enabled else "off"


def _described(part: Any) -> str:
    detail = getattr(part, "source", "")
    return f"{part.name} ({detail})" if detail else str(part.name)


def _create(part: str, checkpoint_dir: str | None) -> Guardrail:
    if part.lower() != BLOCKLIST:
        raise ConfigError(
            f"There is no guardrail '{part}' (guardrail_config.parts): this version has {BLOCKLIST}; not built in yet:"
            f" {NOT_BUILT_IN}."
        )
    return Blocklist(checkpoint_dir)
