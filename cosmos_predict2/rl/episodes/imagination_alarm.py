# SPDX-License-Identifier: Apache-2.0
"""What a callback does that finds a policy to learn what is only imagined: warn, stop, or go back to the best look.

`ImaginationGap` compares with true success, `ImaginationWatch` looks at imagined episodes alone.
"""

import logging
from typing import Any, Literal

from imaginaire.errors import ConfigError, TrainingError
from imaginaire.training.callbacks import Callback

log = logging.getLogger(__name__)

ALARMS = ("warn", "stop", "best")


class ImaginationAlarm(Callback):
    """Looks at a run from time to time. ``on_alarm``: where something is wrong it warns, the run stops with an error,
    or with "best" it ends with the weights of the best look before, which become its newest checkpoint."""

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
            raise ConfigError(
                f"trainer.callbacks.{self.name}.on_alarm=best goes back to a checkpoint that checkpoint.keep_last="
                f"{self.config.checkpoint.keep_last} may remove: set it to null, or on_alarm to warn or stop."
            )

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
        elif self.on_alarm == "stop" or not self._saved:
            raise TrainingError(problem)
        else:
            target = int(max(self._saved, key=lambda one: (one[1], one[0]))[0])
            self.trainer.checkpointer.restore_weights(model, target)
            self.trainer.last_iteration = iteration
            self.trainer.metrics.log({"watch/returned_to": float(target)}, iteration)
            self._ended = (
                f"{problem} So the run has ended, at iteration {iteration} with the weights of iteration {target}, the"
                " best at which all was right. They are its newest checkpoint."
            )
            log.warning("%s", self._ended)

    def state_dict(self) -> dict[str, Any]:
        return {"saved": self._saved, "ended": self._ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved, self._ended = list(state.get("saved", [])), state.get("ended", "")
        if self._ended:
            self.trainer.last_iteration = self.trainer.iteration
