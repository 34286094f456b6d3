# SPDX-License-Identifier: Apache-2.0
"""Action-conditioned networks against golden values: what the MLPs give, one call, loss, sampling and its solvers."""

import re
from collections.abc import Callable
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor, nn

from cosmos_predict2.conditioner import Condition, conditioning_frames_mask
from cosmos_predict2.diffusion.rectified_flow import NUM_TIMESTEPS, flow_sigmas, karras_sigmas, training_timesteps
from cosmos_predict2.diffusion.solvers import Step, guide, sample
from cosmos_predict2.models.config import Predict2Video2WorldModelConfig
from cosmos_predict2.models.video2world_model import Video2WorldModel
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.objectives import Denoiser
from cosmos_predict2.world_model.world_model import SamplingOptions, WorldModel
from imaginaire.config.lazy_config import LazyCall as L
from tests.goldens import Golden, Value
from tests.models.parts import PooledPixels
from tests.nn.networks import outputs_of
from tests.parity.action_files import ActionFile, open_action_file

AREA = "action"
MLP, FORWARD = 2e-6, 2e-5


def _call(file: ActionFile, net: nn.Module, timesteps: Tensor, text: Tensor | None, **changes: Any) -> Tensor:
    x, mask = file.tensors["fwd.x"].use(), file.tensors["fwd.mask"].use()
    out: Tensor = net(x, timesteps, text, condition_mask_B_1_T_H_W=mask, **file.surroundings(), **changes)
    return out


@torch.no_grad()
def test_network_of_predict2(golden: Golden) -> None:
    file = open_action_file(golden, "predict2_action_dit")
    net, stored = file.build(), file.tensors
    found = outputs_of(net)
    timesteps_B_T, text = stored["fwd.timesteps_B_T"].use(), stored["fwd.text"].use()
    stored["fwd.out"].compare(_call(file, net, timesteps_B_T, text), of_largest=FORWARD)
    for width in ("B_D", "B_3D"):
        stored[f"fwd.action_emb_{width}"].compare(found[f"action_embedder_{width}"], of_largest=MLP)
    no_text = torch.zeros_like(text)
    with_zeros = _call(file, net, timesteps_B_T[:, 1:2], no_text)
    stored["fwd.out_shared_t_zero_text"].compare(with_zeros, of_largest=FORWARD)

    prepared = net.prepare(no_text, latent_shape=tuple(stored["fwd.x"].use().shape[2:]), skip_no_text=True)
    assert all(keys_values is None for keys_values in prepared.cross)
    assert torch.equal(_call(file, net, timesteps_B_T[:, 1:2], None, prepared=prepared), with_zeros)


@torch.no_grad()
@pytest.mark.parametrize("variant", ["chunk", "flat"])
def test_networks_of_predict25(variant: str, golden: Golden) -> None:
    file = open_action_file(golden, f"predict25_action_{variant}")
    net, stored, scale = file.build(), file.tensors, file.settings["timestep_scale"].use()
    assert net.crossattn_proj is not None
    found, text = outputs_of(net), stored["fwd.text"].use()
    given = torch.full((len(text),), file.settings["num_conditional_latents"].use())
    stored["fwd.mask"].compare(conditioning_frames_mask(given, stored["fwd.x"].use()))
    for timesteps, out in (("timesteps_B_1", "out"), ("timesteps_B_T", "out_per_frame_t")):
        stored[f"fwd.{out}"].compare(
            _call(file, net, stored[f"fwd.{timesteps}"].use() * scale, text), of_largest=FORWARD
        )
        for width in ("B_D", "B_3D"):
            stored[f"fwd.action_emb_{width}_raw"].compare(found[f"action_embedder_{width}"], of_largest=MLP)
    no_text = torch.zeros_like(text)  # the projection adds its bias: nothing may be left out
    prepared = net.prepare(no_text, latent_shape=tuple(stored["fwd.x"].use().shape[2:]), skip_no_text=True)
    assert None not in prepared.cross


LOSS, SAMPLING, LEVELS = 2e-5, 2e-4, 1e-12
FILE = "predict2_action_dit"


def _condition(file: ActionFile, text: Tensor | None = None) -> Condition:
    """The first latent frame given; a text of zeros by default."""
    given = file.tensors["smp.gt_latents"].use()
    mask = conditioning_frames_mask(torch.ones(len(given)), given)
    no_text = torch.zeros_like(file.tensors["fwd.text"].use())
    return file.condition(no_text if text is None else text, given, mask)


def test_loss(golden: Golden) -> None:
    file = open_action_file(golden, FILE)
    stored = file.tensors
    pipe = Video2WorldPipelineConfig(
        net=L(file.network)(**file.arguments),
        tokenizer=L(PooledPixels)(),
        sigma_conditional=file.settings["sigma_conditional"].use(),
        state_t=file.settings["state_t"].use(),
    )
    model = Video2WorldModel(Predict2Video2WorldModelConfig(precision="float32", pipe_config=pipe))
    model.net.load_state_dict(file.build().state_dict())
    x0, sigma = stored["smp.gt_latents"].use(), stored["loss.sigma_B_1"].use()
    output, loss = model.loss(x0, stored["loss.eps"].use(), sigma, _condition(file))
    found = {
        "xt": output["xt"],
        "x0_pred": output["x0_pred"],
        "weights": output["weights_per_sigma"],
        "mse": output["mse_loss"],
        "edm": output["edm_loss"],
        "edm_per_frame": output["edm_loss_per_frame"],
        "scaled": loss,
    }
    for name, value in found.items():
        stored[f"loss.{name}"].compare(value.reshape(stored[f"loss.{name}"].expected().shape), of_largest=LOSS)


