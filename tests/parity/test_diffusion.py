# SPDX-License-Identifier: Apache-2.0
"""Schedules, scalings, weights, draws, flow times, UniPC and the power-function average against golden values."""

import re

import numpy as np
import torch
from torch import Tensor, nn

from cosmos_predict2.diffusion import rectified_flow
from cosmos_predict2.diffusion.rectified_flow import (
    draw_sigma,
    flow_sigmas,
    karras_sigmas,
    nonuniform_weight,
    rectified_flow_scaling,
    rectified_flow_weight,
)
from cosmos_predict2.diffusion.solvers import Step, sample
from imaginaire.training.model import PowerEMA, power_ema_exponent
from tests.goldens import Golden, Value

AREA = "video2world"
SAME_CDF = 0.01  # of draws: the share below a level


# tables.json ----------------------------------------------------------------------------------------------------------


def test_karras_levels(golden: Golden) -> None:
    tables = golden.json("tables.json")
    names = [name for name in tables if name.startswith("sigmas_n")]
    assert names
    for name in names:
        numbers = re.fullmatch(r"sigmas_n(\d+)_min([\d.e+-]+)_max([\d.e+-]+)_order([\d.e+-]+)", name)
        assert numbers is not None, name
        num_steps, sigma_min, sigma_max, order = numbers.groups()
        tables[name].compare(
            karras_sigmas(int(num_steps), float(sigma_min), float(sigma_max), float(order)),
            **golden.tolerance("coefficients"),
        )


def test_decay_of_the_average(golden: Golden) -> None:
    rates = golden.json("tables.json")["power_ema"]
    tolerance = golden.tolerance("coefficients")
    assert len(rates)
    for rate in rates:
        rates[rate]["exponent"].compare(power_ema_exponent(float(rate)), **tolerance)
        for table in rates[rate]:
            if table == "exponent":
                continue
            shifted = re.fullmatch(r"beta(?:_shift(\d+))?", table)
            assert shifted is not None, table
            average = PowerEMA(nn.Linear(1, 1), float(rate), iteration_shift=int(shifted[1] or 0))
            for iteration in rates[rate][table]:
                rates[rate][table][iteration].compare(average.beta(int(iteration)), **tolerance)


def test_training_levels_of_a_numpy_seed(golden: Golden) -> None:
    table = golden.json("tables.json")["train_sigma"]
    factors = {"video": table["state_t"].use() ** 0.5, "image": 1.0}
    for kind, factor in factors.items():
        stored = [name for name in table if re.fullmatch(rf"first\d+_{kind}", name)]
        assert stored
        for name in stored:
            uniform = np.random.RandomState(table["numpy_seed"].use()).uniform(size=len(table[name]))
            sigma = draw_sigma(torch.from_numpy(uniform), factor=factor)
            table[name].compare(sigma, **golden.tolerance("coefficients"))


def test_quantiles_of_training_levels(golden: Golden) -> None:
    table = golden.json("tables.json")["train_sigma"]
    quantiles = table["quantiles_video_no_high"]
    levels = torch.tensor([float(level) for level in quantiles], dtype=torch.float64)
    sigma = draw_sigma(levels, factor=table["state_t"].use() ** 0.5)
    for i, level in enumerate(quantiles):
        quantiles[level].compare(sigma[i], **golden.tolerance("coefficients"))


def test_distribution_with_high_levels(golden: Golden) -> None:
    table = golden.json("tables.json")["train_sigma"]
    names = [name for name in table if name.startswith("high_ratio_")]
    assert names
    for name in names:
        numbers = re.fullmatch(r"high_ratio_([\d.]+)_empirical_n\d+k", name)
        assert numbers is not None, name
        generator = torch.Generator().manual_seed(0)
        u, pick, high = torch.rand(3, 400_000, dtype=torch.float64, generator=generator)
        factor = table["state_t"].use() ** 0.5
        drawn = draw_sigma(u, factor=factor, high_sigma_ratio=float(numbers[1]), pick_B=pick, high_B=high)
        for share in table[name]["quantiles"]:
            sigma = table[name]["quantiles"][share].expected()  # empirical itself, so the shares below it are compared
            assert abs((drawn < sigma).double().mean().item() - float(share)) < SAME_CDF, share
        for above in [key for key in table[name] if key.startswith("frac_ge_")]:
            share = (drawn >= float(above.removeprefix("frac_ge_"))).double().mean()
            table[name][above].compare(share, atol=SAME_CDF)


# scaling.* of denoise_a -----------------------------------------------------------------------------------------------


