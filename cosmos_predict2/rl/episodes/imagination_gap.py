# SPDX-License-Identifier: Apache-2.0
"""An alarm for success that is only imagined.

    trainer.callbacks.imagination_gap: L(ImaginationGap)(limit=0.3, on_alarm="stop")

Validation plays the actions that a policy drew in imagination again in the true environment (``true_env``), or the
policy in both (``eval_env`` alone). One that has learnt to exploit the world model succeeds in the first and not in the
second.
"""

from typing import Any, Literal

from torch import Tensor

from cosmos_predict2.rl.episodes.imagination_alarm import ImaginationAlarm
from imaginaire import distributed
from imaginaire.errors import ConfigError

CURE = (
    "Refine the world model (model.config.refinement), or more of it; hold the policy (model.config.rl.kl_beta);"
    " or let two noises judge (model.config.env.num_noises=2)."
)


class ImaginationGap(ImaginationAlarm):
    """Compares imagined with true success at every validation; ``limit`` is the largest gap."""

    def __init__(self, limit: float = 0.3, on_alarm: Literal["warn", "stop", "best"] = "warn") -> None:
        super().__init__(on_alarm)
        if not 0 < limit < 1:
            raise ConfigError(f"imagination_gap: limit={limit} must lie between 0 and 1.")
        self.limit = limit
        self._rates: list[tuple[float, float]] = []

    def on_validation_start(self, model: Any, dataloader: Any, iteration: int = 0) -> None:
        self._rates = []

    def on_validation_step_end(
        self, model: Any, batch: Any, output: dict[str, Any], loss: Tensor, iteration: int = 0
    ) -> None:
        if "imagined_success" in output:
            self._rates.append((float(output["imagined_success"]), float(output["true_success"])))

    def on_validation_end(self, model: Any, iteration: int = 0) -> None:
        rates = [rate for of_rank in distributed.all_gather_object(self._rates) for rate in of_rank]
        if not rates:
            raise ConfigError(
                f"trainer.callbacks.{self.name} compares imagined with true success, but validation gives none: it"
                " needs an environment that imagines (model.config.world_model, or env.imagination), true_env or"
                " eval_env beside it, and compare above 0."
            )
        imagined, true = (sum(values) / len(rates) for values in zip(*rates, strict=True))
        text = (
            f"{imagined:.0%} of the episodes succeed in imagination and {true:.0%} truly (iteration {iteration},"
            f" trainer.callbacks.{self.name}.limit={self.limit}): the policy exploits the world model. {CURE}"
        )
        self.settle(model, text if imagined - true > self.limit else "", true, iteration)