def _denoise(file: ActionFile, guidance: float = 0.0, *texts: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The world model's estimate, for no text, or guided from the second text to the first."""
    level = file.settings["sigma_conditional"].use()
    world = WorldModel(Video2WorldPipelineConfig(sigma_conditional=level), file.build(), PooledPixels())
    conditional, unconditional = (_condition(file, text) for text in (texts or (None, None)))
    other = unconditional if guidance else None
    return world.guided(Denoiser.__call__, conditional, other, SamplingOptions(guidance=guidance, is_repeatable=True))


@torch.no_grad()
def test_sampling(golden: Golden) -> None:
    file = open_action_file(golden, FILE)
    stored, settings = file.tensors, file.settings
    sigma_max, guidance = settings["sigma_max"].use(), settings["guidance"].use()
    sigmas = karras_sigmas(settings["num_steps"].use(), settings["sigma_min"].use(), sigma_max, settings["order"].use())
    stored["smp.sigmas"].compare(sigmas, of_largest=LEVELS)
    noise = stored["smp.unit_noise"].use() * sigma_max
    steps: list[Any] = []
    final = sample(_denoise(file), noise, sigmas, "2ab", lambda i, step: steps.append(step))
    stored["smp.x0_preds"].compare(torch.stack([step.x0_B_C_T_H_W for step in steps]), of_largest=SAMPLING)
    stored["smp.traj"].compare(torch.stack([step.x_next_B_C_T_H_W for step in steps]), of_largest=SAMPLING)
    stored["smp.final"].compare(final, of_largest=SAMPLING)

    no_text = torch.zeros_like(stored["fwd.text"].use())
    assert torch.equal(sample(_denoise(file, guidance, no_text, no_text), noise, sigmas), final)
    texts = (stored["fwd.text"].use(), stored["smp.neg_text"].use())
    guided = sample(_denoise(file, guidance, *texts), noise, sigmas)
    stored["smp.final_text_neg"].compare(guided, of_largest=SAMPLING)


CLOSE = 1e-5
SAME_LEVELS = 1e-12
SAME_TIMES = 1e-3  # of 1000


def _groups(tensors: Value, pattern: str) -> list[re.Match[str]]:
    """The distinct beginnings of names."""
    found = {match[0]: match for name in tensors if (match := re.match(pattern, name))}
    assert found, f"{tensors.entry} has no {pattern}"
    return list(found.values())


def test_two_step_adams_bashforth(golden: Golden) -> None:
    tensors = golden.tensors("solver_2ab_toy.safetensors")
    settings = golden.metadata("solver_2ab_toy.safetensors")["config"]
    assert set(settings) == {"smin", "smax", "order", "g"}
    sigma_min, sigma_max, order, guidance = (settings[name].use() for name in ("smin", "smax", "order", "g"))

    def denoise(x: Tensor, sigma_B: Tensor) -> Tensor:
        # In this order: the field is so steep near its end that another rounding is seen there.
        one_more = 1 + sigma_B.reshape(-1, *[1] * (x.ndim - 1))
        conditional = 0.7 * torch.sin(0.9 * x / one_more) + 0.2 / one_more
        return guide(conditional, 0.5 * torch.cos(0.4 * x / one_more) - 0.1, guidance)

    for match in _groups(tensors, r"n(\d+)\."):
        sigmas = karras_sigmas(int(match[1]), sigma_min, sigma_max, order)
        tensors[f"{match[0]}sigmas"].compare(sigmas, of_largest=SAME_LEVELS)
        states: list[Tensor] = []

        def on_step(i: int, step: Step, states: list[Tensor] = states) -> None:
            states.append(step.x_next_B_C_T_H_W)

        final = sample(denoise, tensors[f"{match[0]}init"].use(), sigmas, "2ab", on_step)
        tensors[f"{match[0]}traj"].compare(torch.stack(states), of_largest=CLOSE)
        tensors[f"{match[0]}final_x0"].compare(final, of_largest=CLOSE)


def test_unipc(golden: Golden) -> None:
    tensors = golden.tensors("solver_unipc_toy.safetensors")
    for match in _groups(tensors, r"n(\d+)\.(shift|karras)([\d.]*\d)?\."):
        kind = cast(Literal["shift", "karras"], match[2])
        schedule = flow_sigmas(int(match[1]), kind, shift=float(match[3] or 1))
        tensors[f"{match[0]}sigmas"].compare(schedule.sigmas, of_largest=CLOSE)
        tensors[f"{match[0]}timesteps"].compare(schedule.timesteps)
        states: list[Tensor] = []

        def denoise(z: Tensor, sigma_B: Tensor, schedule=schedule) -> Tensor:
            shape = (-1, *[1] * (z.ndim - 1))
            timesteps, t = schedule.timesteps_at(sigma_B).reshape(shape), sigma_B.reshape(shape)
            return z - t * (0.8 * z - 0.3 * torch.sin(2 * z) + 0.1 * timesteps / NUM_TIMESTEPS)

        def on_step(i: int, step: Step, states: list[Tensor] = states) -> None:
            states.append(step.x_next_B_C_T_H_W)

        sample(denoise, tensors[f"{match[0]}init"].use(), schedule.sigmas, "unipc", on_step)
        tensors[f"{match[0]}traj"].compare(torch.stack(states), of_largest=CLOSE)


def test_shifted_training_times(golden: Golden) -> None:
    tensors = golden.tensors("rf_time_shift.safetensors")
    for match in _groups(tensors, r"shift([\d.]*\d)\."):
        found = training_timesteps(tensors[f"{match[0]}u"].use(), float(match[1]))
        tensors[f"{match[0]}timesteps"].compare(found, atol=SAME_TIMES)
