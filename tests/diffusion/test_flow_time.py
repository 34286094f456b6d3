# SPDX-License-Identifier: Apache-2.0
"""Rectified flow in its time: shifts, tables, velocities."""

import math

import pytest
import torch

from cosmos_predict2.diffusion import flow_time
from cosmos_predict2.diffusion.rectified_flow import flow_time as time_of_level
from cosmos_predict2.diffusion.rectified_flow import noise_level

U = torch.linspace(0, 1, 101, dtype=torch.float64)


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_a_shift_multiplies_the_noise_level(shift: float) -> None:
    inner = U[1:-1]
    torch.testing.assert_close(flow_time.shift_time(inner, shift), time_of_level(shift * noise_level(inner)))
    torch.testing.assert_close(flow_time.shift_time(U, shift)[[0, -1]], U[[0, -1]])


def test_timesteps_grow_with_u_and_the_table_runs_the_other_way() -> None:
    timesteps = flow_time.training_timesteps(U, 5.0)
    assert (timesteps.diff() > 0).all() and timesteps[0] == 0 and timesteps[-1] == 1000
    from_table = flow_time.training_timesteps_from_table(U, 5.0)
    torch.testing.assert_close(from_table.double(), flow_time.training_timesteps(1 - U, 5.0), rtol=0, atol=5.0)
    assert from_table[0] == 1000 and from_table[-1] > 0


@pytest.mark.parametrize("n", [10, 1000])
def test_the_table_is_the_shift_of_equal_steps(n: int) -> None:
    table = flow_time.timestep_table(5.0, n)
    assert table.shape == (n,) and table.dtype == torch.float32
    equal_steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    torch.testing.assert_close(table.flip(0), (n * flow_time.shift_time(equal_steps, 5.0)).float())


def test_waver_mode_stays_in_range_and_is_symmetric() -> None:
    t = flow_time.waver_mode(U)
    assert t.min() >= 0 and t.max() <= 1
    torch.testing.assert_close(t + t.flip(0), torch.ones_like(t))
    torch.testing.assert_close(flow_time.waver_mode(U, scale=0.0), 1 - U)


def test_high_noise_replaces_exactly_the_picked_samples() -> None:
    timesteps = torch.tensor([10.0, 20.0, 30.0])
    mixed = flow_time.mix_high_noise(timesteps, torch.tensor([0.04, 0.06, 0.0]), torch.tensor([0.0, 0.5, 1.0]))
    assert mixed.tolist() == [980.0, 20.0, 1000.0]


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
    table = flow_time.draw_timesteps(u, distribution="uniform", shift=3.0, from_table=True)
    assert set(table.tolist()) <= set(flow_time.timestep_table(3.0).tolist())
    mixed = flow_time.draw_timesteps(u, high_noise_ratio=0.3, pick_B=pick, high_B=high)
    assert ((mixed >= 980) == ((pick < 0.3) | (normal >= 980))).all()
    assert torch.isfinite(flow_time.draw_timesteps(torch.tensor([0.0, 1.0]))).all()


def test_draws_that_cannot_be_made_are_said() -> None:
    with pytest.raises(ValueError, match=r"'normal'; there are logitnormal, uniform, waver_mode_1\.29"):
        flow_time.draw_timesteps(U, distribution="normal")
    with pytest.raises(ValueError, match="two more uniform draws"):
        flow_time.draw_timesteps(U, high_noise_ratio=0.1)
