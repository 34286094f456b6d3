# SPDX-License-Identifier: Apache-2.0
"""The sampling loop, its steppers, and the solvers by name.

A solver takes the state from one noise level to the next, given the estimate of the clean video there. All but
"unipc" and "flow_euler" work on x = x0 + sigma epsilon; these two on flow times, x_t = (1 - t) x0 + t epsilon, where
Euler's step is the same function of the times.

The former are exponential integrators in lambda = -ln(sigma), where dx/dlambda = x0 - x. Coefficients are Python floats
and arithmetic is in float64; each class documents the dtype of its state.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from cosmos_predict2.diffusion.rectified_flow import interpolate

SMALLEST_STEP = 1e-6  # in lambda

Denoise = Callable[[Tensor, Tensor], Tensor]  # (x_B_C_T_H_W, sigma_B) -> x0_B_C_T_H_W
Evaluate = Callable[[Tensor, float], Tensor]  # the same, with one level for all


@dataclass(frozen=True, slots=True)
class Step:
    """One step from ``sigma`` to ``sigma_next``."""

    x_B_C_T_H_W: Tensor
    x0_B_C_T_H_W: Tensor
    x_next_B_C_T_H_W: Tensor
    sigma: float
    sigma_next: float


class Stepper(Protocol):
    """One way to take a step. It may remember earlier ones, so a stepper serves one run."""

    def step(self, x_B_C_T_H_W: Tensor, x0_B_C_T_H_W: Tensor, sigma: float, sigma_next: float) -> Step: ...


class AdamsBashforth2:
    """Two-step Adams-Bashforth; the first step is Euler's. Keeps its state in ``dtype``, by default in that of x."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._previous: tuple[Tensor, float] | None = None

    def step(self, x_B_C_T_H_W: Tensor, x0_B_C_T_H_W: Tensor, sigma: float, sigma_next: float) -> Step:
        dtype = self._dtype or x_B_C_T_H_W.dtype
        if self._previous is None or sigma_next == 0:  # nothing to extrapolate from, or an infinite distance
            x_next = euler(x_B_C_T_H_W, x0_B_C_T_H_W, sigma, sigma_next)
        else:
            x0_previous, sigma_previous = self._previous
            if sigma >= sigma_previous:
                raise ValueError(
                    f"Level {sigma} does not come below {sigma_previous}, the level before it: churn raises it too "
                    "far, or this stepper has served a run (make a new one for each)."
                )
            x_next = two_point(x_B_C_T_H_W, x0_B_C_T_H_W, x0_previous, sigma_previous, sigma, sigma_next)
        self._previous = (x0_B_C_T_H_W.to(dtype), sigma)
        return Step(x_B_C_T_H_W, x0_B_C_T_H_W, x_next.to(dtype), sigma, sigma_next)


@dataclass(frozen=True, slots=True)
class Euler:
    """Exact if the estimate does not change within the step. Keeps its state in float64."""

    evaluate: Evaluate

    def step(self, x_B_C_T_H_W: Tensor, x0_B_C_T_H_W: Tensor, sigma: float, sigma_next: float) -> Step:
        x_next = euler(x_B_C_T_H_W, x0_B_C_T_H_W, sigma, sigma_next)
        return Step(x_B_C_T_H_W, x0_B_C_T_H_W, x_next, sigma, sigma_next)


@dataclass(frozen=True, slots=True)
class Midpoint:
    """A second estimate in the middle of the step; ``is_stable`` uses it alone. Keeps its state in float64."""

    evaluate: Evaluate
    is_stable: bool = False

    def step(self, x_B_C_T_H_W: Tensor, x0_B_C_T_H_W: Tensor, sigma: float, sigma_next: float) -> Step:
        if sigma_next == 0:  # the middle in lambda is 0 as well
            return Euler(self.evaluate).step(x_B_C_T_H_W, x0_B_C_T_H_W, sigma, sigma_next)
        middle = math.sqrt(sigma * sigma_next)
        x0_middle = self.evaluate(euler(x_B_C_T_H_W, x0_B_C_T_H_W, sigma, middle), middle)
        if self.is_stable:
            x_next = euler(x_B_C_T_H_W, x0_middle, sigma, sigma_next)
        else:
            x_next = two_point(x_B_C_T_H_W, x0_B_C_T_H_W, x0_middle, middle, sigma, sigma_next)
        return Step(x_B_C_T_H_W, x0_B_C_T_H_W, x_next, sigma, sigma_next)


