# SPDX-License-Identifier: Apache-2.0
"""Rotary positions and features of time."""

import math

import torch
from torch.testing import assert_close

from cosmos_predict2.nn.layers import RotaryPositions, Timesteps, rotate

SIZE = (3, 4, 5)


def positions(head_dim: int = 24, **options: object) -> RotaryPositions:
    return RotaryPositions(head_dim, **{"max_size": (8, 16, 16), "ratios": (1.0, 3.0, 3.0), **options})  # type: ignore[arg-type]


def test_frame_rate_stretches_time_alone() -> None:
    modulated = positions(enable_fps_modulation=True)
    t, h, w = modulated.axis_angles(SIZE, torch.tensor([12]))
    plain_t, plain_h, plain_w = positions().axis_angles(SIZE, torch.tensor([12]))
    assert_close(t, 2 * plain_t)
    assert torch.equal(h, plain_h) and torch.equal(w, plain_w)
    assert_close(modulated(SIZE, torch.tensor([24.0])), positions()(SIZE))


def test_rotation_is_the_formula() -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(2, 60, 3, 24), positions()(SIZE)
    full = torch.cat([angles, angles], dim=-1)[:, None]
    half_turned = torch.cat([-x[..., 12:], x[..., :12]], dim=-1)
    assert_close(rotate(x, angles.cos(), angles.sin()), x * full.cos() + half_turned * full.sin())
    low = x.to(torch.bfloat16)
    expected = (low.float() * full.cos() + torch.cat([-low[..., 12:], low[..., :12]], -1).float() * full.sin()).to(low)
    assert_close(rotate(low, angles.cos(), angles.sin()), expected, rtol=1e-2, atol=1e-6)


def test_float32_precision_outlives_a_cast() -> None:
    module = torch.nn.ModuleList([positions(), positions(precision="module")])
    before = [p((8, 16, 16)) for p in module]
    module.to(torch.bfloat16)
    kept, rounded = module
    assert kept.seq.dtype == torch.float32 and rounded.seq.dtype == torch.bfloat16
    assert torch.equal(kept.dim_spatial_range, positions().dim_spatial_range)
    assert torch.equal(kept((8, 16, 16)), before[0])
    assert not torch.equal(rounded((8, 16, 16)), before[1])
    module.double()
    assert kept((8, 16, 16)).dtype == torch.float64
    assert_close(kept((8, 16, 16)).float(), before[0], rtol=1e-5, atol=1e-6)


def test_a_float32_frame_rate_widens_only_the_product_in_module_precision() -> None:
    module = positions(precision="module", enable_fps_modulation=True).to(torch.bfloat16)
    whole, exact = (
        module.axis_angles((8, 1, 1), torch.tensor([10])),
        module.axis_angles((8, 1, 1), torch.tensor([10.0])),
    )
    assert torch.equal(whole[0], whole[0].bfloat16().float())
    assert not torch.equal(exact[0], exact[0].bfloat16().float())


def test_features_of_time_are_cosines_then_sines() -> None:
    features = Timesteps(8)(torch.tensor([[0.0, 0.5]], dtype=torch.float64))
    assert_close(features[0, 0], torch.tensor([1.0] * 4 + [0.0] * 4, dtype=torch.float64))
    waves = [0.5 * 10000 ** (-i / 4) for i in range(4)]
    expected = torch.tensor([math.cos(w) for w in waves] + [math.sin(w) for w in waves], dtype=torch.float64)
    assert_close(features[0, 1], expected, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_a_rotation_is_right_twice() -> None:
    x = torch.randn(1, 2, 2, 12, dtype=torch.float64, requires_grad=True)
    angles = positions(12).double()((2, 1, 1))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: rotate(x, angles.cos(), angles.sin()), (x,))
