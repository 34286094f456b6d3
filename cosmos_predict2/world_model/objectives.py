# SPDX-License-Identifier: Apache-2.0
"""Objectives: the prediction of a network, its loss in training, and its way from noise to latents in sampling.

With t = sigma / (1 + sigma) the network sees c_in x = (1 - t) x_0 + t eps and predicts the velocity v = eps - x_0::

    x_0 = c_skip x + c_out net(c_in x, c_noise)

Conditioning frames enter the network clean and unscaled, at their own small noise level (where ``sigma_conditional`` is
None: at that of the other frames), and come out as they were. Latents, noise levels and all arithmetic around the
network are in float32 at least; the network computes in its own precision.

`EDM` (Predict2): x_t = x_0 + sigma eps, the error of x_0 is weighted to that of the velocity, noise levels in sampling.
`Flow` (Predict2.5): x_t = (1 - t) x_0 + t eps, the error of the velocity eps - x_0, flow times in sampling.

Both take noise levels sigma = t / (1 - t), which name the same mixtures. `objective_of` chooses by the config, which
may name another; no other code depends on which one a model has.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from cosmos_predict2.checkpoints.card import KNOWN, register
from cosmos_predict2.conditioner import Condition
from cosmos_predict2.diffusion import rectified_flow
from cosmos_predict2.diffusion.rectified_flow import NUM_TIMESTEPS, add_noise, at_least_float32, flow_time, per_frame
from cosmos_predict2.diffusion.solvers import FLOW_SOLVERS, SOLVERS, Denoise, SameNoise, Stepper
from cosmos_predict2.nn.dit import DiT, Prepared
from cosmos_predict2.world_model.config import FlowConfig, Video2WorldPipelineConfig
from imaginaire.buildable import describe, resolve, shipped, target_of
from imaginaire.config import lazy_config
from imaginaire.errors import ConfigError, near

shipped("solver", SOLVERS)

FLOW_SOLVER = FLOW_SOLVERS[0]
OBJECTIVE_KEY = "model.config.pipe_config.objective"
STEPS_KEY = "model.config.pipe_config.timestamps.nfe"
DISTILLED = "distilled"  # the sampler of networks that were distilled to a few steps
DISTILLED_STEPS = 4


# The denoiser ---------------------------------------------------------------------------------------------------------


class Denoiser:
    """A network with its preconditioning. Called with noisy latents, it gives the clean ones that it sees in them."""

    def __init__(self, net: DiT, config: Video2WorldPipelineConfig, flow: FlowConfig | None = None) -> None:
        if config.sigma_data != 1.0:
            raise ConfigError(f"sigma_data={config.sigma_data}, but rectified flow is defined for sigma_data=1.0.")
        self.net, self.flow = net, flow
        self.conditioning_strategy = config.conditioning_strategy
        # Conditioning frames have the noise level of training, also where a flow is sampled by noise levels.
        self.sigma_conditional = config.sigma_conditional if flow is None else flow.sigma_conditional
        self.t_scaling_factor = config.rectified_flow_t_scaling_factor if flow is None else flow.t_scaling_factor

    def __call__(
        self, xt_B_C_T_H_W: Tensor, sigma: Tensor, condition: Condition, prepared: Prepared | None = None
    ) -> Tensor:
        """The clean latents predicted at ``sigma``, one level per sample [B] or [B, 1], or per latent frame [B, T]."""
        xt = at_least_float32(xt_B_C_T_H_W)
        sigma_B_T = at_least_float32(sigma).reshape(xt.shape[0], -1)
        scaling = rectified_flow.rectified_flow_scaling(sigma_B_T, self.t_scaling_factor)
        given_c_noise = None
        if self.sigma_conditional is not None:
            given = sigma_B_T.new_full((1, 1), self.sigma_conditional)
            given_c_noise = rectified_flow.rectified_flow_scaling(given, self.t_scaling_factor).c_noise
        x_in = xt * per_frame(scaling.c_in)
        output = self._network(x_in, scaling.c_noise, condition, prepared, given_c_noise)
        x0 = per_frame(scaling.c_skip) * xt + per_frame(scaling.c_out) * output.to(xt.dtype)
        return restore_conditioning_frames(x0, condition)

    def velocity(
        self, xt_B_C_T_H_W: Tensor, timesteps_B_1: Tensor, condition: Condition, prepared: Prepared | None = None
    ) -> Tensor:
        """eps - x_0 of all frames in the form of Predict2.5: x_t = t eps + (1 - t) x_0 at timesteps 1000 t.

        Given frames enter clean, and may have a timestep of their own.
        """
        assert self.flow is not None
        xt = at_least_float32(xt_B_C_T_H_W)
        scale, conditional = self.flow.timestep_scale, self.flow.conditional_frame_timestep
        timesteps_B_T = at_least_float32(timesteps_B_1).reshape(xt.shape[0], -1)
        own = timesteps_B_T.new_full((1, 1), conditional * scale) if conditional >= 0 else None
        output = self._network(xt, timesteps_B_T * scale, condition, prepared, given_c_noise=own)
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
            given = condition.gt_frames_B_C_T_H_W.to(x_in.dtype) * condition.use_video_condition
            mask = condition.condition_mask_B_1_T_H_W.to(x_in.dtype)
            if self.conditioning_strategy == "channel_concat":
                x_in = torch.cat([x_in, given * mask], dim=1)
            elif condition.extra_B_C_T_H_W is None:
                x_in = torch.where(mask.bool(), given, x_in)
                if given_c_noise is not None:
                    views = self.net.num_views  # of each latent frame, view after view
                    share_B_T = mask.unflatten(3, (views, -1)).mean(dim=(1, 4, 5)).transpose(1, 2).flatten(1)
                    c_noise_B_T = c_noise_B_T.repeat(1, views if c_noise_B_T.shape[1] > 1 else 1)
                    c_noise_B_T = given_c_noise * share_B_T + c_noise_B_T * (1 - share_B_T)
        elif self.conditioning_strategy == "channel_concat":
            x_in = torch.cat([x_in, torch.zeros_like(x_in)], dim=1)
        if condition.extra_B_C_T_H_W is not None:
            x_in = torch.cat([x_in, condition.extra_B_C_T_H_W.to(x_in.dtype)], dim=1)
        dtype = self.net.dtype
        others = {"action_B_A_D": condition.action_B_A_D} if self.net.takes_actions else {}
        if self.net.image_channels is not None and prepared is None:
            others["image_B_S_E"] = condition.image_B_S_E
        output: Tensor = self.net(
            x_in.to(dtype),
            c_noise_B_T.to(torch.promote_types(dtype, torch.float32)),
            None if prepared is not None else condition.crossattn_emb_B_S_E.to(dtype),
            condition_mask_B_1_T_H_W=_cast(condition.condition_mask_B_1_T_H_W, dtype),
            padding_mask_B_1_H_W=_cast(condition.padding_mask_B_1_H_W, dtype),
            fps_B=condition.fps_B,
            is_image=condition.is_image,
            prepared=prepared,
            **others,
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


# Objectives -----------------------------------------------------------------------------------------------------------


# (denoiser, x_t, levels, condition, prepared) -> the prediction that guidance combines
Predict = Callable[[Denoiser, Tensor, Tensor, Condition, Prepared | None], Tensor]
# Predictions of one kind with guidance: (x_t, levels) -> prediction
Guided = Callable[[Predict], Callable[[Tensor, Tensor], Tensor]]


def velocity_by(
    denoiser: Denoiser, xt: Tensor, timesteps: Tensor, condition: Condition, prepared: Prepared | None
) -> Tensor:
    """The denoiser's velocity, by its own method where it has one."""
    return denoiser.velocity(xt, timesteps, condition, prepared)


