# SPDX-License-Identifier: Apache-2.0
"""Steps of a sampler, and the protocol of a stepper."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

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
