# SPDX-License-Identifier: Apache-2.0
"""Preconditioning, loss and gradients, guided sampling, the conditioner and LoRA against golden values."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.conditioner import (
    NEGATIVE_TEXT_KEY,
    TEXT_KEY,
    Condition,
    Conditioner,
    ConditionerConfig,
    DropoutConfig,
    conditioning_frames_mask,
)
from cosmos_predict2.diffusion.rectified_flow import add_noise, noise_level, per_frame
from cosmos_predict2.diffusion.solvers import sample
from cosmos_predict2.models.config import LORA_TARGETS, Predict2p5Video2WorldModelConfig, Predict2Video2WorldModelConfig
from cosmos_predict2.models.video2world_model import Draws, Video2WorldModel
from cosmos_predict2.nn.dit import DiT, Video2WorldDiT
from cosmos_predict2.world_model.config import FlowConfig, Video2WorldPipelineConfig
from cosmos_predict2.world_model.objectives import Denoiser, SamplingPath
from cosmos_predict2.world_model.world_model import SamplingOptions, WorldModel, initial_noise
from imaginaire.checkpoint import weights
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.optim import lora
from tests.goldens import Golden, Value
from tests.models.parts import NET as TINY
from tests.models.parts import PooledPixels
from tests.parity.networks import network, with_weights

AREA = "video2world"


def condition_of(tensors: Value, **values: Any) -> Condition:
    """The condition that a file's inputs describe; the given frames are passed by name."""
    return Condition(
        crossattn_emb_B_S_E=tensors["crossattn_emb"].use(),
        padding_mask_B_1_H_W=tensors["padding_mask"].use(),
        fps_B=tensors["fps"].use(),
        **values,
    )


# --- denoise


def test_denoising(golden: Golden) -> None:
    stored = golden.tensors("denoise_a.safetensors")
    denoise, close = Denoiser(network(golden), Video2WorldPipelineConfig()), golden.tolerance("denoise")
    x0, epsilon = stored["x0"].use(), stored["epsilon"].use()
    sigma_B, sigma_B_T = stored["sigma_B"].use(), stored["sigma_B_T"].use()
    video = condition_of(
        stored, gt_frames_B_C_T_H_W=stored["gt_frames"].use(), condition_mask_B_1_T_H_W=stored["condition_mask"].use()
    )
    cases = {
        "video": (sigma_B[:, None], video),
        "video_no_video_condition": (sigma_B[:, None], replace(video, use_video_condition=False)),
        "per_frame_sigma": (sigma_B_T, video),
    }
    with torch.no_grad():
        for name, (sigma, condition) in cases.items():
            noisy = add_noise(x0, epsilon, sigma)
            found = denoise(noisy, sigma, condition)
            stored[f"{name}.x0_pred"].compare(found, **close)
            stored[f"{name}.eps_pred"].compare((noisy - found) / per_frame(sigma), **close)
        noisy = add_noise(x0, epsilon, sigma_B[:, None])
        image = condition_of(stored, is_image=True)
        stored["image.x0_pred"].compare(denoise(noisy[:, :, :1], sigma_B, image), **close)


# --- one training step


def training_model(golden: Golden, **options: Any) -> Video2WorldModel:
    cfg = golden.json("meta.json")["dit_a"]["cfg"].use()
    pipe = Video2WorldPipelineConfig(net=L(Video2WorldDiT)(**cfg), tokenizer=L(PooledPixels)())
    model = Video2WorldModel(Predict2Video2WorldModelConfig(precision="float32", pipe_config=pipe, **options))
    model.net.load_state_dict(network(golden).state_dict())
    return model