def test_coefficients_and_weights(golden: Golden) -> None:
    tensors = golden.tensors("denoise_a.safetensors")
    sigma, tolerance = tensors["sigma_B"].use(), golden.tolerance("coefficients")
    scaling = rectified_flow_scaling(sigma)
    for name in ("c_skip", "c_out", "c_in", "c_noise"):
        tensors[f"scaling.{name}"].compare(getattr(scaling, name), **tolerance)
    tensors["scaling.loss_weight_uniform"].compare(rectified_flow_weight(sigma), **tolerance)
    sweep = tensors["scaling.sigma_sweep"].use()
    tolerance = golden.tolerance("nonuniform_weights")
    tensors["scaling.loss_weight_nonuniform"].compare(nonuniform_weight(sigma), **tolerance)
    tensors["scaling.nonuniform_sweep"].compare(nonuniform_weight(sweep), **tolerance)


# rf25.* ---------------------------------------------------------------------------------------------------------------


def test_flow_tables(golden: Golden) -> None:
    file = golden.json("rf25.json")
    tables, tolerance = file["tables"], golden.tolerance("coefficients")
    tables["shift"].compare(file["shift"].use())
    for name in tables:
        part = re.fullmatch(r"train_(timesteps|sigmas)_(first|last)(\d+)", name)
        if part is None:
            continue
        n = tables["n"].use()
        table = rectified_flow.timestep_table(file["shift"].use(), n) / (n if part[1] == "sigmas" else 1)
        tables[name].compare(table[: int(part[3])] if part[2] == "first" else table[-int(part[3]) :], **tolerance)
    for kind in ("shift", "karras"):
        schedule = flow_sigmas(file["steps"].use(), kind, shift=file["shift"].use())  # type: ignore[arg-type]
        tables[f"{kind}_sigmas"].compare(schedule.sigmas, **tolerance)
        tables[f"{kind}_timesteps"].compare(schedule.timesteps, **golden.tolerance("exact"))


def test_flow_training_pairs(golden: Golden) -> None:
    file, tensors = golden.json("rf25.json"), golden.tensors("rf25.train.safetensors")
    x0, epsilon = tensors["x0"].use(), tensors["epsilon"].use()
    num_timesteps = file["tables"]["n"].use()
    timesteps = rectified_flow.training_timesteps_from_table(tensors["u"].use(), file["shift"].use(), num_timesteps)
    t = timesteps / num_timesteps
    tensors["timesteps"].compare(timesteps, **golden.tolerance("rf25_timesteps"))
    tensors["sigmas"].compare(t, **golden.tolerance("coefficients"))
    tensors["xt"].compare(rectified_flow.interpolate(x0, epsilon, t), **golden.tolerance("xt"))
    tensors["vt"].compare(rectified_flow.velocity(x0, epsilon), **golden.tolerance("exact"))


def test_unipc_trajectories(golden: Golden) -> None:
    file, tensors = golden.json("rf25.json"), golden.tensors("rf25.unipc.safetensors")
    kinds = sorted({name.partition(".")[0] for name in tensors})
    assert kinds
    for kind in kinds:
        schedule = flow_sigmas(file["steps"].use(), kind, shift=file["shift"].use())  # type: ignore[arg-type]
        target, seen = tensors[f"{kind}.target"].use(), set()

        def denoise(z: Tensor, sigma_B: Tensor, target: Tensor = target, schedule=schedule) -> Tensor:
            timestep, sigma = schedule.timesteps_at(sigma_B)[:, None, None], sigma_B[:, None, None]
            return z - sigma * torch.tanh(z - target) * (0.5 + timestep / 1000)

        def on_step(i: int, step: Step, kind: str = kind, seen: set[str] = seen) -> None:
            name = f"{kind}.step{i}"
            tensors[name].compare(step.x_next_B_C_T_H_W, **golden.tolerance("unipc"))
            seen.add(name)

        sample(denoise, tensors[f"{kind}.x_init"].use(), schedule.sigmas, "unipc", on_step)
        assert seen == {name for name in tensors if name.startswith(f"{kind}.step")}


# ema_trajectory -------------------------------------------------------------------------------------------------------


def test_average_of_a_sequence_of_weights(golden: Golden) -> None:
    tensors = golden.tensors("ema_trajectory.safetensors")
    modules, average = _Sequence(tensors), None
    for k in range(sum(name.endswith(".src") for name in tensors)):
        module = modules.at(f"it{k}.src")
        if average is None:
            average = PowerEMA(modules.at("ema_init.weight"), golden.json("meta.json")["ema_trajectory"]["rate"].use())
        average.update(module, k)
        tensors[f"it{k}.ema"].compare(average.shadows["weight"], **golden.tolerance("ema"))
    assert average is not None


class _Sequence:
    """Stored weights as modules of one parameter."""

    def __init__(self, tensors: Value) -> None:
        self.tensors = tensors

    def at(self, name: str) -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(self.tensors[name].use().clone())
        return module
