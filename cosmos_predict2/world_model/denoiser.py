# SPDX-License-Identifier: Apache-2.0
"""Denoising of latents: scaling, conditioning frames, the network, and scaling back.

With t = sigma / (1 + sigma) the network sees c_in x = (1 - t) x_0 + t eps and predicts the velocity v = eps - x_0::

    x_0 = c_skip x + c_out net(c_in x, c_noise)

Conditioning frames enter the network clean and unscaled, at their own small noise level (where ``sigma_conditional`` is
None: at that of the other frames), and come out as they were.
Latents, noise levels and all arithmetic around the network are in float32 at least; the network computes in its own
precision.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_predict2.conditioner import Condition
from cosmos_predict2.diffusion.rectified_flow import (
    Scaling,
    at_least_float32,
    edm_scaling,
    per_frame,
    rectified_flow_scaling,
)
from cosmos_predict2.nn.dit import DiT, Prepared
from imaginaire.errors import ConfigError

SCALINGS = ("rectified_flow", "edm")
STRATEGIES = ("frame_replace", "channel_concat")


@dataclass(frozen=True)
class Prediction:
    """The clean latents and the noise that the network sees in noisy ones."""

    x0_B_C_T_H_W: Tensor
    epsilon_B_C_T_H_W: Tensor


class Denoiser:
    """A network with its preconditioning. Called with noisy latents, it gives what they were."""

    def __init__(
        self,
        net: DiT,
        *,
        sigma_data: float = 1.0,
        sigma_conditional: float | None = 1e-4,
        conditioning_strategy: str = "frame_replace",
        t_scaling_factor: float = 1.0,
        scaling: str = "rectified_flow",
    ) -> None:
        if scaling not in SCALINGS or conditioning_strategy not in STRATEGIES:
            raise ConfigError(
                f"scaling={scaling!r} must be one of {', '.join(SCALINGS)}, and"
                f" conditioning_strategy={conditioning_strategy!r} one of {', '.join(STRATEGIES)}."
            )
        if scaling == "rectified_flow" and sigma_data != 1.0:
            raise ConfigError(f"sigma_data={sigma_data}, but rectified flow is defined for sigma_data=1.0.")
        self.net = net
        self.sigma_data = sigma_data
        self.sigma_conditional = sigma_conditional
        self.conditioning_strategy = conditioning_strategy
        self._scaling: Callable[[Tensor], Scaling] = (
            (lambda sigma: rectified_flow_scaling(sigma, t_scaling_factor))
            if scaling == "rectified_flow"
            else (lambda sigma: edm_scaling(sigma, sigma_data))
        )

    def __call__(
        self, xt_B_C_T_H_W: Tensor, sigma: Tensor, condition: Condition, prepared: Prepared | None = None
    ) -> Prediction:
        """The prediction at ``sigma``, one level per sample [B] or [B, 1], or per latent frame [B, T]."""
        xt = at_least_float32(xt_B_C_T_H_W)
        sigma_B_T = at_least_float32(sigma).reshape(xt.shape[0], -1)
        scaling = self._scaling(sigma_B_T)
        given_c_noise = None
        if self.sigma_conditional is not None:
            given_c_noise = self._scaling(sigma_B_T.new_full((1, 1), self.sigma_conditional)).c_noise
        output = self._network(
            xt * per_frame(scaling.c_in), scaling.c_noise, condition, prepared, given_c_noise=given_c_noise
        )
        x0 = per_frame(scaling.c_skip) * xt + per_frame(scaling.c_out) * output.to(xt.dtype)
        x0 = restore_conditioning_frames(x0, condition)
        return Prediction(x0, (xt - x0) / per_frame(sigma_B_T))

    def velocity(
        self,
        xt_B_C_T_H_W: Tensor,
        timesteps_B_1: Tensor,
        condition: Condition,
        *,
        timestep_scale: float = 0.001,
        conditional_timestep: float = -1.0,
        prepared: Prepared | None = None,
    ) -> Tensor:
        """eps - x_0 in the form of Predict2.5: x_t = t eps + (1 - t) x_0 at timesteps 1000 t.

        Given frames enter clean; with ``conditional_timestep`` >= 0 they have that timestep of their own.
        """
        xt = at_least_float32(xt_B_C_T_H_W)
        timesteps_B_T = at_least_float32(timesteps_B_1).reshape(xt.shape[0], -1)
        own = None
        if conditional_timestep >= 0:
            own = timesteps_B_T.new_full((1, 1), conditional_timestep * timestep_scale)
        output = self._network(xt, timesteps_B_T * timestep_scale, condition, prepared, given_c_noise=own)
        return output.to(xt.dtype)

    def _network(
        self,
        x_in: Tensor,
        c_noise_B_T: Tensor,
        condition: Condition,
        prepared: Prepared | None,
        given_c_noise: Tensor | None,
    ) -> Tensor:
        """The network's output for scaled latents; None leaves the noise level of given frames as it is."""
        if not condition.is_image and condition.condition_mask_B_1_T_H_W is not None:
            assert condition.gt_frames_B_C_T_H_W is not None
            given = condition.gt_frames_B_C_T_H_W.to(x_in.dtype) / self.sigma_data * condition.use_video_condition
            mask = condition.condition_mask_B_1_T_H_W.to(x_in.dtype)
            if self.conditioning_strategy == "channel_concat":
                x_in = torch.cat([x_in, given * mask], dim=1)
            else:
                x_in = torch.where(mask.bool(), given, x_in)
                if given_c_noise is not None:
                    share_B_T = mask.mean(dim=(1, 3, 4))
                    c_noise_B_T = given_c_noise * share_B_T + c_noise_B_T * (1 - share_B_T)
        elif self.conditioning_strategy == "channel_concat":
            x_in = torch.cat([x_in, torch.zeros_like(x_in)], dim=1)
        dtype = self.net.dtype
        actions = {"action_B_A_D": condition.action_B_A_D} if self.net.takes_actions else {}
        output: Tensor = self.net(
            x_in.to(dtype),
            c_noise_B_T.to(torch.promote_types(dtype, torch.float32)),
            None if prepared is not None else condition.crossattn_emb_B_S_E.to(dtype),
            condition_mask_B_1_T_H_W=_cast(condition.condition_mask_B_1_T_H_W, dtype),
            padding_mask_B_1_H_W=_cast(condition.padding_mask_B_1_H_W, dtype),
            fps_B=condition.fps_B,
            is_image=condition.is_image,
            prepared=prepared,
            **actions,
        )
        return at_least_float32(output)


def restore_conditioning_frames(x0_B_C_T_H_W: Tensor, condition: Condition) -> Tensor:
    """The latents with the conditioning frames as they were given."""
    given, mask = condition.gt_frames_B_C_T_H_W, condition.condition_mask_B_1_T_H_W
    if condition.is_image or given is None or mask is None:
        return x0_B_C_T_H_W
    return torch.where(mask.bool(), given.to(x0_B_C_T_H_W.dtype), x0_B_C_T_H_W)


def _cast(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if value is None else value.to(dtype)
