# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules against golden values."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from imaginaire.optim.schedules import lambda_cosine, lambda_linear
from tests.goldens import Value

AREA = "training"
SCHEDULES = {"lambdalinear": lambda_linear, "cosine": lambda_cosine}
SAME_FORMULA = dict(rtol=1e-9, atol=1e-15)


@pytest.mark.golden_cases("lr_schedules.json", "cases")
def test_multipliers_match(case: Value) -> None:
    schedule = SCHEDULES[case["kind"].use()](**case["params"].use())
    case["multiplier"].compare([schedule(n) for n in case["iterations"].use()], **SAME_FORMULA)


@pytest.mark.golden_cases("lr_schedules.json", "cases")
def test_the_optimizer_uses_these_learning_rates(case: Value) -> None:
    schedule = SCHEDULES[case["kind"].use()](**case["params"].use())
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=case["base_lr"].use())
    scheduler = LambdaLR(optimizer, schedule)
    in_effect = []
    for _ in range(len(case["lr_in_effect_first_steps"])):
        in_effect.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    case["lr_in_effect_first_steps"].compare(in_effect, **SAME_FORMULA)
