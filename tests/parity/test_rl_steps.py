# SPDX-License-Identifier: Apache-2.0
"""Stochastic steps, their probabilities, and the published step of world-model RL, against golden values."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cosmos_predict2.diffusion import solvers
from cosmos_predict2.diffusion.rectified_flow import Scaling, karras_sigmas, per_frame, rectified_flow_scaling
from cosmos_predict2.diffusion.solvers import Step
from cosmos_predict2.diffusion.transitions import (
    ChurnChain,
    Normal,
    flow_std,
    flow_step,
    log_ratio,
    sde_coefficient,
)
from cosmos_predict2.rl import objectives
from cosmos_predict2.rl.clips import rollout
from cosmos_predict2.rl.clips.rollout import ChainPath, Data, KeptStep, Losses
from cosmos_predict2.rl.config import AdvantageConfig, RLConfig
from tests.goldens import Golden, Value

AREA = "rl"
STEP = dict(of_largest=2e-5, atol=2e-5)
LOSS = GRADIENT = dict(of_largest=1e-4)
STEP_GRADIENT = dict(of_largest=1e-3, atol=1e-7)
SIGMA_CONDITIONAL = 1e-4
LOSS_SCALE = 10.0
LARGEST_ADVANTAGE = 5.0
CHAIN_SOLVERS = ("2ab", "1euler")


def _prefixes(tensors: Value) -> list[str]:
    return sorted({name.split("/")[0] for name in tensors})


def _times(tensors: Value, prefix: str) -> list[float]:
    return [float(t) for t in tensors[f"{prefix}/sigmas"].use().double()]


def _each(
    kind: str, times: list[float], index: list[int], amount: float, y: Tensor, v: Tensor
) -> tuple[Tensor, list[Normal]]:
    """The means of samples that stand at different steps, and each one's distribution."""
    steps = []
    for b, k in enumerate(index):
        state = y[b : b + 1]
        steps.append(flow_step(kind, times, k, amount, state, state - times[k] * v[b : b + 1]))
    return torch.cat([step.mean_B_C_T_H_W for step in steps]), steps


def _cps_log_prob(step: Normal, x_next: Tensor) -> Tensor:
    return -objectives.mean_drift(x_next, step.mean_B_C_T_H_W)


LOG_PROBS: dict[str, Callable[[Normal, Tensor], Tensor]] = {"sde": Normal.log_prob, "cps": _cps_log_prob}


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_flow_steps_with_their_probabilities_and_gradients(golden: Golden, kind: str) -> None:
    tensors, options = golden.tensors("rf_sde_step.safetensors"), golden.json("options.json")["rf_sde_step"]
    amount = options["noise_level"].use()
    for prefix in _prefixes(tensors):
        times, index = _times(tensors, prefix), tensors[f"{prefix}/index"].use().tolist()
        y, v, noise = (tensors[f"{prefix}/{name}"].use() for name in ("x", "v", "noise"))
        per_sample = (-1, *[1] * (y.ndim - 1))
        mean, steps = _each(kind, times, index, amount, y, v)
        of = lambda name, prefix=prefix: tensors[f"{prefix}/{kind}/{name}"]  # noqa: E731
        of("mean").compare(mean, **STEP)
        drawn = torch.cat([step.draw(noise[b : b + 1]) for b, step in enumerate(steps)])
        of("prev").compare(drawn, **STEP)
        steps_of_time = torch.tensor([times[k] - times[k + 1] for k in index])
        of("sqrt_dt").compare(steps_of_time.sqrt().reshape(per_sample), **STEP)
        coefficient = sde_coefficient if kind == "sde" else lambda times, k, a: flow_std("cps", times, k, a)
        spread = torch.tensor([coefficient(times, k, amount) for k in index])
        of("std_dev_t").compare(spread.reshape(per_sample), **STEP)
        prev = of("prev").expected()
        log_prob = torch.cat([LOG_PROBS[kind](step, prev[b : b + 1]) for b, step in enumerate(steps)])
        of("log_prob").compare(log_prob, atol=1e-4)

        v_new = of("v_new").use().clone().requires_grad_()
        mean_new, steps_new = _each(kind, times, index, amount, y, v_new)
        of("mean_new").compare(mean_new, **STEP)
        log_prob_new = torch.cat([LOG_PROBS[kind](step, prev[b : b + 1]) for b, step in enumerate(steps_new)])
        of("log_prob_new").compare(log_prob_new, atol=1e-4)
        (gradient,) = torch.autograd.grad(log_prob_new.sum(), v_new)
        of("grad_v_new").compare(gradient, **GRADIENT)

        drift = objectives.mean_drift(mean_new, mean)
        of("kl_sd3").compare(objectives.gaussian_kl(drift, spread).mean(), **LOSS)
        if kind == "sde":
            stds = torch.tensor([step.std for step in steps])
            of("kl_true").compare(objectives.gaussian_kl(drift, stds).mean(), **LOSS)


