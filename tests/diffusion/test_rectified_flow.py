# SPDX-License-Identifier: Apache-2.0
"""Scalings, weights, draws and the loss of rectified flow in noise levels; shifts, tables and velocities in times."""

import math

import pytest
import torch
from torch import Tensor

from cosmos_predict2.diffusion import rectified_flow
from cosmos_predict2.diffusion.rectified_flow import (
    add_noise,
    draw_sigma,
    flow_time,
    nonuniform_weight,
    per_frame,
    rectified_flow_scaling,
    rectified_flow_weight,
    reduce_loss,
)

SIGMA_SHAPES = [(2,), (2, 1), (2, 3)]


def _video(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 4, 3, 5, 6, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def _sigma(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7)) * 10 + 0.01


@pytest.mark.parametrize("shape", SIGMA_SHAPES)
def test_the_true_velocity_gives_back_the_clean_video(shape: tuple[int, ...]) -> None:
    x0, epsilon, sigma = _video(0), _video(1), _sigma(shape)
    scaling = rectified_flow_scaling(sigma)
    noisy = add_noise(x0, epsilon, sigma)
    estimate = per_frame(scaling.c_skip) * noisy + per_frame(scaling.c_out) * (epsilon - x0)
    torch.testing.assert_close(estimate, x0)
    t = per_frame(flow_time(sigma))
    torch.testing.assert_close(per_frame(scaling.c_in) * noisy, (1 - t) * x0 + t * epsilon)
    torch.testing.assert_close(scaling.c_noise, flow_time(sigma))
    torch.testing.assert_close(rectified_flow_scaling(sigma, 500.0).c_noise, 500 * flow_time(sigma))


@pytest.mark.parametrize("function", [rectified_flow_weight, nonuniform_weight, flow_time])
def test_levels_are_computed_in_float32_at_least(function) -> None:
    assert function(torch.tensor([0.5], dtype=torch.bfloat16)).dtype == torch.float32
    assert function(torch.tensor([0.5], dtype=torch.float64)).dtype == torch.float64


def test_the_bell_is_zero_at_both_ends_and_largest_in_the_middle() -> None:
    weight = nonuniform_weight(torch.tensor([0.0, 0.5, 1.0, 2.0, 1e9], dtype=torch.float64))
    assert weight[[0, 4]].abs().max() < 1e-9 and weight.argmax() == 2
    torch.testing.assert_close(weight[1], weight[3], rtol=0.02, atol=0)


def test_draws_of_the_ends_are_finite_and_positive() -> None:
    sigma = draw_sigma(torch.tensor([0.0, 1.0]))
    assert torch.isfinite(sigma).all() and (sigma > 0).all()
    assert sigma.dtype == torch.float32


def test_high_levels_replace_exactly_the_picked_samples() -> None:
    u, pick, high = torch.tensor([0.3, 0.5, 0.7]).double(), torch.tensor([0.04, 0.06, 0.0]), torch.tensor([0.0, 0.5, 1])
    sigma = draw_sigma(u, high_sigma_ratio=0.05, pick_B=pick, high_B=high)
    torch.testing.assert_close(sigma, torch.tensor([200.0, 1.0, 100_000.0]).double())


def test_sum_is_the_mean_times_the_channels() -> None:
    error = _video(0) ** 2
    torch.testing.assert_close(reduce_loss(error, "mean", 10), error.mean() * 10)
    torch.testing.assert_close(reduce_loss(error, "sum", 10), reduce_loss(error, "mean", 10) * error.shape[1])
    with pytest.raises(ValueError, match="'max'"):
        reduce_loss(error, "max")  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(2, 1, 1), ()])
def test_another_shape_of_levels_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="per sample or latent frame"):
        per_frame(torch.ones(shape))


@pytest.mark.parametrize("shape", SIGMA_SHAPES)
def test_the_clean_estimate_follows_from_the_velocity(shape: tuple[int, ...]) -> None:
    x0, epsilon, t = _video(0), _video(1), flow_time(_sigma(shape))
    x_t, velocity = rectified_flow.interpolate(x0, epsilon, t), rectified_flow.velocity(x0, epsilon)
    torch.testing.assert_close(rectified_flow.x0_of_velocity(x_t, velocity, t), x0)


def test_training_draws_are_functions_of_uniform_numbers() -> None:
    u = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pick, high = torch.rand(2, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    normal = rectified_flow.draw_timesteps(u, shift=5.0)
    torch.testing.assert_close(torch.logit(normal / 1000), torch.special.ndtri(u) + math.log(5.0))
    assert torch.equal(rectified_flow.draw_timesteps(u, distribution="uniform", shift=1.0), 1000 * u)
    waver = rectified_flow.draw_timesteps(u, distribution="waver_mode_1.29", shift=1.0)
    torch.testing.assert_close(waver / 1000, 1 - u - 1.29 * (torch.cos(math.pi * u / 2) ** 2 - 1 + u))
    table = rectified_flow.draw_timesteps(u, distribution="uniform", shift=3.0, from_table=True)
    assert torch.equal(table, rectified_flow.timestep_table(3.0)[(1000 * u).floor().long()])
    for from_table in (False, True):
        plain = rectified_flow.draw_timesteps(u, from_table=from_table)
        mixed = rectified_flow.draw_timesteps(u, from_table=from_table, high_noise_ratio=0.3, pick_B=pick, high_B=high)
        expected = torch.where(pick < 0.3, 980 + 20 * high, plain.double())
        torch.testing.assert_close(mixed.double(), expected, rtol=1e-6, atol=0)
    ends = rectified_flow.draw_timesteps(torch.tensor([0.0, 1.0]))
    assert 0 < ends[0] < ends[1] < 1000


def test_draws_that_cannot_be_made_are_said() -> None:
    with pytest.raises(ValueError, match=r"'normal'; there are logitnormal, uniform, waver_mode_1\.29"):
        rectified_flow.draw_timesteps(torch.rand(3), distribution="normal")