def test_loss_and_gradients(golden: Golden) -> None:
    stored = golden.tensors("train_a.safetensors")
    x0 = stored["x0"].use()
    condition = condition_of(stored, gt_frames_B_C_T_H_W=x0, condition_mask_B_1_T_H_W=stored["condition_mask"].use())
    arguments = (x0, stored["epsilon"].use(), stored["sigma_B_1"].use(), condition)
    model = training_model(golden, loss_reduce="mean", loss_scale=10.0)
    output, loss = model.loss(*arguments)
    stored["xt"].compare(output["xt"], **golden.tolerance("xt"))
    stored["x0_pred"].compare(output["x0_pred"], **golden.tolerance("denoise"))
    stored["weights_per_sigma"].compare(output["weights_per_sigma"], **golden.tolerance("coefficients"))
    for name in ("mse_loss", "edm_loss", "edm_loss_per_frame"):
        # Given frames have an error of 0, which no relative bound describes.
        stored[name].compare(output[name], **golden.tolerance("loss") | dict(atol=1e-12))
    stored["loss_reduce_mean_scale10"].compare(loss, **golden.tolerance("loss"))
    _, summed = training_model(golden, loss_reduce="sum", loss_scale=10.0).loss(*arguments)
    stored["loss_reduce_sum_scale10"].compare(summed, **golden.tolerance("loss"))

    loss.backward()
    gradients = {name: p.grad for name, p in model.net.named_parameters()}
    compared = [name.removeprefix("grad.") for name in stored if name.startswith("grad.")]
    assert set(compared) == {name for name, p in model.net.named_parameters() if p.numel() <= 4096}
    for name in compared:
        stored[f"grad.{name}"].compare(gradients[name], **golden.tolerance("grad"))
    norms = {name: float(g.norm()) for name, g in gradients.items() if g is not None}
    norms["__total__"] = float(torch.tensor(list(norms.values())).double().norm())
    golden.json("train_a.grad_norms.json").compare(norms, **golden.tolerance("grad_norm") | dict(atol=1e-12))


# --- sampling


def guided_path(golden: Golden, stored: Value, unconditional_text: Tensor, num_steps: int) -> SamplingPath:
    """The guided denoiser of the file with its initial state and levels."""
    settings = golden.json("meta.json")["sampler_a"]
    gt = stored["gt_latent"].use()
    given = torch.full((gt.shape[0],), settings["ncond"].use())
    condition = condition_of(stored).with_conditioning_frames(gt, given)
    other = replace(condition, crossattn_emb_B_S_E=unconditional_text)
    world = WorldModel(Video2WorldPipelineConfig(), network(golden), PooledPixels())
    options = SamplingOptions(guidance=settings["guidance"].use(), num_steps=num_steps)
    path = world.sampling_path(condition, other, initial_noise(tuple(gt.shape), settings["seed"].use()), options)
    stored["x_sigma_max"].compare(path.start_B_C_T_H_W, **golden.tolerance("exact"))
    return path


@torch.no_grad()
@pytest.mark.parametrize("kind", ["neg_prompt", "dropout_uncond"])
def test_guided_sampling(golden: Golden, kind: str) -> None:
    stored = golden.tensors("sampler_a.safetensors")
    batch = {TEXT_KEY: stored["crossattn_emb"].use(), "fps": stored["fps"].use()}
    batch["padding_mask"] = stored["padding_mask"].use()
    if kind == "neg_prompt":
        batch[NEGATIVE_TEXT_KEY] = stored["neg_crossattn_emb"].use()
    _, unconditional = Conditioner().guidance_pair(batch)
    steps = golden.json("meta.json")["sampler_a"]["steps"].use()
    path = guided_path(golden, stored, unconditional.crossattn_emb_B_S_E, steps)
    close = golden.tolerance("sampler")

    def on_step(i: int, step: Any) -> None:
        for name, value in (("x0_pred", step.x0_B_C_T_H_W), ("sample", step.x_next_B_C_T_H_W)):
            if f"{kind}.step{i}.{name}" in stored:
                stored[f"{kind}.step{i}.{name}"].compare(value, **close)

    final = sample(path.denoise, path.start_B_C_T_H_W, path.sigmas, path.stepper, on_step)
    stored[f"{kind}.final"].compare(path.finish(final), **close)


