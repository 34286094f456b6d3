# SPDX-License-Identifier: Apache-2.0
from cosmos_predict2.guardrail.runner import (
    GuardrailConfig,
    GuardrailRunner,
    PromptRefinerConfig,
    create_text_guardrail_runner,
    status_line,
)

__all__ = ["GuardrailConfig", "GuardrailRunner", "PromptRefinerConfig", "create_text_guardrail_runner", "status_line"]
