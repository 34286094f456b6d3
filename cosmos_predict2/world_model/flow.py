# SPDX-License-Identifier: Apache-2.0
"""Sampling with a Predict2.5 network: by flow times, x_t = (1 - t) x_0 + t eps, from pure noise at t = 1 to t = 0.

    schedule = flow.levels(num_steps)
    latents = sample_flow(velocity, noise_B_C_T_H_W, schedule)       # velocity(x_t, timesteps_B), guided or not

The network is told whole timesteps, floor(1000 t), the solver works on the exact times. Frames that are given enter the
network clean; what it says of them is replaced by their true velocity, so that the solver takes them along a straight
line to where they belong, but for the share of noise that the first time lacks.
"""

from collections.abc import Callable
from typing import Any, Literal, cast

import attrs
import torch
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.diffusion.flow_time import NUM_TIMESTEPS, interpolate, shift_time, velocity, x0_of_velocity
from cosmos_predict2.diffusion.schedules import FlowSchedule, flow_sigmas
from cosmos_predict2.diffusion.solvers import SOLVERS, sample
from cosmos_predict2.diffusion.step import Step
from cosmos_predict2.nn.dit import Prepared
from cosmos_predict2.world_model.denoiser import Denoiser
from imaginaire.config.schema import Section, above, one_of
from imaginaire.errors import ConfigError

SOLVER = "unipc"
DISTILLED = "distilled"  # the sampler of networks that were distilled to a few steps
DISTILLED_STEPS = 4
Velocity = Callable[[Tensor, Tensor], Tensor]  # (x_B_C_T_H_W, timesteps_B from 0 to 1000) -> velocity_B_C_T_H_W


@attrs.define(kw_only=True, slots=False)
class FlowConfig(Section):
    """How a Predict2.5 network is asked, in training and in sampling."""

    # Of the sampling times: above 1 there are more near pure noise, 1 leaves them as they are.
    shift: float = attrs.field(default=5.0, validator=above(0))
    # From timesteps, 0 to 1000, to what the network embeds.
    timestep_scale: float = attrs.field(default=0.001, validator=above(0))
    conditional_frame_timestep: float = -1.0  # that of given frames; below 0: that of the other frames
    schedule: str = attrs.field(default="shift", validator=one_of("shift", "karras"))
    replace_given_frames: bool = True  # by their true velocity, in training too

    def __attrs_post_init__(self) -> None:
        if isinstance(self.conditional_frame_timestep, (int, float)) and self.conditional_frame_timestep >= 1000:
            raise ConfigError(
                f"conditional_frame_timestep={self.conditional_frame_timestep}, but timesteps are below 1000 (0.1: next"
                " to no noise; -1: those of the other frames)."
            )

    @property
    def sigma_conditional(self) -> float | None:
        """The noise level that given frames have of their own, if they have one."""
        if self.conditional_frame_timestep < 0:
            return None
        t = self.conditional_frame_timestep / NUM_TIMESTEPS
        return t / (1 - t)

    @property
    def t_scaling_factor(self) -> float:
        """From flow times to what the network embeds."""
        return NUM_TIMESTEPS * self.timestep_scale

    def levels(self, num_steps: int) -> FlowSchedule:
        """The times of sampling; "karras" has one evaluation more than ``num_steps``."""
        return flow_sigmas(num_steps, cast(Literal["shift", "karras"], self.schedule), shift=self.shift)

    def velocity(
        self,
        denoiser: Denoiser,
        xt_B_C_T_H_W: Tensor,
        timesteps_B_1: Tensor,
        condition: Condition,
        prepared: Prepared | None = None,
    ) -> Tensor:
        """What the network says, given frames and all."""
        return denoiser.velocity(
            xt_B_C_T_H_W,
            timesteps_B_1,
            condition,
            timestep_scale=self.timestep_scale,
            conditional_timestep=self.conditional_frame_timestep,
            prepared=prepared,
        )

    def with_true_velocity(self, velocity_B_C_T_H_W: Tensor, condition: Condition, epsilon_B_C_T_H_W: Tensor) -> Tensor:
        """The velocity with noise - clean on the given frames, unless ``replace_given_frames`` is off."""
        given, mask = condition.gt_frames_B_C_T_H_W, condition.condition_mask_B_1_T_H_W
        if not self.replace_given_frames or condition.is_image or given is None or mask is None:
            return velocity_B_C_T_H_W
        true_B_C_T_H_W = velocity(given.to(velocity_B_C_T_H_W), epsilon_B_C_T_H_W.to(velocity_B_C_T_H_W))
        return torch.where(mask.bool(), true_B_C_T_H_W, velocity_B_C_T_H_W)


def solver_names(flow: FlowConfig | None) -> list[str]:
    """The solvers that a network can be sampled by: the two that work on flow times are for those of Predict2.5."""
    on_levels = [name for name in SOLVERS if name != SOLVER]
    return on_levels if flow is None else [SOLVER, DISTILLED, *on_levels]


def default_solver(flow: FlowConfig | None) -> str:
    """The solver that a network is sampled by unless another is asked for."""
    return "2ab" if flow is None else SOLVER


def sample_flow(
    velocity: Velocity,
    noise_B_C_T_H_W: Tensor,
    schedule: FlowSchedule,
    on_step: Callable[[int, Any], None] | None = None,
) -> Tensor:
    """The clean latents at the end of the schedule, by UniPC of order 2, for any batch of standard normal noise."""

    def denoise(x_B_C_T_H_W: Tensor, sigma_B: Tensor) -> Tensor:
        return x0_of_velocity(x_B_C_T_H_W, velocity(x_B_C_T_H_W, schedule.timesteps_at(sigma_B)), sigma_B)

    return sample(denoise, noise_B_C_T_H_W, schedule.sigmas, SOLVER, on_step)


def sample_distilled(
    velocity: Velocity,
    noise_B_C_T_H_W: Tensor,
    num_steps: int,
    shift: float = 5.0,
    on_step: Callable[[int, Any], None] | None = None,
) -> Tensor:
    """The clean latents by a network that was distilled to a few steps: at each time it estimates them, and the first
    noise is put back for the next one."""

    def denoise(x_B_C_T_H_W: Tensor, t_B: Tensor) -> Tensor:
        return x0_of_velocity(x_B_C_T_H_W, velocity(x_B_C_T_H_W, NUM_TIMESTEPS * t_B), t_B)

    return sample(denoise, noise_B_C_T_H_W, distilled_times(num_steps, shift), _SameNoise(noise_B_C_T_H_W), on_step)


def distilled_times(num_steps: int, shift: float = 5.0) -> Tensor:
    """The first ``num_steps`` of 1, 15/16, 5/6, 5/8 (quarters, shifted by 5), and 0; more steps divide time evenly."""
    evenly = 1 - torch.arange(num_steps, dtype=torch.float64) / max(num_steps, DISTILLED_STEPS)
    times = shift_time(evenly, shift)
    return torch.cat([times, times.new_zeros(1)])


class _SameNoise:
    """Jumps to the estimate and puts the same noise back, in float64."""

    def __init__(self, noise_B_C_T_H_W: Tensor) -> None:
        self._noise = noise_B_C_T_H_W.double()

    def step(self, x_B_C_T_H_W: Tensor, x0_B_C_T_H_W: Tensor, sigma: float, sigma_next: float) -> Step:
        t_B = self._noise.new_full((len(self._noise),), sigma_next)
        x_next = interpolate(x0_B_C_T_H_W.double(), self._noise, t_B)
        return Step(x_B_C_T_H_W, x0_B_C_T_H_W, x_next, sigma, sigma_next)
