# SPDX-License-Identifier: Apache-2.0
"""A step: the decision to apply it, and the seconds spent in each of its phases."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from imaginaire import distributed
from imaginaire.config.schema import TrainerConfig
from imaginaire.distributed import parallel
from imaginaire.errors import ConfigError, TrainingError, raised_as

log = logging.getLogger(__name__)

# Wall time whatever the device: the wait for the loader, what a model does to make batches, a callback's own work.
HOST_PHASES = frozenset({"data", "train_batches", "rollout", "reward", "reward_wait", "apart"})
_MAX_PENDING = 512


class StepGuard:
    """Collects what was found in a step, agrees on it with the other ranks, and counts the steps that were left out.

    ``trainer.non_finite=stop`` ends the run with a report; ``skip`` leaves the step out, at most
    ``trainer.max_non_finite`` times in a row. An overflow under a gradient scaler is not reported here: it lowers its
    scale, and leaves the step out itself.
    """

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._found: str | None = None
        self.skipped = 0  # in all
        self.in_a_row = 0
        self.last_loss = math.nan

    def begin(self) -> None:
        self._found = None

    def report(self, what: str, value: float) -> None:
        """A callback found something in this step that is not finite; the first finding counts."""
        if self._found is None:
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

    def skip(self, model: nn.Module, optimizer: Optimizer, place: str) -> None:
        """Count a step that is not applied, or raise by the policy; ``place`` names the step."""
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
    with raised_as(ConfigError, f"trainer.grad_scaler_args={arguments}", TypeError, ValueError, AssertionError):
        return torch.amp.GradScaler(device.type, **arguments)


class Timers:
    """``with timers("forward"): ...`` adds to the seconds of that name; `read_and_reset` hands them out. No phase waits
    for the device.

    On a GPU a phase lasts from when the device reaches its first line to when it has finished its last, by events on
    the current stream. Phases named in ``HOST_PHASES`` are always wall time. The wall time of a phase inside another
    counts for the inner one alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._pending: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        self._inside = 0.0  # wall time of the phases that lay inside the running one

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._seconds.setdefault(name, 0.0)
        if self._cuda and name not in HOST_PHASES:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            try:
                yield
            finally:
                end.record()
                pending = self._pending.setdefault(name, [])
                pending.append((start, end))
                if len(pending) > _MAX_PENDING:
                    self._fold(name, _MAX_PENDING // 2)  # so old that waiting for them costs nothing
            return
        begin, before, self._inside = time.perf_counter(), self._inside, 0.0
        try:
            yield
        finally:
            elapsed = time.perf_counter() - begin
            self._seconds[name] += elapsed - self._inside
            self._inside = before + elapsed

    def read_and_reset(self) -> dict[str, float]:
        """Seconds of each name since the last call. On a GPU this waits for the phases still running there."""
        for name, pending in self._pending.items():
            self._fold(name, len(pending))
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds

    def _fold(self, name: str, count: int) -> None:
        done, self._pending[name] = self._pending[name][:count], self._pending[name][count:]
        for start, end in done:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1000