@dataclass(frozen=True, slots=True)
class Heun:
    """The mean of the estimates at both ends. Keeps its state in float64."""

    evaluate: Evaluate

    def step(self, x_B_C_T_H_W: Tensor, x0_B_C_T_H_W: Tensor, sigma: float, sigma_next: float) -> Step:
        if sigma_next == 0:  # the estimate at 0 would be the state itself
            return Euler(self.evaluate).step(x_B_C_T_H_W, x0_B_C_T_H_W, sigma, sigma_next)
        x0_next = self.evaluate(euler(x_B_C_T_H_W, x0_B_C_T_H_W, sigma, sigma_next), sigma_next)
        mean = (x0_B_C_T_H_W.double() + x0_next.double()) / 2
        x_next = euler(x_B_C_T_H_W, mean, sigma, sigma_next)
        return Step(x_B_C_T_H_W, x0_B_C_T_H_W, x_next, sigma, sigma_next)


def euler(x_B_C_T_H_W: Tensor, x0_B_C_T_H_W: Tensor, sigma: float, sigma_next: float) -> Tensor:
    """The state at ``sigma_next`` if the estimate holds all the way, in float64."""
    ratio = sigma_next / sigma
    return ratio * x_B_C_T_H_W.double() + (1 - ratio) * x0_B_C_T_H_W.double()


def two_point(
    x_B_C_T_H_W: Tensor,
    x0_B_C_T_H_W: Tensor,
    other_x0_B_C_T_H_W: Tensor,
    other_sigma: float,
    sigma: float,
    sigma_next: float,
) -> Tensor:
    """The state at ``sigma_next`` if the estimate is linear in lambda through two known points, in float64.

    With d = lambda_next - lambda and c = (lambda_other - lambda) / d:
    x_next = e^-d x + d ((phi1 - phi2 / c) x0 + phi2 / c x0_other), phi1(z) = expm1(z) / z, phi2(z) = (phi1(z) - 1) / z
    at z = -d.
    """
    distance = math.log(sigma / sigma_next)
    to_other = math.log(sigma / other_sigma)
    if distance <= SMALLEST_STEP or abs(to_other) <= SMALLEST_STEP:
        raise ValueError(f"The levels {other_sigma}, {sigma}, {sigma_next} are too close for a second-order step.")
    phi1 = math.expm1(-distance) / -distance
    phi2 = (phi1 - 1) / -distance
    other = phi2 * distance / to_other
    estimate = (phi1 - other) * x0_B_C_T_H_W.double() + other * other_x0_B_C_T_H_W.double()
    return math.exp(-distance) * x_B_C_T_H_W.double() + distance * estimate


@dataclass(frozen=True, slots=True)
class _Past:
    """The values of an earlier step that a later one needs."""

    z: Tensor  # the corrected state, float64
    x0: Tensor
    sigma: float
    order: int


class UniPC:
    """UniPC of order 2 on flow times: each estimate first corrects the step before it, then predicts the next one.

    x_t = (1 - t) x0 + t epsilon, lambda = ln((1 - t) / t), the "bh2" form, on estimates of x0. Keeps its states in the
    dtype of x; the last step, to level 0, gives the estimate before it.
    """

    def __init__(self) -> None:
        self._past: list[_Past] = []  # the latest two

    def step(self, x_B_C_T_H_W: Tensor, x0_B_C_T_H_W: Tensor, sigma: float, sigma_next: float) -> Step:
        """The predicted state. The estimate belongs to the state before its own correction."""
        if self._past and sigma >= self._past[-1].sigma:
            raise ValueError(
                f"Level {sigma} does not come below {self._past[-1].sigma}, the level before it: this stepper has "
                "served a run (make a new one for each)."
            )
        z, x0 = x_B_C_T_H_W.double(), x0_B_C_T_H_W.double()
        if self._past:
            z = self._correct(x0, sigma)
        order = 2 if self._past and sigma_next > 0 else 1
        x_next = self._predict(z, x0, sigma, sigma_next, order)
        self._past = [*self._past[-1:], _Past(z, x0, sigma, order)]
        return Step(x_B_C_T_H_W, x0_B_C_T_H_W, x_next.to(x_B_C_T_H_W.dtype), sigma, sigma_next)

    def _predict(self, z: Tensor, x0: Tensor, sigma: float, sigma_next: float, order: int) -> Tensor:
        h = _log_ratio(sigma_next) - _log_ratio(sigma)
        scale = (1 - sigma_next) * math.expm1(-h)
        x_next = (sigma_next / sigma) * z - scale * x0
        if order == 2:
            before = self._past[-1]
            r = (_log_ratio(before.sigma) - _log_ratio(sigma)) / h
            x_next = x_next - scale * 0.5 * (before.x0 - x0) / r
        return x_next

    def _correct(self, x0: Tensor, sigma: float) -> Tensor:
        """The state at ``sigma``, taken again from the step before with the estimate that is known by now."""
        before = self._past[-1]
        h = _log_ratio(sigma) - _log_ratio(before.sigma)
        b = math.expm1(-h)
        scale = (1 - sigma) * b
        z = (sigma / before.sigma) * before.z - scale * before.x0
        if before.order == 1:
            return z - scale * 0.5 * (x0 - before.x0)
        earlier = self._past[-2]
        r = (_log_ratio(earlier.sigma) - _log_ratio(before.sigma)) / h
        c = -b / h - 1
        b1, b2 = c / b, 2 * (-c / h - 0.5) / b
        rho1 = (b1 - b2) / (1 - r)  # rho1 + rho2 = b1 and r rho1 + rho2 = b2
        rho2 = b1 - rho1
        return z - scale * (rho1 * (earlier.x0 - before.x0) / r + rho2 * (x0 - before.x0))


