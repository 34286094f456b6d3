# SPDX-License-Identifier: Apache-2.0
from cosmos_predict2.auxiliary.guardrail.runner import GuardrailConfig, GuardrailRunner, create_text_guardrail_runner
from cosmos_predict2.auxiliary.prompt_refiner import PromptRefinerConfig
from cosmos_predict2.auxiliary.status import status_line

__all__ = [
    "GuardrailConfig",
    "GuardrailRunner",
    "PromptRefinerConfig",
    "create_text_guardrail_runner",
    "status_line",
]
