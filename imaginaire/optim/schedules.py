# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules: multipliers f(n) of the base rate, where n counts the optimizer steps that are done.

The step with index i (from 0) runs with ``base_lr * f(i)``, so the peak rate is ``lr * f_max``. A schedule is a row of
cycles, each with a ramp from f_start to f_max over warm_up_steps and then a decay to f_min at its end. Beyond the last
cycle f_min is held. All arithmetic is in Python floats.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from imaginaire.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

_MUCH_LONGER = 5  # than the run, of a schedule whose end hardly counts


Schedule = Callable[[int], float]


@runtime_checkable
class EndingSchedule(Protocol):
    """A `Schedule` that ends after ``length`` steps (None: never); its last value holds from there on."""

    @property
    def length(self) -> float | None: ...


def lambda_linear(
    warm_up_steps: Sequence[float],
    cycle_lengths: Sequence[float],
    f_start: Sequence[float],
    f_max: Sequence[float],
    f_min: Sequence[float],
    verbosity_interval: int = 0,
) -> "CycleSchedule":
    """Linear ramp up, linear decay; one list entry per cycle."""
    return CycleSchedule("linear", _cycles(warm_up_steps, cycle_lengths, f_start, f_max, f_min), verbosity_interval)


def lambda_cosine(
    warm_up_steps: Sequence[float],
    cycle_lengths: Sequence[float],
    f_start: Sequence[float],
    f_max: Sequence[float],
    f_min: Sequence[float],
    verbosity_interval: int = 0,
) -> "CycleSchedule":
    """Linear ramp up, half a cosine down; one list entry per cycle."""
    return CycleSchedule("cosine", _cycles(warm_up_steps, cycle_lengths, f_start, f_max, f_min), verbosity_interval)


def constant(rate: float = 1.0) -> "ConstantSchedule":
    """The same multiplier at every step."""
    return ConstantSchedule(float(_number("rate", rate)))


@dataclass(frozen=True)
class ConstantSchedule:
    rate: float

    def __call__(self, n: int) -> float:
        return self.rate


@dataclass(frozen=True)
class Repeated:
    """A schedule that begins anew after so many steps."""

    schedule: Schedule
    period: int

    def __call__(self, n: int) -> float:
        return self.schedule(n % self.period)


@dataclass(frozen=True)
class Cycle:
    warm_up: float
    length: float
    f_start: float
    f_max: float
    f_min: float


@dataclass(frozen=True)
class CycleSchedule:
    decay: str  # "linear" or "cosine"
    cycles: tuple[Cycle, ...]
    verbosity_interval: int = 0

    @property
    def length(self) -> float:
        return sum(cycle.length for cycle in self.cycles)

    def __call__(self, n: int) -> float:
        f = self.value(n)
        if self.verbosity_interval > 0 and n % self.verbosity_interval == 0:
            log.info("learning-rate multiplier at step %d: %g", n, f)
        return f

    def is_beyond(self, max_iter: int) -> bool:
        """True if a run of so many steps ends in the first warm-up, or long before the rates fall as they should."""
        falls = any(cycle.f_min != cycle.f_max for cycle in self.cycles)
        return max_iter < 2 * self.cycles[0].warm_up or (falls and _MUCH_LONGER * max_iter <= self.length)

    def value(self, n: int) -> float:
        start = 0.0
        for cycle, end in zip(self.cycles, accumulate(cycle.length for cycle in self.cycles), strict=True):
            if n <= end:  # a boundary belongs to the earlier cycle
                return self._within(cycle, n - start)
            start = end
        return self.cycles[-1].f_min

    def _within(self, cycle: Cycle, n: float) -> float:
        if n < cycle.warm_up:
            return cycle.f_start + (cycle.f_max - cycle.f_start) * n / cycle.warm_up
        if cycle.length == cycle.warm_up:  # a cycle that is all ramp ends at its peak
            return cycle.f_max
        if self.decay == "linear":
            return cycle.f_min + (cycle.f_max - cycle.f_min) * (cycle.length - n) / (cycle.length - cycle.warm_up)
        progress = min(1.0, (n - cycle.warm_up) / (cycle.length - cycle.warm_up))
        return cycle.f_min + 0.5 * (cycle.f_max - cycle.f_min) * (1.0 + math.cos(math.pi * progress))


class ConfiguredLR(LambdaLR):
    """LambdaLR whose saved state is the step count alone: base rate and schedule always come from the configuration."""

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": int(self.last_epoch), "_step_count": int(self._step_count)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved step. Other entries (torch's LambdaLR writes base rates, too) are not read."""
        if "last_epoch" not in state_dict:
            raise CheckpointError(
                f"The scheduler state has no 'last_epoch', only {sorted(state_dict) or 'nothing'}; "
                "it was not written by a learning-rate scheduler of torch."
            )
        self.last_epoch = int(state_dict["last_epoch"])
        self._step_count = int(state_dict.get("_step_count", self.last_epoch + 1))
        self._set_rates()

    @property
    def last_cycle_begins(self) -> float:
        """The step from which on the last of several cycles counts; inf where there is none."""
        schedule = self.lr_lambdas[0]
        if not isinstance(schedule, CycleSchedule) or len(schedule.cycles) < 2:
            return math.inf
        return schedule.length - schedule.cycles[-1].length

    def begin_last_cycle(self) -> int:
        """Go on with the last cycle at once, where it has not begun; the number of steps that are left of it."""
        schedule, start = self.lr_lambdas[0], self.last_cycle_begins
        if not isinstance(schedule, CycleSchedule) or math.isinf(start):
            return 0
        if self.last_epoch < start:
            self.last_epoch = int(start)
            self._set_rates()
        return max(0, int(schedule.length) - self.last_epoch)

    def _set_rates(self) -> None:
        rates = [base * f(self.last_epoch) for base, f in zip(self.base_lrs, self.lr_lambdas, strict=True)]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates


def _cycles(*lists: Any) -> tuple[Cycle, ...]:
    names = ("warm_up_steps", "cycle_lengths", "f_start", "f_max", "f_min")
    columns = []
    for name, values in zip(names, lists, strict=True):
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ConfigError(f"scheduler.{name} is {values!r}; expected a list with one number per cycle.")
        columns.append([_number(name, value) for value in values])
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1 or lengths[0] == 0:
        found = ", ".join(f"{name} has {length}" for name, length in zip(names, lengths, strict=True))
        raise ConfigError(f"The five lists of the scheduler need one entry per cycle, at least one: {found}.")
    cycles = tuple(Cycle(*row) for row in zip(*columns, strict=True))
    for i, cycle in enumerate(cycles):
        if cycle.length <= 0 or cycle.warm_up < 0:
            raise ConfigError(
                f"Cycle {i} of the scheduler has cycle_lengths={cycle.length:g} and warm_up_steps={cycle.warm_up:g}; "
                "a cycle needs a positive length and a ramp of 0 steps or more."
            )
    return cycles


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"scheduler.{name} has {value!r}; expected a finite number of 0 or more.")
    return value


def note_end(scheduler: LRScheduler, max_iter: int) -> None:
    """Log when the schedule ends before the run does, and warn when it is made for a much longer run."""
    for f in dict.fromkeys(getattr(scheduler, "lr_lambdas", [])):
        length = f.length if isinstance(f, EndingSchedule) else None
        if length is not None and length < max_iter:
            ends = f"the schedule ends after {int(length)} steps, trainer.max_iter is {max_iter}"
            log.info("scheduler: %s; its last value holds from there on", ends)
        if isinstance(f, CycleSchedule) and max_iter and f.is_beyond(max_iter):
            count = len(f.cycles)
            fit = max_iter // count
            log.warning(
                f"scheduler: scheduler.warm_up_steps={[c.warm_up for c in f.cycles]} and scheduler.cycle_lengths="
                f"{[c.length for c in f.cycles]} are for a longer run than trainer.max_iter={max_iter}, which ends at"
                f" {f.value(max_iter):.2g} of optimizer.lr. Values of its length:"
                f" scheduler.warm_up_steps={[fit // 10] * count} scheduler.cycle_lengths={[fit] * count}"
            )


# --- several parts of a model with an optimizer and a schedule each, as one optimizer and one schedule
#
# A step is that of the parts that have gradients: a batch trains one part, and leaves the weights, the moments and the
# learning rate of the others as they are. Parameters must not be shared between parts.


class PartsOptimizer(Optimizer):
    """The optimizers of the parts, by name. Groups and states are theirs."""

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self.parts = dict(parts)
        super().__init__([group for part in self.parts.values() for group in part.param_groups], {})
        for part in self.parts.values():
            part.state = self.state
        self.stepped: list[str] = []  # the parts of the last step, or of one that was left out

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise TypeError("PartsOptimizer takes no closure.")
        self.stepped = self._with_gradients() or self.stepped
        for name in self.stepped:
            self.parts[name].step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.stepped = self._with_gradients() or self.stepped
        super().zero_grad(set_to_none)

    def _with_gradients(self) -> list[str]:
        return [
            name
            for name, part in self.parts.items()
            if any(p.grad is not None for group in part.param_groups for p in group["params"])
        ]


class PartsScheduler:
    """The schedules of the parts; each counts the steps of its own part."""

    def __init__(self, optimizer: PartsOptimizer, schedules: Mapping[str, Schedule]) -> None:
        self.optimizer = optimizer
        self.parts = {name: ConfiguredLR(part, schedules[name]) for name, part in optimizer.parts.items()}

    def step(self) -> None:
        for name in self.optimizer.stepped:
            self.parts[name].step()

    def get_last_lr(self) -> list[float | Tensor]:
        return [rate for part in self.parts.values() for rate in part.get_last_lr()]

    @property
    def lr_lambdas(self) -> list[Callable[[int], float]]:
        return [f for part in self.parts.values() for f in part.lr_lambdas]

    @property
    def base_lrs(self) -> list[Any]:
        return [rate for part in self.parts.values() for rate in part.base_lrs]

    @base_lrs.setter
    def base_lrs(self, rates: list[Any]) -> None:
        left = list(rates)
        for part in self.parts.values():
            part.base_lrs, left = left[: len(part.base_lrs)], left[len(part.base_lrs) :]

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue each part at its saved step."""
        for name, part in self.parts.items():
            part.load_state_dict(state_dict.get(name, {}))