@torch.no_grad()
def test_general_sampler(golden: Golden) -> None:
    stored = golden.tensors("sampler_a.safetensors")
    nfe = golden.json("meta.json")["sampler_a"]["steps"].use()
    names = [match[1] for key in stored if (match := re.fullmatch(r"res_sampler\.(.+)\.final", key))]
    assert names
    for name in names:
        steps = nfe if name == "2ab" else nfe // int(name[0])
        path = guided_path(golden, stored, stored["neg_crossattn_emb"].use(), steps)
        solver = "2ab_float64" if name == "2ab" else name
        found = sample(path.denoise, path.start_B_C_T_H_W, path.sigmas, solver)
        stored[f"res_sampler.{name}.final"].compare(found, **golden.tolerance("sampler"))


# --- conditioner


def test_conditioner(golden: Golden) -> None:
    stored, settings = golden.tensors("conditioner.safetensors"), golden.json("meta.json")["conditioner"]
    text_dropout = DropoutConfig(dropout_rate=settings["text_dropout"].use())
    conditioner = Conditioner(ConditionerConfig(text=text_dropout))
    text, exact = stored["in.t5_text_embeddings"].use(), golden.tolerance("exact")
    size = text.shape[0]
    batch = {TEXT_KEY: text, "fps": torch.full((size,), 16), "padding_mask": torch.zeros(size, 1, 8, 8)}

    torch.manual_seed(settings["torch_seed"].use())
    draws = sum(bool(re.fullmatch(r"train_draw\d+\.crossattn_emb", key)) for key in stored)
    for i in range(draws):
        keep = conditioner.draw_keep([torch.default_generator] * size)
        condition = conditioner.condition(batch, is_image=False, keep=keep)
        stored[f"train_draw{i}.crossattn_emb"].compare(condition.crossattn_emb_B_S_E, **exact)

    conditional, unconditional = conditioner.guidance_pair(batch)
    stored["cond.crossattn_emb"].compare(conditional.crossattn_emb_B_S_E, **exact)
    stored["uncond.crossattn_emb"].compare(unconditional.crossattn_emb_B_S_E, **exact)
    _, negative = conditioner.guidance_pair({**batch, NEGATIVE_TEXT_KEY: stored["in.neg_t5_text_embeddings"].use()})
    stored["neg.crossattn_emb"].compare(negative.crossattn_emb_B_S_E, **exact)


def test_random_given_frames(golden: Golden) -> None:
    stored = golden.tensors("conditioner.safetensors")
    masks = [key for key in stored if key.startswith("random_cond_mask_")]
    assert masks
    for key in masks:
        name = re.fullmatch(r"random_cond_mask_B(\d+)_min(\d+)_max(\d+)", key)
        assert name is not None, key
        size, low, high = map(int, name.groups())
        torch.manual_seed(golden.json("meta.json")["conditioner"]["torch_seed"].use())
        num_frames = Draws(size, positions=None).integers(low, high + 1, "given_frames")
        expected: Tensor = stored[key].expected()
        assert torch.equal(conditioning_frames_mask(num_frames, expected), expected)


# --- LoRA


