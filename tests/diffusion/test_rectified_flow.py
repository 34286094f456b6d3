# SPDX-License-Identifier: Apache-2.0
"""Scalings, weights, draws and the loss of rectified flow in noise levels."""

import math
import runpy

import pytest
import torch
from torch import Tensor

from cosmos_predict2.diffusion import rectified_flow
from cosmos_predict2.diffusion.rectified_flow import (
    add_noise,
    draw_sigma,
    flow_time,
    noise_level,
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


@pytest.mark.parametrize("shape", SIGMA_SHAPES)
def test_the_weighted_error_is_that_of_the_velocity(shape: tuple[int, ...]) -> None:
    x0, epsilon, sigma, predicted = _video(0), _video(1), _sigma(shape), _video(2)
    scaling = rectified_flow_scaling(sigma)
    x0_pred = per_frame(scaling.c_skip) * add_noise(x0, epsilon, sigma) + per_frame(scaling.c_out) * predicted
    weighted = (x0_pred - x0) ** 2 * per_frame(rectified_flow_weight(sigma))
    torch.testing.assert_close(weighted, (predicted - (epsilon - x0)) ** 2)


def test_time_and_level_are_inverse() -> None:
    sigma = torch.tensor([1e-4, 0.5, 80.0], dtype=torch.float64)
    torch.testing.assert_close(noise_level(flow_time(sigma)), sigma)


def test_the_bell_is_one_on_average_and_zero_at_both_ends() -> None:
    t = (torch.arange(1000, dtype=torch.float64) + 0.25) / 1000
    weights = nonuniform_weight(noise_level(t))
    assert weights.mean().item() == pytest.approx(1.0)
    assert weights[0] == pytest.approx(0, abs=1e-12)
    assert weights.argmax().item() in (499, 500)
    assert nonuniform_weight(torch.tensor([1e9])).item() == pytest.approx(0, abs=1e-6)


def test_the_bell_is_of_the_device_of_its_levels_whichever_came_first() -> None:
    fresh = runpy.run_path(str(rectified_flow.__file__))["nonuniform_weight"]  # of a process that had no other
    with torch.device("meta"):
        assert fresh(torch.rand(2)).is_meta
    assert torch.equal(fresh(torch.tensor([0.5])), nonuniform_weight(torch.tensor([0.5])))


@pytest.mark.parametrize("function", [rectified_flow_weight, nonuniform_weight, flow_time])
def test_levels_are_computed_in_float32_at_least(function) -> None:
    assert function(torch.tensor([0.5], dtype=torch.bfloat16)).dtype == torch.float32
    assert function(torch.tensor([0.5], dtype=torch.float64)).dtype == torch.float64


def test_draws_are_log_normal() -> None:
    u = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    log_sigma = draw_sigma(u, factor=math.sqrt(24)).log()
    assert log_sigma.mean().item() == pytest.approx(math.log(24) / 2, abs=1e-6)
    assert log_sigma.std().item() == pytest.approx(1, abs=1e-3)


def test_draws_of_the_ends_are_finite_and_positive() -> None:
    sigma = draw_sigma(torch.tensor([0.0, 1.0]))
    assert torch.isfinite(sigma).all() and (sigma > 0).all()
    assert sigma.dtype == torch.float32


def test_high_levels_replace_exactly_the_picked_samples() -> None:
    u, pick, high = torch.tensor([0.3, 0.5, 0.7]).double(), torch.tensor([0.04, 0.06, 0.0]), torch.tensor([0.0, 0.5, 1])
    sigma = draw_sigma(u, high_sigma_ratio=0.05, pick_B=pick, high_B=high)
    torch.testing.assert_close(sigma, torch.tensor([200.0, 1.0, 100_000.0]).double())


def test_high_levels_need_their_draws() -> None:
    with pytest.raises(ValueError, match="pick_B and high_B"):
        draw_sigma(torch.tensor([0.5]), high_sigma_ratio=0.05)


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


def test_one_level_reaches_its_own_frame_only() -> None:
    x0, epsilon = _video(0), _video(1)
    sigma = torch.zeros(2, 3, dtype=torch.float64)
    sigma[1, 2] = 3.0
    noisy = add_noise(x0, epsilon, sigma)
    changed = (noisy != x0).flatten(3).any(-1).any(1)
    assert changed.tolist() == [[False] * 3, [False, False, True]]
