# SPDX-License-Identifier: Apache-2.0
"""Group ``ema``: averages of the weights."""

from imaginaire.config import register_group

POWER = dict(enabled=True, rate=0.1, iteration_shift=0)


def register() -> None:
    register_group("ema", {"power": POWER}, package="model.config.pipe_config.ema")
