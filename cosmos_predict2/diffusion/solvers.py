# SPDX-License-Identifier: Apache-2.0
"""The sampling loop, and the solvers by name.

A solver takes the state from one noise level to the next, given the estimate of the clean video there. All but "unipc"
work on x = x0 + sigma epsilon; "unipc" works on flow times, x_t = (1 - t) x0 + t epsilon.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from cosmos_predict2.diffusion.exponential import AdamsBashforth2, Euler, Heun, Midpoint
from cosmos_predict2.diffusion.flow_time import interpolate
from cosmos_predict2.diffusion.step import Denoise, Evaluate, Step, Stepper
from cosmos_predict2.diffusion.unipc import UniPC

SOLVERS: dict[str, Callable[[Evaluate], Stepper]] = {
    "2ab": lambda _: AdamsBashforth2(),
    "2ab_float64": lambda _: AdamsBashforth2(torch.float64),
    "1euler": Euler,
    "2mid": Midpoint,
    "2mid_stable": lambda evaluate: Midpoint(evaluate, is_stable=True),
    "2heun_edm": Heun,
    "unipc": lambda _: UniPC(),
}


class SameNoise:
    """A stepper on flow times that jumps to the estimate and puts the same noise back, in float64."""

    def __init__(self, noise_B_C_T_H_W: Tensor) -> None:
        self._noise = noise_B_C_T_H_W.double()

    def step(self, x_B_C_T_H_W: Tensor, x0_B_C_T_H_W: Tensor, sigma: float, sigma_next: float) -> Step:
        t_B = self._noise.new_full((len(self._noise),), sigma_next)
        x_next = interpolate(x0_B_C_T_H_W.double(), self._noise, t_B)
        return Step(x_B_C_T_H_W, x0_B_C_T_H_W, x_next, sigma, sigma_next)


def sample(
    denoise: Denoise,
    x_B_C_T_H_W: Tensor,
    sigmas: Tensor,
    step: str | Stepper = "2ab",
    on_step: Callable[[int, Step], None] | None = None,
    *,
    final_denoise: bool = True,
) -> Tensor:
    """The clean video at the end of the levels ``sigmas``, in the dtype of the noise (at least float32).

    ``x_B_C_T_H_W`` is the state at the first level: noise times sigmas[0], or for flow times the noise itself; any
    shape that begins with the batch will do. ``denoise(x_B_C_T_H_W, sigma_B)`` estimates the clean video and is given
    both in the dtype of the noise. ``step`` is a name of SOLVERS or a stepper of your own, and ``on_step(i, step)``
    sees every step.
    If the last level is not 0, one more evaluation there gives the result, unless ``final_denoise`` is off. Of a single
    level that evaluation is all.
    Gradients are recorded if the caller has them on.
    """
    levels = _decreasing(sigmas, least=1 if final_denoise else 2)
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
    if final_denoise and levels[-1] > 0:
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


def _decreasing(sigmas: Tensor, least: int) -> list[float]:
    levels = [float(level) for level in sigmas.double().tolist()]
    if len(levels) < least or levels[-1] < 0 or levels[0] <= 0 or any(a <= b for a, b in pairwise(levels)):
        raise ValueError(f"Sampling needs {least} or more decreasing noise levels, none negative; found {levels}.")
    return levels
