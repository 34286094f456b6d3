# SPDX-License-Identifier: Apache-2.0
"""Alarms for success that is only imagined: by true success, and the base of others.

    trainer.callbacks.imagination_gap: L(ImaginationGap)(limit=0.3, on_alarm="stop")

Validation plays the actions that a policy drew in imagination again in the true environment (``true_env``), or the
policy in both (``eval_env`` alone). One that has learnt to exploit the world model succeeds in the first and not in the
second.
"""

import logging
import math
from typing import Any, Literal

from torch import Tensor

from imaginaire import distributed
from imaginaire.errors import ConfigError, TrainingError
from imaginaire.training.callbacks import Callback

log = logging.getLogger(__name__)

CURE = (
    "Refine the world model (model.config.refinement), or more of it; hold the policy (model.config.rl.kl_beta);"
    " or let two noises judge (model.config.env.num_noises=2)."
)
ALARMS = ("warn", "stop", "best")


class ImaginationAlarm(Callback):
    """Looks at a run from time to time. ``on_alarm``: where something is wrong it warns, the run stops with an error,
    or with "best" it ends with the weights of the best look before, else with those that it began with, which become
    its newest checkpoint."""

    def __init__(self, on_alarm: Literal["warn", "stop", "best"]) -> None:
        super().__init__()
        if on_alarm not in ALARMS:
            raise ConfigError(f"on_alarm={on_alarm!r} must be one of {', '.join(ALARMS)}.")
        self.on_alarm = on_alarm
        self._right: float | None = None  # the worth of a look that was right and waits for its checkpoint
        self._saved: list[list[float]] = []  # iteration and worth of checkpoints at which all was right
        self._ended = ""  # why the run is over

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        if self._ended:
            log.warning("%s", self._ended)
        if self.on_alarm == "best" and self.config.checkpoint.keep_last is not None:
            found = f"trainer.callbacks.{self.name}.on_alarm=best goes back to a checkpoint"
            kept = f"checkpoint.keep_last={self.config.checkpoint.keep_last}"
            raise ConfigError(f"{found} that {kept} may remove: set it to null, or on_alarm to warn or stop.")
        if self.on_alarm == "best" and not self._saved:
            self._right, self.trainer.save_wanted = -math.inf, True  # of the beginning, to go back to

    def on_save_checkpoint_start(self, model: Any, iteration: int = 0) -> None:
        if self._right is not None:
            self._saved.append([iteration, self._right])
            self._right = None

    def settle(self, model: Any, problem: str, worth: float, iteration: int) -> None:
        """A look is over: it found this problem, or none where the policy is of this worth."""
        if not problem:
            if self.on_alarm == "best":
                self._right, self.trainer.save_wanted = worth, True
        elif self.on_alarm == "warn":
            log.warning("%s", problem)
        elif self.on_alarm == "stop":
            raise TrainingError(problem)
        else:
            looks = ((value, int(saved)) for saved, value in self._saved)
            worth, target = max(looks, default=(-math.inf, iteration))  # none: nothing is learnt
            if self._saved:
                self.trainer.checkpointer.restore_weights(model, target)
            self.trainer.metrics.log({"watch/returned_to": float(target)}, iteration)
            why = "before its first look" if worth == -math.inf else "the best that was right"
            which = f"of iteration {target}, {why}" if target else "that it began with"
            self.end(iteration, f"{problem} So the run has ended at iteration {iteration}, with the weights {which}.")

    def end(self, iteration: int, why: str) -> None:
        """The run is over, with the weights that it has now."""
        self.trainer.last_iteration, self._ended = iteration, why
        log.warning("%s", why)

    def state_dict(self) -> dict[str, Any]:
        return {"saved": self._saved, "ended": self._ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved, self._ended = list(state.get("saved", [])), state.get("ended", "")
        if self._ended:
            self.trainer.last_iteration = self.trainer.iteration


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
                f"trainer.callbacks.{self.name} needs an environment that imagines (model.config.world_model, or"
                " env.imagination), true_env or eval_env beside it, and compare above 0."
            )
        imagined, true = (sum(values) / len(rates) for values in zip(*rates, strict=True))
        text = (
            f"{imagined:.0%} of the episodes succeed in imagination and {true:.0%} truly (iteration {iteration},"
            f" trainer.callbacks.{self.name}.limit={self.limit}): the policy exploits the world model. {CURE}"
        )
        self.settle(model, text if imagined - true > self.limit else "", true, iteration)
