# SPDX-License-Identifier: Apache-2.0
"""UniPC of order 2 on flow times: each estimate first corrects the step before it, then predicts the next one.

x_t = (1 - t) x0 + t epsilon, lambda = ln((1 - t) / t), the "bh2" form, on estimates of x0.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from cosmos_predict2.diffusion.step import Step


@dataclass(frozen=True, slots=True)
class _Past:
    """The values of an earlier step that a later one needs."""

    z: Tensor  # the corrected state, float64
    x0: Tensor
    sigma: float
    order: int


class UniPC:
    """Keeps its states in the dtype of x; the last step, to level 0, gives the estimate before it."""

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
