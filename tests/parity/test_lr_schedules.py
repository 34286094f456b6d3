# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules against golden values."""

import pytest

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
def test_the_optimizer_has_the_rate_times_the_multiplier_of_each_step(case: Value) -> None:
    schedule, in_effect = SCHEDULES[case["kind"].use()](**case["params"].use()), case["lr_in_effect_first_steps"]
    in_effect.compare([case["base_lr"].use() * schedule(n) for n in range(len(in_effect))], **SAME_FORMULA)
