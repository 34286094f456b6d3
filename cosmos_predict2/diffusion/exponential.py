# SPDX-License-Identifier: Apache-2.0
"""Exponential integrators in lambda = -ln(sigma), where dx/dlambda = x0 - x, and the sampler of distilled networks.

Coefficients are Python floats and arithmetic is in float64; each class says in which dtype it keeps the state.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_predict2.diffusion.step import Evaluate, Step

SMALLEST_STEP = 1e-6  # in lambda


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
