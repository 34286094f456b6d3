# SPDX-License-Identifier: Apache-2.0
"""Solvers on fields without a network, and the shift of training times, against golden values."""

import re
from typing import Literal, cast

import torch
from torch import Tensor

from cosmos_predict2.diffusion.rectified_flow import NUM_TIMESTEPS, training_timesteps
from cosmos_predict2.diffusion.solvers import Step, flow_sigmas, guide, karras_sigmas, sample
from tests.goldens import Golden, Value
from tests.parity.action_files import compare_close

AREA = "action"
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
        compare_close(tensors[f"{match[0]}sigmas"], sigmas, SAME_LEVELS)
        states: list[Tensor] = []

        def on_step(i: int, step: Step, states: list[Tensor] = states) -> None:
            states.append(step.x_next_B_C_T_H_W)

        final = sample(denoise, tensors[f"{match[0]}init"].use(), sigmas, "2ab", on_step)
        compare_close(tensors[f"{match[0]}traj"], torch.stack(states), CLOSE)
        compare_close(tensors[f"{match[0]}final_x0"], final, CLOSE)


def test_unipc(golden: Golden) -> None:
    tensors = golden.tensors("solver_unipc_toy.safetensors")
    for match in _groups(tensors, r"n(\d+)\.(shift|karras)([\d.]*\d)?\."):
        kind = cast(Literal["shift", "karras"], match[2])
        schedule = flow_sigmas(int(match[1]), kind, shift=float(match[3] or 1))
        compare_close(tensors[f"{match[0]}sigmas"], schedule.sigmas, CLOSE)
        tensors[f"{match[0]}timesteps"].compare(schedule.timesteps)
        states: list[Tensor] = []

        def denoise(z: Tensor, sigma_B: Tensor, schedule=schedule) -> Tensor:
            shape = (-1, *[1] * (z.ndim - 1))
            timesteps, t = schedule.timesteps_at(sigma_B).reshape(shape), sigma_B.reshape(shape)
            return z - t * (0.8 * z - 0.3 * torch.sin(2 * z) + 0.1 * timesteps / NUM_TIMESTEPS)

        def on_step(i: int, step: Step, states: list[Tensor] = states) -> None:
            states.append(step.x_next_B_C_T_H_W)

        sample(denoise, tensors[f"{match[0]}init"].use(), schedule.sigmas, "unipc", on_step)
        compare_close(tensors[f"{match[0]}traj"], torch.stack(states), CLOSE)


def test_shifted_training_times(golden: Golden) -> None:
    tensors = golden.tensors("rf_time_shift.safetensors")
    for match in _groups(tensors, r"shift([\d.]*\d)\."):
        found = training_timesteps(tensors[f"{match[0]}u"].use(), float(match[1]))
        tensors[f"{match[0]}timesteps"].compare(found, atol=SAME_TIMES)
