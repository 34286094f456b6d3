# SPDX-License-Identifier: Apache-2.0
"""Group ``ema``: averages of the weights."""

from hydra.core.config_store import ConfigStore

POWER = dict(enabled=True, rate=0.1, iteration_shift=0)


def register() -> None:
    ConfigStore.instance().store(group="ema", package="model.config.pipe_config.ema", name="power", node=POWER)
