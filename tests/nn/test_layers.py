# SPDX-License-Identifier: Apache-2.0
"""Products through oneDNN and RMS norms have PyTorch's values and gradients, whatever the dtype and memory layout;
starts of parameters, and positions."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from cosmos_predict2.nn import layers
from cosmos_predict2.nn.layers import (
    CUT,
    EPS,
    Linear,
    RMSNorm,
    RotaryPositions,
    Start,
    is_for_onednn,
    product,
    rotate,
    starts,
)
from tests.nn.networks import small_net

LARGE, SMALL = (160, 96, 128), (4, 6, 8)  # rows, columns in, columns out


def matrices(sizes: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    rows, columns_in, columns_out = sizes
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, columns_in, generator=generator, dtype=torch.float64)
    weight = torch.randn(columns_out, columns_in, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()


@pytest.mark.parametrize("sizes", [LARGE, SMALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_of_products(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight = matrices(sizes, dtype)
    out = product(x, weight)
    assert out.dtype == dtype
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=1e-12, atol=1e-12)
    assert_close(out, x @ weight.t(), **tolerance)
    for found, expected in zip(
        torch.autograd.grad(product(x, weight).square().sum(), (x, weight)),
        torch.autograd.grad((x @ weight.t()).square().sum(), (x, weight)),
    ):
        assert_close(found, expected, rtol=1e-4, atol=1e-2 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_only_the_gradient_that_is_needed(needs: tuple[bool, bool]) -> None:
    pair = [m.detach().requires_grad_(need) for m, need in zip(matrices(LARGE), needs)]
    product(*pair).sum().backward()
    assert [m.grad is not None for m in pair] == list(needs)


def test_the_second_derivative_is_there() -> None:
    x, weight = matrices(LARGE)
    (gradient,) = torch.autograd.grad(product(x, weight).pow(3).sum(), x, create_graph=True)
    (found,) = torch.autograd.grad(gradient.sum(), weight)
    (gradient,) = torch.autograd.grad((x @ weight.t()).pow(3).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(gradient.sum(), weight)
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_gaps_in_memory_are_closed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = (m.detach() for m in matrices(LARGE))
    wide_x, wide_weight = (m[:, None].expand(-1, 3, -1).contiguous()[:, 1] for m in (x, weight))
    assert not wide_weight.is_contiguous()
    assert_close(product(wide_x, wide_weight), product(x, weight), rtol=0, atol=0)
    assert layers._dense(wide_weight).is_contiguous()
    assert layers._dense(weight.t()).data_ptr() == weight.data_ptr()
    assert_close(product(x.view(8, 20, 96), weight), product(x, weight).view(8, 20, 128), rtol=0, atol=0)


def test_a_broadcast_gradient() -> None:
    x, weight = matrices(LARGE)
    product(x, weight).sum().backward()  # its gradient is one number, seen everywhere
    assert x.grad is not None
    assert_close(x.grad, weight.detach().sum(0).expand_as(x), rtol=1e-4, atol=1e-4)


def test_the_layer_is_torchs_own() -> None:
    torch.manual_seed(0)
    for bias in (False, True):
        layer = Linear(96, 128, bias=bias)
        assert isinstance(layer, torch.nn.Linear)
        x = torch.randn(5, 40, 96)
        assert_close(layer(x), F.linear(x, layer.weight, layer.bias), rtol=1e-4, atol=1e-5)


def test_what_onednn_is_not_for() -> None:
    x = torch.zeros(2, 2)
    assert is_for_onednn(x) == layers._USES_ONEDNN
    assert not is_for_onednn(x.double()) and not is_for_onednn(x, x.bfloat16()) and not is_for_onednn(x.to("meta"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_for_onednn(x)
        x, weight = matrices(LARGE)
        assert product(x, weight).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("processor", "capability", "expected"),
    [
        ("AuthenticAMD AMD EPYC 9R14", "AVX512", True),
        ("AuthenticAMD AMD EPYC 7763", "AVX2", False),
        ("GenuineIntel Intel(R) Xeon(R) Platinum 8481C CPU", "AVX512", False),
        ("aarch64", "DEFAULT", False),
    ],
)
def test_the_processor_decides_which_product_is_taken(processor: str, capability: str, expected: bool) -> None:
    assert layers.uses_onednn(processor, capability) == expected


def norm_and_input(dtype: torch.dtype) -> tuple[RMSNorm, Tensor]:
    torch.manual_seed(0)
    norm = RMSNorm(24).to(dtype)
    torch.nn.init.normal_(norm.weight)
    return norm, (3 * torch.randn(2, 5, 3, 24)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_of_norms(dtype: torch.dtype) -> None:
    norm, x = norm_and_input(dtype)
    expected = F.rms_norm(x, (24,), norm.weight, EPS)
    assert_close(norm(x), expected)
    weight = torch.randn(x.shape, dtype=dtype)
    found = torch.autograd.grad((norm(x) * weight).sum(), (x, norm.weight))
    for a, b in zip(found, torch.autograd.grad((expected * weight).sum(), (x, norm.weight))):
        assert_close(a, b)


def test_first_and_second_derivatives() -> None:
    norm, x = norm_and_input(torch.float64)
    x = x[:1, :2].detach().requires_grad_()

    def of(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": weight}, x)

    assert torch.autograd.gradcheck(of, (x, norm.weight))
    assert torch.autograd.gradgradcheck(of, (x, norm.weight))


def test_zeros_give_zeros() -> None:
    """Text past the prompt is zero: its keys must be too, with a gradient that is finite."""
    norm, _ = norm_and_input(torch.float32)
    x = torch.zeros(1, 24, requires_grad=True)
    norm(x).sum().backward()
    assert not norm(x).any()
    assert x.grad is not None and bool(x.grad.isfinite().all())


@pytest.mark.parametrize(
    ("of_x", "of_weight"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
    ],
)
def test_mixed_precision_is_computed_in_the_wider_one(of_x: torch.dtype, of_weight: torch.dtype) -> None:
    """As under autocast, or with an embedding of time that is kept wide: neither input is rounded before."""
    torch.manual_seed(0)
    norm = RMSNorm(24)
    torch.nn.init.normal_(norm.weight)
    norm.to(of_weight)
    x = (3 * torch.randn(64, 24)).to(of_x)
    expected = F.rms_norm(x.float(), (24,), norm.weight.float(), EPS).to(of_x)
    found = norm(x)
    assert found.dtype == of_x and torch.equal(found, expected)


# Starts of parameters -------------------------------------------------------------------------------------------------


def test_normals_are_cut_at_three_deviations_and_keep_their_shape() -> None:
    drawn = Start(std=0.5).draw_(torch.empty(400_000), torch.Generator().manual_seed(0)) / 0.5
    expected = nn.init.trunc_normal_(torch.empty(400_000), a=-CUT, b=CUT, generator=torch.Generator().manual_seed(1))
    assert float(drawn.abs().max()) <= CUT * 1.000001
    for level in (-2.9, -2, -1, 0, 0.5, 1, 2, 2.9):
        assert abs(float((drawn < level).float().mean() - (expected < level).float().mean())) < 0.004, level


def test_every_parameter_has_a_start_and_a_foreign_one_is_an_error() -> None:
    net = small_net(extra_per_block_abs_pos_emb=True, use_adaln_lora=False)
    found = starts(net)
    assert found.keys() == dict(net.named_parameters()).keys()
    assert found["t_embedder.1.linear_1.bias"] == Start()
    assert found["blocks.0.adaln_modulation_mlp.1.weight"] == Start()  # its last matrix where it has only one
    assert found["blocks.0.cross_attn.q_norm.weight"] == Start(1.0)
    net.names = nn.Embedding(3, 4)
    with pytest.raises(ValueError, match=r"names\.weight.*method starts\(\)"):
        starts(net)
    net.names.starts = lambda: {"weight": Start(0.5)}  # type: ignore[assignment]
    assert starts(net)["names.weight"] == Start(0.5)


# Positions ------------------------------------------------------------------------------------------------------------

SIZE = (3, 4, 5)


def positions(head_dim: int = 24, **options: object) -> RotaryPositions:
    return RotaryPositions(head_dim, **{"max_size": (8, 16, 16), "ratios": (1.0, 3.0, 3.0), **options})  # type: ignore[arg-type]


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


def test_the_gradient_of_a_rotation_is_right_twice() -> None:
    x = torch.randn(1, 2, 2, 12, dtype=torch.float64, requires_grad=True)
    angles = positions(12).double()((2, 1, 1))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: rotate(x, angles.cos(), angles.sin()), (x,))