def _log_ratio(sigma: float) -> float:
    """lambda; the ends, pure noise and none, are infinitely far and the formulas stay finite there."""
    if sigma <= 0:
        return math.inf
    return math.log((1 - sigma) / sigma) if sigma < 1 else -math.inf


class SameNoise:
    """A stepper on flow times that jumps to the estimate and puts the same noise back, in float64."""

    def __init__(self, noise_B_C_T_H_W: Tensor) -> None:
        self._noise = noise_B_C_T_H_W.double()

    def step(self, x_B_C_T_H_W: Tensor, x0_B_C_T_H_W: Tensor, sigma: float, sigma_next: float) -> Step:
        t_B = self._noise.new_full((len(self._noise),), sigma_next)
        x_next = interpolate(x0_B_C_T_H_W.double(), self._noise, t_B)
        return Step(x_B_C_T_H_W, x0_B_C_T_H_W, x_next, sigma, sigma_next)


SOLVERS: dict[str, Callable[[Evaluate], Stepper]] = {
    "2ab": lambda _: AdamsBashforth2(),
    "2ab_float64": lambda _: AdamsBashforth2(torch.float64),
    "1euler": Euler,
    "2mid": Midpoint,
    "2mid_stable": lambda evaluate: Midpoint(evaluate, is_stable=True),
    "2heun_edm": Heun,
    "unipc": lambda _: UniPC(),
    "flow_euler": Euler,
}
FLOW_SOLVERS = ("unipc", "flow_euler")  # of flow times


def sample(
    denoise: Denoise,
    x_B_C_T_H_W: Tensor,
    sigmas: Tensor,
    step: str | Stepper = "2ab",
    on_step: Callable[[int, Step], None] | None = None,
) -> Tensor:
    """The clean video at the end of the levels ``sigmas``, in the dtype of the noise (at least float32).

    ``x_B_C_T_H_W`` is the state at the first level: noise times sigmas[0], or for flow times the noise itself; any
    shape that begins with the batch will do. ``denoise(x_B_C_T_H_W, sigma_B)`` estimates the clean video and is given
    both in the dtype of the noise. ``step`` is a name of SOLVERS or a stepper of your own, and ``on_step(i, step)``
    sees every step.
    If the last level is not 0, one more evaluation there gives the result. Of a single level that evaluation is all.
    Gradients are recorded if the caller has them on.
    """
    levels = [float(level) for level in sigmas.double().tolist()]
    if not levels or levels[-1] < 0 or levels[0] <= 0 or any(a <= b for a, b in pairwise(levels)):
        raise ValueError(f"Sampling needs decreasing noise levels, none negative; found {levels}.")
    dtype = torch.promote_types(x_B_C_T_H_W.dtype, torch.float32)

    def evaluate(x: Tensor, sigma: float) -> Tensor:
        sigma_B = torch.full((x.shape[0],), sigma, dtype=dtype, device=x.device)
        return denoise(x.to(dtype), sigma_B)

    stepper = solver(step, evaluate) if isinstance(step, str) else step
    x = x_B_C_T_H_W.to(dtype)
    for i, (sigma, sigma_next) in enumerate(pairwise(levels)):
        x0 = evaluate(x, sigma)
        taken = stepper.step(x, x0, sigma, sigma_next)
        if on_step is not None:
            on_step(i, taken)
        x = taken.x_next_B_C_T_H_W
    if levels[-1] > 0:
        x = evaluate(x, levels[-1])
    return x.to(dtype)


def guide(conditional_B_C_T_H_W: Tensor, unconditional_B_C_T_H_W: Tensor, guidance: float) -> Tensor:
    """conditional + guidance * (conditional - unconditional): 0 is no guidance, 7 the usual scale of 8."""
    return conditional_B_C_T_H_W + guidance * (conditional_B_C_T_H_W - unconditional_B_C_T_H_W)


def solver(name: str, evaluate: Evaluate) -> Stepper:
    """A fresh stepper of that name; those that look ahead call ``evaluate`` for themselves."""
    if name not in SOLVERS:
        raise ValueError(f"No solver is called '{name}'. Known: {', '.join(SOLVERS)}.")
    return SOLVERS[name](evaluate)