@pytest.mark.parametrize("kind", ["dance", "ddim"])
def test_steps_with_constant_noise(golden: Golden, kind: str) -> None:
    tensors, options = golden.tensors("rf_sde_step.safetensors"), golden.json("options.json")["rf_sde_step"]
    eta = options["eta"].use()
    for prefix in _prefixes(tensors):
        times, k = _times(tensors, prefix), int(tensors[f"{prefix}/dance/index"].use())
        y, v, noise = (tensors[f"{prefix}/{name}"].use() for name in ("x", "v", "noise"))
        x0 = y - times[k] * v
        step = flow_step(kind, times, k, eta, y, x0)
        tensors[f"{prefix}/{kind}/mean"].compare(step.mean_B_C_T_H_W, **STEP)
        tensors[f"{prefix}/{kind}/prev"].compare(step.draw(noise), **STEP)
        if kind == "dance":
            tensors[f"{prefix}/dance/x0"].compare(x0, **STEP)
            prev = tensors[f"{prefix}/dance/prev"].expected()
            tensors[f"{prefix}/dance/log_prob"].compare(step.log_prob(prev), atol=1e-4)
        else:
            tensors[f"{prefix}/ddim/std"].compare(torch.tensor([step.std]), **STEP)


def test_the_schedule_of_these_steps(golden: Golden) -> None:
    """Shifted twice: K values from 1 down to f(1 / N), each shifted again, and 0."""
    tensors, options = golden.tensors("rf_sde_step.safetensors"), golden.json("options.json")["rf_sde_step"]
    shift, count, steps = (options[name].use() for name in ("shift", "num_train_timesteps", "num_steps"))

    def shifted(u: Tensor) -> Tensor:
        return shift * u / (1 + (shift - 1) * u)

    first = shifted(torch.tensor(1 / count, dtype=torch.float64))
    times = shifted(torch.linspace(1, float(first), steps, dtype=torch.float64))
    for prefix in _prefixes(tensors):
        tensors[f"{prefix}/sigmas"].compare(torch.cat([times, torch.zeros(1)]), atol=2e-5)
        tensors[f"{prefix}/timesteps"].compare(times * count, atol=2e-2)


