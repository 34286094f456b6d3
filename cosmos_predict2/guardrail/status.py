# SPDX-License-Identifier: Apache-2.0
"""One line at start-up: what was asked of guardrail and refiner, and what is at work."""

from typing import Any

from cosmos_predict2.guardrail.runner import NOT_BUILT_IN, GuardrailConfig, GuardrailRunner
from cosmos_predict2.interfaces import PromptRefiner
from cosmos_predict2.text.prompt_refiner import PromptRefinerConfig

LICENCE_NOTICE = (
    "the licence of the released weights asks for a substantially similar guardrail where this one is switched off"
)


def status_line(
    guardrail_config: GuardrailConfig,
    refiner_config: PromptRefinerConfig,
    guardrail: GuardrailRunner | None,
    refiner: PromptRefiner | None = None,
    *,
    is_released: bool = True,
) -> str:
    """``guardrail: blocklist (...), asked: on; prompt refiner: off, asked: on (not built in yet)``.

    Without a guardrail, a word on the licence where the weights are a released file."""
    if guardrail is None:
        first = f"guardrail: off, asked: {_asked(guardrail_config)}"
        first += f" ({LICENCE_NOTICE})" if is_released and not guardrail_config.enabled else ""
    else:
        parts = ", ".join(_described(part) for part in guardrail.guardrails) or "nothing"
        missing = ", ".join(dict.fromkeys(NOT_BUILT_IN.values()))
        first = f"guardrail: {parts}, asked: {_asked(guardrail_config)} (not built in yet: {missing})"
    second = f"prompt refiner: {'off' if refiner is None else 'on'}, asked: {_asked(refiner_config)}"
    return f"{first}; {second}" + (" (not built in yet)" if refiner is None and refiner_config.enabled else "")


def _asked(config: GuardrailConfig | PromptRefinerConfig) -> str:
    return "on" if config.enabled else "off"


def _described(part: Any) -> str:
    detail = getattr(part, "source", "")
    return f"{part.name} ({detail})" if detail else str(part.name)
