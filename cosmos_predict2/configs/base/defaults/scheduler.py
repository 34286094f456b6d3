# SPDX-License-Identifier: Apache-2.0
"""Group ``scheduler``: multipliers of the learning rate. Lists have one entry per cycle."""

from imaginaire.config import L, register_group
from imaginaire.optim.adamw import constant, lambda_cosine, lambda_linear

CYCLES = dict(
    warm_up_steps=[1000],
    cycle_lengths=[10_000_000_000_000],
    f_start=[1e-6],
    f_max=[1.0],
    f_min=[1.0],
    verbosity_interval=0,
)
SCHEDULERS = {
    "lambdalinear": L(lambda_linear)(**CYCLES),
    "lambdacosine": L(lambda_cosine)(**CYCLES),
    "constant": L(constant)(rate=1.0),
}


def register() -> None:
    register_group("scheduler", SCHEDULERS)
