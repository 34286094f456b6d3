# SPDX-License-Identifier: Apache-2.0
"""Stochastic samplers as chains of normal distributions, which reinforcement learning rolls out and differentiates.

Step k takes a state to ``mean + std * z``. The mean follows from the network's estimate of the clean video, the
standard deviation from the levels alone, so that the ratio of two networks' probabilities is that of their squared
errors. A rollout and its gradient call the same function.

Chains in flow time, y = (1 - t) x_0 + t eps: by the stochastic differential equation of Flow-GRPO ("sde"), by
coefficients-preserving sampling ("cps"), with DanceGRPO's constant noise ("dance"), with that of DDIM ("ddim"), or
without noise ("ode"). Chains in noise level, x = x_0 + sigma eps: with EDM's churn ("churn").
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from cosmos_predict2.diffusion.solvers import euler, two_point

FLOW_KINDS = ("sde", "cps", "dance", "ddim", "ode")
KINDS = (*FLOW_KINDS, "churn")
LOG_SQRT_2_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, slots=True)
class Normal:
    """The distribution of the next state."""

    mean_B_C_T_H_W: Tensor
    std: float

    def draw(self, noise_B_C_T_H_W: Tensor) -> Tensor:
        return self.mean_B_C_T_H_W if self.std == 0 else self.mean_B_C_T_H_W + self.std * noise_B_C_T_H_W

    def log_prob(self, x_next_B_C_T_H_W: Tensor) -> Tensor:
        """The mean over the elements of their log-densities, [B]."""
        error = (x_next_B_C_T_H_W - self.mean_B_C_T_H_W).square().flatten(1).mean(dim=1)
        return -error / (2 * self.std**2) - math.log(self.std) - LOG_SQRT_2_PI


class Chain(Protocol):
    """A sampler of ``num_steps`` steps. ``levels[k]`` is the level at which the network judges the state of step k."""

    @property
    def levels(self) -> Sequence[float]: ...

    @property
    def final_level(self) -> float | None:
        """The level at which one more estimate is the result; None where the last state is the result."""

    @property
    def num_steps(self) -> int: ...

    @property
    def uses_previous(self) -> bool:
        """True where a step takes the estimate of the one before."""

    def is_stochastic(self, k: int) -> bool:
        """True where step k draws, so that it has a probability."""

    def length(self, k: int) -> float:
        """The fall of the level in step k."""

    def start(self, noise_B_C_T_H_W: Tensor, more_noise_B_C_T_H_W: Tensor) -> Tensor:
        """The state of step 0, of standard normal noise; no action of the network precedes it."""

    def step(self, k: int, x_B_C_T_H_W: Tensor, x0_B_C_T_H_W: Tensor, previous_x0_B_C_T_H_W: Tensor | None) -> Normal:
        """The next state, given the estimate here and the one of step k - 1 (a constant, where it is used)."""

    def deviation_after(self, k: int, x0_deviation: float) -> float:
        """The deviation of the state after step k around 0, where that of the clean latents is ``x0_deviation``."""


@dataclass(frozen=True)
class FlowChain:
    """A chain through decreasing flow times. Steps outside ``window`` draw nothing (None: all steps draw).

    ``amount`` is the noise level a of "sde" (usually 0.7) and "cps" (0.8), or eta of "dance" and "ddim" (0.3).
    """

    levels: Sequence[float]  # one more than there are steps
    kind: str = "sde"
    amount: float = 0.7
    window: Collection[int] | None = None
    final_level: float | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "final_level", self.levels[-1] if self.levels[-1] > 0 else None)
        for k in filter(self._draws, range(self.num_steps)):
            _check_noise(self.kind, self.levels, k, self.amount)

    @property
    def num_steps(self) -> int:
        return len(self.levels) - 1

    @property
    def uses_previous(self) -> bool:
        return False

    def is_stochastic(self, k: int) -> bool:
        return self._draws(k) and flow_std(self.kind, self.levels, k, self.amount) > 0

    def length(self, k: int) -> float:
        return self.levels[k] - self.levels[k + 1]

    def start(self, noise_B_C_T_H_W: Tensor, more_noise_B_C_T_H_W: Tensor) -> Tensor:
        return noise_B_C_T_H_W if self.final_level is None else noise_B_C_T_H_W * self.levels[0]

    def step(self, k: int, x_B_C_T_H_W: Tensor, x0_B_C_T_H_W: Tensor, previous_x0_B_C_T_H_W: Tensor | None) -> Normal:
        return flow_step(self.kind if self._draws(k) else "ode", self.levels, k, self.amount, x_B_C_T_H_W, x0_B_C_T_H_W)

    def deviation_after(self, k: int, x0_deviation: float) -> float:
        t = self.levels[k + 1]
        return math.hypot((1 - t) * x0_deviation, t)

    def _draws(self, k: int) -> bool:
        return self.window is None or k in self.window


def flow_std(kind: str, times: Sequence[float], k: int, amount: float) -> float:
    """The standard deviation of step k through flow times."""
    t, t_next = times[k], times[k + 1]
    if kind == "ode":
        return 0.0
    if kind == "sde":
        return sde_coefficient(times, k, amount) * math.sqrt(t - t_next)
    if kind == "cps":
        return t_next * math.sin(amount * math.pi / 2)
    if kind == "dance":
        return amount * math.sqrt(t - t_next)
    if kind == "ddim":
        return amount * t_next * math.sqrt(max(0.0, 1 - (t_next * (1 - t)) ** 2 / (t * (1 - t_next)) ** 2))
    raise ValueError(f"There is no chain '{kind}' in flow time; there are {', '.join(FLOW_KINDS)}.")


def _check_noise(kind: str, times: Sequence[float], k: int, amount: float) -> None:
    """Raise where a step draws more noise than the state it goes to holds, or takes away more than it comes with.

    Where noise is added to a velocity, the state's own weight in the mean is 1 - std^2 / (2 t).
    """
    t, t_next = times[k], times[k + 1]
    std, largest = flow_std(kind, times, k, amount), t_next if kind in ("cps", "ddim") else math.sqrt(2 * t)
    if kind == "cps" and amount > 1:
        raise ValueError(f"The noise level {amount:g} of cps is above 1, where all noise of a step is new.")
    if std > largest:
        raise ValueError(
            f"Step {k} from time {t:.4g} to {t_next:.4g} draws noise of deviation {std:.3g}, but it has room for"
            f" {largest:.3g}. Take more steps, or a noise level below {amount:g}."
        )


def sde_coefficient(times: Sequence[float], k: int, amount: float) -> float:
    """a sqrt(t / (1 - t)), infinite at t = 1: a first time from which 1 is less than half a step away takes the next
    one's 1 - t."""
    t, t_next = times[k], times[k + 1]
    is_at_one = k == 0 and 1 - t < (t - t_next) / 2
    return amount * math.sqrt(t / (1 - (t_next if is_at_one else t)))


