# SPDX-License-Identifier: Apache-2.0
"""Rectified flow, written with noise levels as Predict2 trains it, or with its time as Predict2.5 does.

    x_sigma = x_0 + sigma * epsilon         x_t = (1 - t) x_0 + t epsilon         t = sigma / (1 + sigma)

The network sees x_t, which is x_sigma / (1 + sigma), and the time t, and predicts the velocity epsilon - x_0. Levels
and times may be given per sample, (B,) or (B, 1), or per latent frame, (B, T). A shift s > 1 moves times towards noise:
t -> s t / (1 + (s - 1) t). Timesteps count from 0 to 1000 = 1000 t.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

NUM_TIMESTEPS = 1000
HIGH_NOISE_TIMESTEPS = (980.0, 1000.0)
WAVER_SCALE = 1.29
FLOW_SCHEDULES = ("shift", "karras", "diffusers", "even")
DISTRIBUTIONS = ("logitnormal", "uniform", f"waver_mode_{WAVER_SCALE}")
HIGH_SIGMA_RANGE = (200.0, 100_000.0)
NUM_WEIGHT_BINS = 1000
_BELL_AT_ENDS = math.exp(-0.5)
_BELL_MEAN = (
    sum(math.exp(-2 * (k / (NUM_WEIGHT_BINS - 1) - 0.5) ** 2) for k in range(NUM_WEIGHT_BINS)) / NUM_WEIGHT_BINS
    - _BELL_AT_ENDS
)


@dataclass(frozen=True, slots=True)
class Scaling:
    """x_0 = c_skip * x_sigma + c_out * network(c_in * x_sigma, c_noise); each shaped like the noise level."""

    c_skip: Tensor
    c_out: Tensor
    c_in: Tensor
    c_noise: Tensor


def rectified_flow_scaling(sigma_B_T: Tensor, t_scaling_factor: float = 1.0) -> Scaling:
    """The scaling that makes the network a velocity predictor: 1 - t, -t, 1 - t and t (times ``t_scaling_factor``)."""
    t = flow_time(sigma_B_T)
    return Scaling(c_skip=1 - t, c_out=-t, c_in=1 - t, c_noise=t * t_scaling_factor)


def rectified_flow_weight(sigma_B_T: Tensor) -> Tensor:
    """(1 + sigma)^2 / sigma^2 = 1 / t^2: with it the squared error of x_0 is exactly that of the velocity."""
    sigma = at_least_float32(sigma_B_T)
    return ((1 + sigma) / sigma).square()


def nonuniform_weight(sigma_B_T: Tensor) -> Tensor:
    """A bell over the flow time in 1000 bins: 0 at both ends, 1 on average, largest at t = 1/2."""
    t = flow_time(sigma_B_T)
    bins = (t * NUM_WEIGHT_BINS).round().clamp(0, NUM_WEIGHT_BINS - 1).double()
    bell = torch.exp(-2 * (bins / (NUM_WEIGHT_BINS - 1) - 0.5) ** 2)
    return ((bell - _BELL_AT_ENDS) / _BELL_MEAN).to(t)


def add_noise(x0_B_C_T_H_W: Tensor, epsilon_B_C_T_H_W: Tensor, sigma_B_T: Tensor) -> Tensor:
    """x_sigma = x_0 + sigma * epsilon, with one level per sample or per latent frame."""
    return x0_B_C_T_H_W + per_frame(sigma_B_T) * epsilon_B_C_T_H_W


def draw_sigma(
    uniform_B: Tensor,
    *,
    factor: float = 1.0,
    high_sigma_ratio: float = 0.0,
    pick_B: Tensor | None = None,
    high_B: Tensor | None = None,
) -> Tensor:
    """Noise levels for training, a pure function of numbers drawn uniformly from [0, 1).

    ln(sigma / factor) is normally distributed; ``factor`` is sqrt(latent frames) for video and 1 for images. Where
    ``pick_B`` lies below ``high_sigma_ratio`` the level is log-uniform between 200 and 100000 instead, by ``high_B``.
    """
    # A float32 uniform can be exactly 0, which would be no noise at all and an infinite weight.
    sigma: Tensor = torch.special.ndtri(uniform_B.double().clamp(1e-12, 1 - 1e-12)).exp() * factor
    if high_sigma_ratio > 0:
        if pick_B is None or high_B is None:
            raise ValueError(f"high_sigma_ratio={high_sigma_ratio} needs two more uniform draws: pick_B and high_B.")
        low, high = map(math.log, HIGH_SIGMA_RANGE)
        sigma = torch.where(pick_B < high_sigma_ratio, (low + high_B.double() * (high - low)).exp(), sigma)
    return sigma.to(torch.promote_types(uniform_B.dtype, torch.float32))


def reduce_loss(
    error_B_C_T_H_W: Tensor, reduction: Literal["mean", "sum"] = "mean", scale: float | Tensor = 1.0
) -> Tensor:
    """One number: the mean of all elements, or the sum over channels and the mean of the rest; times ``scale``."""
    if reduction == "mean":
        return error_B_C_T_H_W.mean() * scale
    if reduction == "sum":
        return error_B_C_T_H_W.sum(dim=1).mean() * scale
    raise ValueError(f"There is no loss reduction '{reduction}'; there are 'mean' and 'sum'.")


# With flow times ------------------------------------------------------------------------------------------------------


def shift_time(t: Tensor, shift: float) -> Tensor:
    """s t / (1 + (s - 1) t): keeps 0 and 1, and gives pure noise more of what lies between."""
    return shift * t / (1 + (shift - 1) * t)


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
        u_B = 1 - u_B - WAVER_SCALE * (torch.cos(math.pi * u_B / 2) ** 2 - 1 + u_B)  # towards the middle from both ends
    elif distribution != "uniform":
        raise ValueError(f"There is no distribution of times '{distribution}'; there are {', '.join(DISTRIBUTIONS)}.")
    timesteps_B = training_timesteps_from_table(u_B, shift) if from_table else training_timesteps(u_B, shift)
    if high_noise_ratio > 0:
        assert pick_B is not None and high_B is not None
        low, high = HIGH_NOISE_TIMESTEPS
        high_timesteps_B = (low + (high - low) * high_B).to(timesteps_B.dtype)
        timesteps_B = torch.where(pick_B < high_noise_ratio, high_timesteps_B, timesteps_B)
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


# Levels that a sampler visits: decreasing float64 lists on the CPU ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlowSchedule:
    """Flow times from noise to 0, and the timestep that the network is given at each of them but the last.

    Called ``sigmas`` as in the samplers; in a flow the noise level is the time itself, from 1 to 0.
    """

    sigmas: Tensor  # float64 with values that float32 holds: the released samplers keep them so
    timesteps: Tensor  # one fewer; int64, of "even" float64

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


def flow_sigmas(num_steps: int, kind: str = "shift", *, shift: float = 5.0) -> FlowSchedule:
    """The lists of predict2.5 and of Wan2.1, ending in 0.

    "shift" has ``num_steps`` evaluations at equally spaced times from 0.999 to 0, shifted: those of both families' own
    UniPC. "diffusers" are its times for Wan2.1, from 1 to 0.001, of which the first is a little below 1. "even" are
    those from 1 to 0, with timesteps that are not rounded. "karras" has one evaluation more: the times of
    ``karras_sigmas`` from 200 to 0.01.
    """
    _check_num_steps(num_steps)
    ends = {"shift": (1 - 1 / NUM_TIMESTEPS, 0.0), "diffusers": (1.0, 1 / NUM_TIMESTEPS), "even": (1.0, 0.0)}
    if kind in ends:
        times = shift_time(torch.linspace(*ends[kind], num_steps + 1, dtype=torch.float64)[:-1], shift)
        if kind == "diffusers":
            times[0] -= 1e-6
    elif kind == "karras":
        times = flow_time(karras_sigmas(num_steps, 0.01, 200.0))
    else:
        raise ValueError(f"There is no flow schedule '{kind}'; there are {', '.join(FLOW_SCHEDULES)}.")
    with_end, timesteps = torch.cat([times, times.new_zeros(1)]), times * NUM_TIMESTEPS
    return FlowSchedule(with_end.float().double(), timesteps if kind == "even" else timesteps.long())


def _check_num_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"Sampling takes at least 1 step, not {num_steps}.")


# Levels and times -----------------------------------------------------------------------------------------------------


def flow_time(sigma_B_T: Tensor) -> Tensor:
    """t = sigma / (1 + sigma), in float32 or wider."""
    sigma = at_least_float32(sigma_B_T)
    return sigma / (1 + sigma)


def noise_level(t_B_T: Tensor) -> Tensor:
    """sigma = t / (1 - t), the inverse of ``flow_time``."""
    t = at_least_float32(t_B_T)
    return t / (1 - t)


def per_frame(value_B_T: Tensor) -> Tensor:
    """(B,), (B, 1) or (B, T) values as (B, 1, 1, 1, 1) or (B, 1, T, 1, 1), to be multiplied with a video."""
    if value_B_T.ndim not in (1, 2):
        found = tuple(value_B_T.shape)
        raise ValueError(f"A value per sample or latent frame has shape (B,), (B, 1) or (B, T); found {found}.")
    value_B_T = value_B_T.reshape(value_B_T.shape[0], -1)
    return value_B_T[:, None, :, None, None]


def at_least_float32(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))
