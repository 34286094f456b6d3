# SPDX-License-Identifier: Apache-2.0
"""Rectified flow written with its time: x_t = (1 - t) x_0 + t epsilon, as predict2.5 trains it.

The network predicts the velocity epsilon - x_0. A shift s > 1 moves the times towards noise:
t -> s t / (1 + (s - 1) t). Timesteps count from 0 to 1000 = 1000 t.
"""

import math

import torch
from torch import Tensor

from cosmos_predict2.diffusion.rectified_flow import at_least_float32, per_frame

NUM_TIMESTEPS = 1000
HIGH_NOISE_TIMESTEPS = (980.0, 1000.0)
WAVER_SCALE = 1.29
DISTRIBUTIONS = ("logitnormal", "uniform", f"waver_mode_{WAVER_SCALE}")


def shift_time(t: Tensor, shift: float) -> Tensor:
    """s t / (1 + (s - 1) t): keeps 0 and 1, and gives pure noise more of what lies between."""
    return shift * t / (1 + (shift - 1) * t)


def waver_mode(uniform_B: Tensor, scale: float = WAVER_SCALE) -> Tensor:
    """Times 1 - u - s (cos^2(pi u / 2) - 1 + u): uniform draws moved towards both ends' middle, s = 1.29 by default."""
    u = at_least_float32(uniform_B)
    return 1 - u - scale * (torch.cos(math.pi * u / 2) ** 2 - 1 + u)


def training_timesteps(u_B: Tensor, shift: float) -> Tensor:
    """1000 times the shifted time of u in [0, 1]; u = sigmoid of a normal draw in the released recipe."""
    return NUM_TIMESTEPS * shift_time(at_least_float32(u_B), shift)


def timestep_table(shift: float, num_timesteps: int = NUM_TIMESTEPS) -> Tensor:
    """The decreasing list of shifted timesteps, float32: the first is 1000 (pure noise), the last above 0."""
    t = torch.arange(num_timesteps, 0, -1, dtype=torch.float64) / num_timesteps
    return (num_timesteps * shift_time(t, shift)).float()


def training_timesteps_from_table(u_B: Tensor, shift: float, num_timesteps: int = NUM_TIMESTEPS) -> Tensor:
    """The entry floor(1000 u) of ``timestep_table``: here u near 0 is noise, the reverse of ``training_timesteps``."""
    index = (at_least_float32(u_B) * num_timesteps).long().clamp(0, num_timesteps - 1)
    return timestep_table(shift, num_timesteps).to(u_B.device)[index]


def mix_high_noise(timesteps_B: Tensor, pick_B: Tensor, high_B: Tensor, ratio: float = 0.05) -> Tensor:
    """The timesteps, but drawn from 980 to 1000 by ``high_B`` where ``pick_B`` lies below ``ratio`` (both uniform)."""
    low, high = HIGH_NOISE_TIMESTEPS
    return torch.where(pick_B < ratio, (low + (high - low) * high_B).to(timesteps_B.dtype), timesteps_B)


def draw_timesteps(
    uniform_B: Tensor,
    *,
    distribution: str = "logitnormal",
    shift: float = 5.0,
    from_table: bool = False,
    high_noise_ratio: float = 0.0,
    pick_B: Tensor | None = None,
    high_B: Tensor | None = None,
) -> Tensor:
    """Timesteps for training, a pure function of numbers drawn uniformly from [0, 1).

    The share ``high_noise_ratio`` lies from 980 to 1000 instead, by ``pick_B`` and ``high_B``. ``from_table`` looks the
    shifted time up in 1000 entries, as the first models of this family were trained.
    """
    # A float32 uniform can be exactly 0, whose normal value is infinite.
    u_B = at_least_float32(uniform_B)
    if distribution == "logitnormal":
        u_B = torch.sigmoid(torch.special.ndtri(uniform_B.double().clamp(1e-12, 1 - 1e-12))).to(u_B)
    elif distribution == f"waver_mode_{WAVER_SCALE}":
        u_B = waver_mode(u_B)
    elif distribution != "uniform":
        raise ValueError(f"There is no distribution of times '{distribution}'; there are {', '.join(DISTRIBUTIONS)}.")
    timesteps_B = training_timesteps_from_table(u_B, shift) if from_table else training_timesteps(u_B, shift)
    if high_noise_ratio > 0:
        assert pick_B is not None and high_B is not None
        timesteps_B = mix_high_noise(timesteps_B, pick_B, high_B, high_noise_ratio)
    return timesteps_B


def interpolate(x0_B_C_T_H_W: Tensor, epsilon_B_C_T_H_W: Tensor, t_B_T: Tensor) -> Tensor:
    """x_t = (1 - t) x_0 + t epsilon, with one time per sample or per latent frame."""
    t = per_frame(at_least_float32(t_B_T))
    return t * epsilon_B_C_T_H_W + (1 - t) * x0_B_C_T_H_W


def velocity(x0_B_C_T_H_W: Tensor, epsilon_B_C_T_H_W: Tensor) -> Tensor:
    """epsilon - x_0, what the network is trained to predict at every time."""
    return epsilon_B_C_T_H_W - x0_B_C_T_H_W


def x0_of_velocity(x_t_B_C_T_H_W: Tensor, velocity_B_C_T_H_W: Tensor, t_B_T: Tensor) -> Tensor:
    """x_t - t v, the clean estimate that belongs to a velocity."""
    return x_t_B_C_T_H_W - per_frame(at_least_float32(t_B_T)) * velocity_B_C_T_H_W