@dataclass(frozen=True)
class SamplingPath:
    """One way from noise to latents: ``finish(sample(denoise, start, sigmas, stepper))``."""

    denoise: Denoise
    start_B_C_T_H_W: Tensor
    sigmas: Tensor
    stepper: str | Stepper
    finish: Callable[[Tensor], Tensor] = lambda latent: latent
    is_flow: bool = False  # levels are times, x = (1 - t) x0 + t noise; else x = x0 + sigma noise

    def editing(self, x0_B_C_T_H_W: Tensor, strength: float) -> "SamplingPath":
        """The last ``strength`` of the steps, from clean latents with the noise of the level where they begin."""
        first = int((len(self.sigmas) - 1) * (1 - strength))
        level = float(self.sigmas[first])
        noise = self.start_B_C_T_H_W * (level if self.is_flow else level / float(self.sigmas[0]))
        start = noise + x0_B_C_T_H_W * (1 - level if self.is_flow else 1)
        return replace(self, start_B_C_T_H_W=start, sigmas=self.sigmas[first:])


class Objective(Protocol):
    """The part of a model that differs between the families."""

    @property
    def solvers(self) -> tuple[str, ...]:
        """The names of the solvers that sample it, the default first."""

    def denoiser(self, net: DiT) -> Denoiser:
        """The network with its preconditioning."""

    def sampling_path(
        self, guided: Guided, condition: Condition, noise_B_C_T_H_W: Tensor, solver: str, num_steps: int
    ) -> SamplingPath:
        """The way of ``solver`` from standard normal noise to latents in ``num_steps`` steps."""

    def errors(
        self,
        denoiser: Denoiser,
        x0_B_C_T_H_W: Tensor,
        epsilon_B_C_T_H_W: Tensor,
        sigma_B_T: Tensor,
        condition: Condition,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The squared error that training reduces, and its parts: ``x0_pred``, and others, whose scalars are logged."""

    def errors_of_zero_velocity(self, output: Mapping[str, Any]) -> Tensor:
        """The `errors` of a network that predicts a velocity of zero, for the same draws."""


def solvers_of_noise_levels() -> tuple[str, ...]:
    """The names in SOLVERS but those of flow times. Other modules may add their own, as ``buildable("solver", name)``
    does."""
    return tuple(name for name in SOLVERS if name not in FLOW_SOLVERS)


def objective_of(config: Video2WorldPipelineConfig) -> Objective:
    """The objective that a config names, or that of its family."""
    if config.objective is not None:
        if problem := objective_problem(config.objective):
            raise ConfigError(f"{OBJECTIVE_KEY}: {problem}.")
        named: Objective = lazy_config.instantiate(config.objective, config)
        if not is_objective(named):
            raise ConfigError(f"{OBJECTIVE_KEY} made {named!r}, which has no `errors` and `sampling_path`.")
        return named
    return EDM(config) if config.flow is None else Flow(config)


def is_objective(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("errors", "sampling_path"))


def objective_problem(node: Any) -> str | None:
    """The reason why a node is not one of an objective; None where it is."""
    target = target_of(node, OBJECTIVE_KEY) if isinstance(node, Mapping) else None
    if is_objective(target) or (callable(target) and not isinstance(target, type)):  # a function may make one
        return None
    known = ", ".join(name for name, cls in KNOWN.items() if hasattr(cls, "sampling_path"))
    return (
        f"{describe(target) if target else repr(node)} is no objective. Give a class with its arguments,"
        f" {{_target_: package.module.Class, argument: value}}, or null for that of the model's family. Known: {known}"
    )


def chosen_solver(objective: Objective, name: str | None) -> str:
    """The solver of that name; without one the objective's default."""
    if name is not None and ":" in name:
        SOLVERS[name] = resolve(name, "solver")
    known = objective.solvers
    if name is not None and name not in known:
        raise ConfigError(
            f"--solver {name}: the objective {type(objective).__name__} of this model has no solver of that name."
            f"{near(name, known)} One of your own: module:Name, or the name that it has after --import MODULE."
        )
    return name or known[0]


class EDM:
    """Noise levels, clean latents: the objective of Predict2."""

    def __init__(self, config: Video2WorldPipelineConfig) -> None:
        self.config = config

    @property
    def solvers(self) -> tuple[str, ...]:
        return solvers_of_noise_levels()

    def denoiser(self, net: DiT) -> Denoiser:
        return Denoiser(net, self.config)

    def sampling_path(
        self, guided: Guided, condition: Condition, noise_B_C_T_H_W: Tensor, solver: str, num_steps: int
    ) -> SamplingPath:
        return _path_by_noise_levels(self.config, guided, noise_B_C_T_H_W, solver, num_steps)

    def errors(
        self,
        denoiser: Denoiser,
        x0_B_C_T_H_W: Tensor,
        epsilon_B_C_T_H_W: Tensor,
        sigma_B_T: Tensor,
        condition: Condition,
    ) -> tuple[Tensor, dict[str, Any]]:
        xt = add_noise(x0_B_C_T_H_W, epsilon_B_C_T_H_W, sigma_B_T)
        x0_pred = denoiser(xt, sigma_B_T, condition)
        weight_B_T = rectified_flow.rectified_flow_weight(sigma_B_T)
        if not self.config.rectified_flow_loss_weight_uniform:
            weight_B_T = weight_B_T * rectified_flow.nonuniform_weight(sigma_B_T)
        error = (x0_pred - x0_B_C_T_H_W) ** 2 * weight_B_T[:, None, :, None, None]
        return error, {"xt": xt, "x0_pred": x0_pred.detach(), "weights_per_sigma": weight_B_T}

    def errors_of_zero_velocity(self, output: Mapping[str, Any]) -> Tensor:
        x0, xt, sigma_B_T, condition = (output[key] for key in ("x0", "xt", "sigma", "condition"))
        difference = (1 - per_frame(flow_time(sigma_B_T))) * xt - x0
        if condition.condition_mask_B_1_T_H_W is not None:
            difference = difference * (1 - condition.condition_mask_B_1_T_H_W)
        return difference.square() * per_frame(output["weights_per_sigma"])


class Flow:
    """Flow times, velocities: the objective of Predict2.5. It can be sampled by noise levels, too."""

    def __init__(self, config: Video2WorldPipelineConfig) -> None:
        assert config.flow is not None
        self.config = config
        self.flow = config.flow

    @property
    def solvers(self) -> tuple[str, ...]:
        return *FLOW_SOLVERS, DISTILLED, *solvers_of_noise_levels()

    def denoiser(self, net: DiT) -> Denoiser:
        return Denoiser(net, self.config, self.flow)

    def with_true_velocity(self, velocity_B_C_T_H_W: Tensor, condition: Condition, epsilon_B_C_T_H_W: Tensor) -> Tensor:
        """The velocity with noise - clean on conditioning frames, unless ``replace_given_frames`` is off."""
        given, mask = condition.gt_frames_B_C_T_H_W, condition.condition_mask_B_1_T_H_W
        if not self.flow.replace_given_frames or condition.is_image or given is None or mask is None:
            return velocity_B_C_T_H_W
        true = rectified_flow.velocity(given.to(velocity_B_C_T_H_W), epsilon_B_C_T_H_W.to(velocity_B_C_T_H_W))
        return torch.where(mask.bool(), true, velocity_B_C_T_H_W)

    def sampling_path(
        self, guided: Guided, condition: Condition, noise_B_C_T_H_W: Tensor, solver: str, num_steps: int
    ) -> SamplingPath:
        if solver in solvers_of_noise_levels():
            return _path_by_noise_levels(self.config, guided, noise_B_C_T_H_W, solver, num_steps)
        velocity = guided(velocity_by)
        schedule = self.flow.levels(num_steps)
        is_distilled = solver == DISTILLED

        def denoise(x_B_C_T_H_W: Tensor, t_B: Tensor) -> Tensor:
            timesteps_B = NUM_TIMESTEPS * t_B if is_distilled else schedule.timesteps_at(t_B)
            predicted = self.with_true_velocity(velocity(x_B_C_T_H_W, timesteps_B), condition, noise_B_C_T_H_W)
            return rectified_flow.x0_of_velocity(x_B_C_T_H_W, predicted, t_B)

        return SamplingPath(
            denoise,
            noise_B_C_T_H_W,
            distilled_times(num_steps, self.flow.shift) if is_distilled else schedule.sigmas,
            SameNoise(noise_B_C_T_H_W) if is_distilled else solver,
            # The line that conditioning frames move along ends beside them, as the first time is a little below 1.
            finish=lambda latent: restore_conditioning_frames(latent, condition),
            is_flow=True,
        )

    def errors(
        self,
        denoiser: Denoiser,
        x0_B_C_T_H_W: Tensor,
        epsilon_B_C_T_H_W: Tensor,
        sigma_B_T: Tensor,
        condition: Condition,
    ) -> tuple[Tensor, dict[str, Any]]:
        t_B_T = flow_time(sigma_B_T)
        xt = rectified_flow.interpolate(x0_B_C_T_H_W, epsilon_B_C_T_H_W, t_B_T)
        target = rectified_flow.velocity(x0_B_C_T_H_W, epsilon_B_C_T_H_W)
        predicted = denoiser.velocity(xt, NUM_TIMESTEPS * t_B_T, condition)
        predicted = self.with_true_velocity(predicted, condition, epsilon_B_C_T_H_W)
        x0_pred = rectified_flow.x0_of_velocity(xt, predicted.detach(), t_B_T)
        output = {"xt": xt, "x0_pred": x0_pred, "velocity": predicted.detach(), "target": target}
        return (predicted - target) ** 2, output

    def errors_of_zero_velocity(self, output: Mapping[str, Any]) -> Tensor:
        target, mask = output["target"], output["condition"].condition_mask_B_1_T_H_W
        if mask is not None and self.flow.replace_given_frames:
            target = target * (1 - mask)
        return cast(Tensor, target.square())


class Student(Flow):
    """Flow times, one to four steps, guidance folded in: the objective of a network that learns what another one, its
    ``teacher``, makes of the same noise in ``teacher_steps`` steps with ``guidance`` (`models.teacher`).

    ``timestamps.nfe`` records the number of its steps. A teacher of noise levels has a student of flow times, which
    name the same mixtures. Sampling needs no teacher. With ``causal`` each latent frame is made of those before it
    alone, so that it can be shown before the next one's actions are known (`streaming`).
    """

    def __init__(
        self,
        config: Video2WorldPipelineConfig,
        *,
        teacher: str = "",
        teacher_steps: int = 8,
        guidance: float = 0.0,
        causal: bool = False,
    ) -> None:
        self.config, self.num_steps = config, int(config.timestamps.nfe)
        if not 1 <= self.num_steps <= DISTILLED_STEPS:
            raise ConfigError(
                f"{STEPS_KEY}={self.num_steps}, but a student has 1 to {DISTILLED_STEPS} steps: set it to 1."
            )
        conditional = 1000 * float(flow_time(torch.tensor(config.sigma_conditional, dtype=torch.float64)))
        scale = config.rectified_flow_t_scaling_factor / NUM_TIMESTEPS
        self.flow = config.flow or FlowConfig(timestep_scale=scale, conditional_frame_timestep=conditional)
        self.teacher, self.teacher_steps, self.guidance, self.causal = teacher, teacher_steps, guidance, causal

    @property
    def solvers(self) -> tuple[str, ...]:
        return (DISTILLED,)

    @property
    def times(self) -> Tensor:
        """The flow times of its steps, and 0."""
        return distilled_times(self.num_steps, self.flow.shift)

    def sampling_path(
        self, guided: Guided, condition: Condition, noise_B_C_T_H_W: Tensor, solver: str, num_steps: int
    ) -> SamplingPath:
        if num_steps > self.num_steps:
            at_most = "1 step" if self.num_steps == 1 else f"1 to {self.num_steps} steps"
            teacher = f" {self.teacher}" if self.teacher else ""
            raise ConfigError(
                f"{num_steps} sampling steps, but this model is a student of {at_most} (timestamps.nfe of its run):"
                f" give --num_steps {self.num_steps}, or sample its teacher{teacher}."
            )
        return super().sampling_path(guided, condition, noise_B_C_T_H_W, solver, num_steps)


register(EDM, Flow, Student)


def is_student(config: Video2WorldPipelineConfig) -> bool:
    return config.objective is not None and target_of(config.objective, OBJECTIVE_KEY) is Student


def _path_by_noise_levels(
    config: Video2WorldPipelineConfig, guided: Guided, noise_B_C_T_H_W: Tensor, solver: str, num_steps: int
) -> SamplingPath:
    levels = config.timestamps
    sigmas = rectified_flow.karras_sigmas(num_steps, levels.t_min, levels.t_max, levels.order)
    clean = guided(lambda denoiser, *inputs: denoiser(*inputs))
    return SamplingPath(clean, noise_B_C_T_H_W * levels.t_max, sigmas, solver)


def distilled_times(num_steps: int, shift: float = 5.0) -> Tensor:
    """The first ``num_steps`` of 1, 15/16, 5/6, 5/8 (quarters, shifted by 5), and 0; more steps divide time evenly."""
    evenly = 1 - torch.arange(num_steps, dtype=torch.float64) / max(num_steps, DISTILLED_STEPS)
    times = rectified_flow.shift_time(evenly, shift)
    return torch.cat([times, times.new_zeros(1)])
