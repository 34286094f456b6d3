# SPDX-License-Identifier: Apache-2.0
"""The decision to apply a step: policy for a loss or a gradient that is not finite."""

import logging
import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from imaginaire import distributed
from imaginaire.config.schema import TrainerConfig
from imaginaire.distributed import parallel
from imaginaire.errors import ConfigError, TrainingError

log = logging.getLogger(__name__)


class StepGuard:
    """Collects what was found in a step, agrees on it with the other ranks, and counts the steps that were left out.

    ``trainer.non_finite=stop`` ends the run with a report; ``skip`` leaves the step out, at most
    ``trainer.max_non_finite`` times in a row. A gradient scaler has its own answer to an overflow: it lowers its scale.
    """

    def __init__(self, config: TrainerConfig, *, has_scaler: bool) -> None:
        self._config = config
        self._has_scaler = has_scaler
        self._found: str | None = None
        self.skipped = 0  # in all
        self.in_a_row = 0
        self.last_loss = math.nan

    def begin(self) -> None:
        self._found = None

    def report(self, what: str, value: float) -> None:
        """A callback found something in this step that is not finite; the first finding counts."""
        if self._found is None and not (self._has_scaler and what == "grad_norm"):
            self._found = f"{what} is {value}"

    def agree(self, loss: float, stop_wanted: bool) -> tuple[bool, bool]:
        """(may the step be applied, was any rank asked to stop), in one small collective."""
        has_bad_loss = not math.isfinite(loss)
        if has_bad_loss:
            self._found = f"the loss is {loss}"
        place = distributed.rank() + 1.0  # 0 is none
        flags = torch.tensor([has_bad_loss * place, (self._found is not None) * place, float(stop_wanted)])
        bad_loss, bad, stop = distributed.all_reduce_(flags, "max").tolist()
        if not bad:
            self.last_loss = loss
        elif bad_loss and not has_bad_loss:
            self._found = f"the loss of rank {bad_loss - 1:.0f} is not finite"
        elif self._found is None:
            self._found = f"rank {bad - 1:.0f} found something that is not finite"
        return not bad, stop > 0

    def applied(self) -> None:
        self.in_a_row = 0

    def skip(self, model: nn.Module, optimizer: Optimizer, place: str) -> None:
        """Count a step that is not applied, or raise as the policy says; ``place`` names the step."""
        self.skipped += 1
        self.in_a_row += 1
        why = self._found or "the gradients overflowed in half precision"
        if self._found is not None and self._config.non_finite == "stop":
            raise TrainingError(self._report(model, optimizer, place, why))
        if self.in_a_row > self._config.max_non_finite:
            limit = f"(trainer.max_non_finite={self._config.max_non_finite})"
            report = self._report(model, optimizer, place, why)
            raise TrainingError(f"{self.in_a_row} steps in a row were skipped {limit}. {report}")
        log.warning("%s: %s; step skipped (%d in all)", place, why, self.skipped)

    def _report(self, model: nn.Module, optimizer: Optimizer, place: str, why: str) -> str:
        names = [
            name
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and not bool(torch.isfinite(parallel.to_local(parameter.grad)).all())
        ]
        rates = ", ".join(f"{float(group['lr']):.3g}" for group in optimizer.param_groups)
        loss = self.last_loss
        last = "There was no finite loss before" if math.isnan(loss) else f"Last finite loss {loss:.6g}"
        where = f"{len(names)} parameters have non-finite gradients, first {names[0]}. " if names else ""
        return (
            f"Training stopped at {place}: {why}. {last}, learning rate {rates}. {where}"
            "Lower optimizer.lr, check the data, or leave such steps out with trainer.non_finite=skip."
        )


def grad_scaler(device: torch.device, arguments: dict[str, Any]) -> torch.amp.GradScaler:
    """The scaler of ``trainer.grad_scaler_args``."""
    try:
        return torch.amp.GradScaler(device.type, **arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"trainer.grad_scaler_args={arguments}: {error}.") from error