@torch.no_grad()
def test_lora(golden: Golden) -> None:
    keys, stored = golden.json("lora_a.keys.json"), golden.tensors("lora_a.safetensors")
    net = network(golden)
    lora.inject(net, keys["r"].use(), keys["alpha"].use(), LORA_TARGETS)
    keys["keys"].compare({name: list(value.shape) for name, value in net.state_dict().items()})
    expected = keys["trainable"].expected()
    assert {name for name, p in net.named_parameters() if p.requires_grad} == set(expected)
    factors = {name: stored[name].use() for name in stored if not name.startswith("out.")}
    targets = {f"net.{name}": value for name, value in lora.adapter_state(net).items()}
    weights.load_into(targets, factors).require()

    inputs, close = golden.tensors("dit_a.forward.safetensors"), golden.tolerance("denoise")

    def output() -> Tensor:
        result: Tensor = net(
            inputs["x"].use(),
            inputs["timesteps_B_T"].use(),
            inputs["crossattn_emb"].use(),
            condition_mask_B_1_T_H_W=inputs["condition_mask"].use(),
            padding_mask_B_1_H_W=inputs["padding_mask"].use(),
            fps_B=inputs["fps"].use(),
        )
        return result

    stored["out.per_frame_t"].compare(output(), **close)
    lora.merge(net)
    stored["out.per_frame_t"].compare(output(), **close)


# --- the velocity form of Predict2.5


def velocity_network(golden: Golden) -> DiT:
    cfg = dict(golden.json("rf25.json")["cfg"].use())
    projects = cfg.pop("use_crossattn_projection", None)  # repeats the two widths
    net = Video2WorldDiT(**cfg)
    assert projects is None or projects == (net.crossattn_proj is not None)
    return with_weights(net, golden, "rf25.weights.safetensors")


@torch.no_grad()
def test_velocity_with_frames_replaced(golden: Golden) -> None:
    stored, scale = golden.tensors("rf25.train.safetensors"), golden.json("rf25.json")["timestep_scale"].use()
    golden.json("rf25.json")["u"].compare(stored["u"].use().flatten(), rtol=1e-6)
    net = velocity_network(golden)
    x0, mask = stored["x0"].use(), stored["condition_mask"].use()
    condition = condition_of(stored, gt_frames_B_C_T_H_W=x0, condition_mask_B_1_T_H_W=mask)
    xt, target, timesteps = stored["xt"].use(), stored["vt"].use(), stored["timesteps"].use()
    epsilon, sigma_B_1 = target + x0, noise_level(timesteps.double() / 1000).float().reshape(-1, 1)

    def compare(case: str, size: int, condition: Condition, **flow: Any) -> None:
        """Compare training on these draws: the velocity with given frames replaced, and the losses."""
        model = velocity_model(net, FlowConfig(timestep_scale=scale, **flow))
        output, loss = model.loss(x0[:size], epsilon[:size], sigma_B_1[:size], condition)
        torch.testing.assert_close(output["xt"], xt[:size], rtol=1e-5, atol=1e-5)
        stored[f"{case}.velocity"].compare(output["velocity"], **golden.tolerance("denoise"))
        stored[f"{case}.per_instance_mse"].compare(output["edm_loss_per_frame"].mean(dim=1), **golden.tolerance("loss"))
        stored[f"{case}.loss"].compare(loss, **golden.tolerance("loss"))

    compare("default", len(x0), condition)
    first = replace(
        condition,
        crossattn_emb_B_S_E=condition.crossattn_emb_B_S_E[:1],
        padding_mask_B_1_H_W=condition.padding_mask_B_1_H_W[:1] if condition.padding_mask_B_1_H_W is not None else None,
        fps_B=condition.fps_B[:1] if condition.fps_B is not None else None,
        gt_frames_B_C_T_H_W=x0[:1],
        condition_mask_B_1_T_H_W=mask[:1],
    )
    compare("cond_timestep", 1, first, conditional_frame_timestep=0.1, replace_given_frames=False)


def velocity_model(net: DiT, flow: FlowConfig) -> Video2WorldModel:
    """The model of Predict2.5 that trains a network."""
    pipe = Video2WorldPipelineConfig(net=L(Video2WorldDiT)(**TINY), tokenizer=L(PooledPixels)(), state_t=3, flow=flow)
    model = Video2WorldModel(Predict2p5Video2WorldModelConfig(pipe_config=pipe, precision="float32"))
    model.world = WorldModel(pipe, net)
    return model
