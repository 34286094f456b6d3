# SPDX-License-Identifier: Apache-2.0
"""Rectified flow in its time: shifts, tables, velocities."""

import math

import pytest
import torch

from cosmos_predict2.diffusion import flow_time

U = torch.linspace(0, 1, 101, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(2,), (2, 1), (2, 3)])
def test_the_clean_estimate_follows_from_the_velocity(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x0, epsilon = torch.randn(2, 2, 4, 3, 5, 6, dtype=torch.float64, generator=generator)
    t = torch.rand(shape, dtype=torch.float64, generator=generator) * 0.9 + 0.05
    x_t, velocity = flow_time.interpolate(x0, epsilon, t), flow_time.velocity(x0, epsilon)
    torch.testing.assert_close(flow_time.x0_of_velocity(x_t, velocity, t), x0)


def test_training_draws_are_functions_of_uniform_numbers() -> None:
    u = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pick, high = torch.rand(2, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    normal = flow_time.draw_timesteps(u, shift=5.0)
    torch.testing.assert_close(torch.logit(normal / 1000), torch.special.ndtri(u) + math.log(5.0))
    assert torch.equal(flow_time.draw_timesteps(u, distribution="uniform", shift=1.0), 1000 * u)
    waver = flow_time.draw_timesteps(u, distribution="waver_mode_1.29", shift=1.0)
    torch.testing.assert_close(waver / 1000, 1 - u - 1.29 * (torch.cos(math.pi * u / 2) ** 2 - 1 + u))
    table = flow_time.draw_timesteps(u, distribution="uniform", shift=3.0, from_table=True)
    assert torch.equal(table, flow_time.timestep_table(3.0)[(1000 * u).floor().long()])
    for from_table in (False, True):
        plain = flow_time.draw_timesteps(u, from_table=from_table)
        mixed = flow_time.draw_timesteps(u, from_table=from_table, high_noise_ratio=0.3, pick_B=pick, high_B=high)
        expected = torch.where(pick < 0.3, 980 + 20 * high, plain.double())
        torch.testing.assert_close(mixed.double(), expected, rtol=1e-6, atol=0)
    ends = flow_time.draw_timesteps(torch.tensor([0.0, 1.0]))
    assert 0 < ends[0] < ends[1] < 1000


def test_draws_that_cannot_be_made_are_said() -> None:
    with pytest.raises(ValueError, match=r"'normal'; there are logitnormal, uniform, waver_mode_1\.29"):
        flow_time.draw_timesteps(U, distribution="normal")
