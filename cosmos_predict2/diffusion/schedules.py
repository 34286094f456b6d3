# SPDX-License-Identifier: Apache-2.0
"""Noise levels that a sampler visits, as decreasing float64 lists on the CPU."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cosmos_predict2.diffusion.flow_time import NUM_TIMESTEPS, shift_time
from cosmos_predict2.diffusion.rectified_flow import flow_time


@dataclass(frozen=True, slots=True)
class FlowSchedule:
    """Flow times from noise to 0, and the integer timestep that the network is given at each of them but the last.

    Called ``sigmas`` as in the samplers; in a flow the noise level is the time itself, from 1 to 0.
    """

    sigmas: Tensor  # float64 with values that float32 holds: the released samplers keep them so
    timesteps: Tensor  # int64, one fewer

    def timesteps_at(self, sigma_B: Tensor) -> Tensor:
        """The timesteps (float, on the device of ``sigma_B``) that belong to levels of this schedule."""
        levels = self.sigmas[:-1].to(sigma_B, non_blocking=True)
        nearest = (sigma_B[:, None] - levels).abs().argmin(dim=1)
        return self.timesteps.to(sigma_B, non_blocking=True)[nearest]


def karras_sigmas(num_steps: int, sigma_min: float = 0.002, sigma_max: float = 80.0, order: float = 7.0) -> Tensor:
    """num_steps + 1 levels from sigma_max to sigma_min, equally spaced in sigma^(1 / order) (EDM, eq. 5)."""
    _check_num_steps(num_steps)
    if not 0 <= sigma_min < sigma_max:
        raise ValueError(f"Noise levels run down from sigma_max to sigma_min; found {sigma_max} and {sigma_min}.")
    start, end = sigma_max ** (1 / order), sigma_min ** (1 / order)
    share = torch.arange(num_steps + 1, dtype=torch.float64) / num_steps
    return torch.pow(start + share * (end - start), order)


def flow_sigmas(
    num_steps: int,
    kind: Literal["shift", "karras"] = "shift",
    *,
    shift: float = 5.0,
    sigma_min: float = 0.01,
    sigma_max: float = 200.0,
    order: float = 7.0,
) -> FlowSchedule:
    """The lists of predict2.5, ending in 0.

    "shift" has ``num_steps`` evaluations at equally spaced times, shifted. "karras" has one more: the times of
    ``karras_sigmas(num_steps, sigma_min, sigma_max, order)``.
    """
    _check_num_steps(num_steps)
    if kind == "shift":
        evenly = torch.linspace(1 - 1 / NUM_TIMESTEPS, 0, num_steps + 1, dtype=torch.float64)[:-1]
        times = shift_time(evenly, shift)
    elif kind == "karras":
        times = flow_time(karras_sigmas(num_steps, sigma_min, sigma_max, order))
    else:
        raise ValueError(f"There is no flow schedule '{kind}'; there are 'shift' and 'karras'.")
    with_end = torch.cat([times, times.new_zeros(1)])
    return FlowSchedule(sigmas=with_end.float().double(), timesteps=(times * NUM_TIMESTEPS).long())


def _check_num_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"Sampling takes at least 1 step, not {num_steps}.")