def flow_step(kind: str, times: Sequence[float], k: int, amount: float, y: Tensor, x0: Tensor) -> Normal:
    """Step k through flow times from the state ``y``; v = (y - x0) / t is the velocity, y + (1 - t) v the noise."""
    t, t_next = times[k], times[k + 1]
    dt, std = t_next - t, flow_std(kind, times, k, amount)
    velocity = (y - x0) / t
    if kind == "ode":
        return Normal(y + dt * velocity, 0.0)
    if kind == "sde":
        squared = sde_coefficient(times, k, amount) ** 2
        return Normal(y * (1 + squared * dt / (2 * t)) + velocity * (1 + squared * (1 - t) / (2 * t)) * dt, std)
    if kind == "dance":
        score = ((1 - t) * x0 - y) / t**2
        return Normal(y + dt * velocity - 0.5 * amount**2 * dt * score, std)
    noise = y + (1 - t) * velocity
    return Normal((1 - t_next) * x0 + math.sqrt(max(0.0, t_next**2 - std**2)) * noise, std)


@dataclass(frozen=True)
class ChurnChain:
    """Noise put back after each solver step between decreasing noise levels (EDM, algorithm 2).

    The state of step k is the churned one, at ``levels[k]``. The last step draws nothing: one more estimate follows.
    """

    sigmas: Sequence[float]  # one more than there are steps
    amount: float = 1.0
    solver: Literal["2ab", "1euler"] = "2ab"
    noise_scale: float = 1.0
    sigma_min: float = 0.0
    sigma_max: float = math.inf
    window: Collection[int] | None = None
    levels: Sequence[float] = field(init=False)
    final_level: float | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", [self._raised(k) for k in range(self.num_steps)])
        object.__setattr__(self, "final_level", self.sigmas[-1])

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    @property
    def uses_previous(self) -> bool:
        return self.solver != "1euler"

    def is_stochastic(self, k: int) -> bool:
        return self._std(k) > 0

    def length(self, k: int) -> float:
        return self.levels[k] - self.sigmas[k + 1]

    def start(self, noise_B_C_T_H_W: Tensor, more_noise_B_C_T_H_W: Tensor) -> Tensor:
        added = math.sqrt(self.levels[0] ** 2 - self.sigmas[0] ** 2) * self.noise_scale
        return noise_B_C_T_H_W * self.sigmas[0] + added * more_noise_B_C_T_H_W

    def step(self, k: int, x_B_C_T_H_W: Tensor, x0_B_C_T_H_W: Tensor, previous_x0_B_C_T_H_W: Tensor | None) -> Normal:
        x, x0, dtype = x_B_C_T_H_W, x0_B_C_T_H_W, x_B_C_T_H_W.dtype
        sigma, sigma_next = self.levels[k], self.sigmas[k + 1]
        if not self.uses_previous or previous_x0_B_C_T_H_W is None:
            mean = euler(x, x0, sigma, sigma_next)
        else:
            mean = two_point(x, x0, previous_x0_B_C_T_H_W, self.levels[k - 1], sigma, sigma_next)
        return Normal(mean.to(dtype), self._std(k))

    def deviation_after(self, k: int, x0_deviation: float) -> float:
        return math.hypot(x0_deviation, self.levels[k + 1] if k + 1 < self.num_steps else self.sigmas[-1])

    def _std(self, k: int) -> float:
        if k + 1 >= self.num_steps:
            return 0.0
        return math.sqrt(self.levels[k + 1] ** 2 - self.sigmas[k + 1] ** 2) * self.noise_scale

    def _raised(self, k: int) -> float:
        """Level k with its churn; the first always has it, the others where their step belongs to the window."""
        sigma = self.sigmas[k]
        is_in_window = k == 0 or self.window is None or k - 1 in self.window
        if not (is_in_window and self.sigma_min < sigma < self.sigma_max):
            return sigma
        return sigma * (1 + min(self.amount / (self.num_steps + 1), math.sqrt(1.2) - 1))


def log_ratio(x_next: Tensor, mean: Tensor, mean_old: Tensor, std: float | None) -> Tensor:
    """log of N(x_next; mean) / N(x_next; mean_old), the mean over the elements, [B]; exactly 0 for equal means.

    Without ``std``, the published form, the factor 1 / (2 std^2) is left out.
    """
    squares = (mean - mean_old) * (2 * x_next - mean - mean_old)
    total = squares.flatten(1).mean(dim=1)
    return total if std is None else total / (2 * std**2)