class Case:
    """One prefix of cosmos_rl_step: a network of one matrix, its conditioning frames and its chain."""

    def __init__(self, tensors: Value, options: Value, name: str) -> None:
        self.name, self.tensors, self.options = name, tensors, options[name]
        self.noise, self.given, self.mask = (self[key].use() for key in ("init_noise", "gt_frames", "cond_mask"))
        self.sigma_data = self.options["sigma_data"].use() if "sigma_data" in self.options else 1.0
        self.has_one_level = self.options["use_rf_ckpts"].use()
        is_flow = self.options["scaling"].use() == "rectified_flow"
        self.scaling = rectified_flow_scaling if is_flow else self._edm_scaling
        self.solver, self.steps = self.options["solver"].use(), self.options["steps"].use()
        self.churn, self.noise_scale = self.options["s_churn"].use(), self.options["s_noise"].use()
        order = 1 if self.solver == "2ab" else int(self.solver[0])
        limits = (self.options[key].use() for key in ("sigma_min", "sigma_max"))
        self.sigmas = karras_sigmas(self.steps // order, *limits)
        kind = "1euler" if self.solver == "1euler" else "2ab"
        self.chain = ChurnChain(self.sigmas.tolist(), self.churn, kind, noise_scale=self.noise_scale)
        if "data_sigma" in self.options:
            self["data_sigma"].compare(torch.tensor([self.options["data_sigma"].use()]))
        assert int(self.mask.flatten(2).amax(2).sum() > 0) == int(self.options["ncond"].use() > 0)

    def __getitem__(self, key: str) -> Value:
        return self.tensors[f"{self.name}/{key}"]

    def __contains__(self, key: str) -> bool:
        return f"{self.name}/{key}" in self.tensors

    def weights(self, which: str) -> tuple[Tensor, Tensor]:
        return self[f"net_W{which}"].use(), self[f"net_b{which}"].use()

    def _edm_scaling(self, sigma: Tensor) -> Scaling:
        """EDM's (table 1); no network here is trained with it, but the chain knows nothing of scalings."""
        deviation = (sigma**2 + self.sigma_data**2).sqrt()
        skip, out = self.sigma_data**2 / deviation**2, sigma * self.sigma_data / deviation
        return Scaling(c_skip=skip, c_out=out, c_in=1 / deviation, c_noise=sigma.log() / 4)

    def denoise(self, x: Tensor, sigma: float | Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
        """The tiny network with its scaling and conditioning frames."""
        W, b = weights
        sigma_B_1 = torch.as_tensor(sigma, dtype=torch.float32).reshape(-1, 1)
        scaling = self.scaling(sigma_B_1)
        x32 = x.float()
        scaled = torch.where(self.mask.bool(), self.given / self.sigma_data, per_frame(scaling.c_in) * x32)
        level = scaling.c_noise
        if not self.has_one_level:
            share_B_T = self.mask.mean(dim=(1, 3, 4))
            given = self.scaling(torch.tensor([[SIGMA_CONDITIONAL]])).c_noise
            level = given * share_B_T + level * (1 - share_B_T)
        level = level.expand(-1, x.shape[2])
        output = torch.tanh(
            torch.einsum("oc,bcthw->bothw", W, scaled) + b[None, :, None, None, None] * level[:, None, :, None, None]
        )
        x0 = per_frame(scaling.c_skip) * x32 + per_frame(scaling.c_out) * output
        return torch.where(self.mask.bool(), self.given, x0)


def _cases(golden: Golden) -> list[Case]:
    tensors, options = golden.tensors("cosmos_rl_step.safetensors"), golden.json("options.json")["cosmos_sampler"]
    return [Case(tensors, options, name) for name in options]


def _rolled_out(case: Case) -> list[Step]:
    """The steps of the chain that reinforcement learning uses; of a solver whose mean cannot be computed again from its
    states, which only sampling has, that solver's steps between the same levels."""
    chain, noise, weights, previous = case.chain, case["churn_noise"].use(), case.weights(""), None
    sampler = solvers.solver(case.solver, lambda x, sigma: case.denoise(x, sigma, weights))
    x, steps = chain.start(case.noise, noise[0]), []
    for k in range(chain.num_steps):
        level, sigma_next = chain.levels[k], float(case.sigmas[k + 1])
        x0 = case.denoise(x, level, weights)
        step = chain.step(k, x, x0, previous)
        if case.solver not in CHAIN_SOLVERS:
            step = replace(step, mean_B_C_T_H_W=sampler.step(x, x0, level, sigma_next).x_next_B_C_T_H_W)
        steps.append(Step(x, x0, step.mean_B_C_T_H_W, level, sigma_next))
        previous = x0
        x = step.draw(noise[k + 1]) if k + 1 < chain.num_steps else step.mean_B_C_T_H_W
    return steps


def test_rollouts_with_churn(golden: Golden) -> None:
    for case in _cases(golden):
        case["sigmas"].compare(case.sigmas, atol=1e-12)
        steps = _rolled_out(case)
        found = {
            "traj_x": [step.x_B_C_T_H_W for step in steps],
            "traj_mu": [step.x_next_B_C_T_H_W for step in steps],
            "traj_x0": [step.x0_B_C_T_H_W for step in steps],
        }
        for name, states in found.items():
            if name in case:
                case[name].compare(torch.stack(states), rtol=2e-5, atol=2e-5)
        case["traj_sigma_hat"].compare([step.sigma for step in steps], rtol=1e-6)
        case["traj_sigma_next"].compare([step.sigma_next for step in steps], rtol=1e-6)
        final = case.denoise(steps[-1].x_next_B_C_T_H_W, float(case.sigmas[-1]), case.weights(""))
        case["final_sample"].compare(final, rtol=2e-5, atol=2e-5)


def test_the_published_step_of_training(golden: Golden) -> None:
    for case in _cases(golden):
        if "train" not in case.options:
            continue
        assert case.solver in CHAIN_SOLVERS
        advantage_B = torch.tensor(case.options["adv"].use()).clamp(-LARGEST_ADVANTAGE, LARGEST_ADVANTAGE)
        variants = case.options["variants"]
        for k in case.options["train"].use():
            _compare_reference(case, k)
            for name in variants:
                _compare_variant(case, k, name, variants[name].use(), advantage_B)


def _mean(case: Case, k: int, weights: tuple[Tensor, Tensor]) -> tuple[Normal, Tensor]:
    """The distribution of the next state under these weights, from the stored state; and the estimate."""
    states, x0s = case["traj_x"].expected(), case["traj_x0"].expected()
    previous = x0s[k - 1].double() if k else None
    x = states[k].double()
    x0 = case.denoise(x, case.chain.levels[k], weights)
    return case.chain.step(k, x, x0, previous), x0


def _compare_reference(case: Case, k: int) -> None:
    case[f"step{k}/sample"].compare(case["traj_x"].expected()[k + 1])
    case[f"step{k}/mu_ref"].compare(_mean(case, k, case.weights("_ref"))[0].mean_B_C_T_H_W, **LOSS)


def _compare_variant(case: Case, k: int, name: str, option: dict[str, Any], advantage_B: Tensor) -> None:
    """Compare the losses of the stored step, by `Losses`."""

    def of(key: str) -> Value:
        return case[f"step{k}/{name}/{key}"]

    W, b = (w.clone().requires_grad_() for w in case.weights("" if option.get("same") else "_new"))
    step, _ = _mean(case, k, (W, b))
    of("mu_new").compare(step.mean_B_C_T_H_W, **LOSS)
    of("std").compare(step.std, rtol=1e-4)
    states, x0s = case["traj_x"].expected(), case["traj_x0"].expected()
    x, x_next, mean_old = (value.double() for value in (states[k], states[k + 1], case["traj_mu"].expected()[k]))
    log_ratio_B = log_ratio(x_next, step.mean_B_C_T_H_W, mean_old, None)
    of("log_ratio").compare(log_ratio_B, atol=1e-4)
    rl = RLConfig(
        transition="churn",
        ratio_normalisation="cosmos_rl",
        clip_ratio=option["clip_ratio"],
        exp_reward=bool(option.get("exp_reward")),
        kl_beta=option["kl_beta"],
        data_beta=option["data_beta"],
        loss_scale=LOSS_SCALE,
        advantage=AdvantageConfig(adv_clip_max=LARGEST_ADVANTAGE),
    )
    reference = _mean(case, k, case.weights("_ref"))[0].mean_B_C_T_H_W if rl.kl_beta else None
    previous = x0s[k - 1].double() if k else None
    experience: Any = SimpleNamespace(
        kept=KeptStep(k, x, x_next, mean_old, previous, reference), forward=None, data=_data(case, k, option, rl),
        condition=None, unconditional=None, noise_B_C_T_H_W=case.noise, window=None,
        advantage_B=advantage_B, is_before_update=False, facts={},
    )  # fmt: skip
    path = ChainPath(case.chain, lambda x, level: case.denoise(x, level, (W, b)), lambda x: x)
    with mock.patch.object(rollout, "chain_path", return_value=path):
        found, total = _losses(case, rl, (W, b)).of(experience)
    of("ratio").compare(objectives.clipped(log_ratio_B, advantage_B, rl.clip_ratio).ratio_B, rtol=1e-4, atol=1e-4)
    of("policy_loss").compare(found["policy_loss"], rtol=1e-4, atol=1e-6)
    for key in ("kl_loss", "data_loss"):
        of(key).compare(found.get(key, torch.zeros(())), **LOSS)
    of("total_scaled").compare(total, rtol=1e-4, atol=1e-5)
    for key, gradient in zip(("grad_W", "grad_b"), torch.autograd.grad(total, (W, b)), strict=True):
        of(key).compare(gradient, **STEP_GRADIENT)


def _losses(case: Case, rl: RLConfig, weights: tuple[Tensor, Tensor]) -> Losses:
    """Those of a world model whose network is the file's."""

    def denoiser(x: Tensor, sigma_B_1: Tensor, condition: Any) -> Any:
        return case.denoise(x, sigma_B_1, weights)

    context = SimpleNamespace(is_on=False, activate=lambda on: None, split_frames=lambda x: x, part_of=lambda x: x)
    config = SimpleNamespace(sigma_data=case.sigma_data)
    return Losses(SimpleNamespace(context=context, denoiser=denoiser, config=config), rl)  # type: ignore[arg-type]


def _data(case: Case, k: int, option: dict[str, Any], rl: RLConfig) -> Data | None:
    """The true clip, with the noise and level of the rollout or of its own."""
    if not rl.data_beta:
        return None
    is_shared = option.get("rl_noise", True)
    sigma = case.chain.levels[k] if is_shared else float(case["data_sigma"].use())
    noise = case.noise if is_shared else case["data_eps"].use()
    return Data(case.given, noise, torch.full((len(noise), 1), sigma), None)  # type: ignore[arg-type]
