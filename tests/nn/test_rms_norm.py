# SPDX-License-Identifier: Apache-2.0
"""RMS norm: PyTorch's values and gradients, whatever the dtype."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from cosmos_predict2.nn.rms_norm import EPS, RMSNorm


def norm_and_input(dtype: torch.dtype) -> tuple[RMSNorm, torch.Tensor]:
    torch.manual_seed(0)
    norm = RMSNorm(24).to(dtype)
    torch.nn.init.normal_(norm.weight)
    return norm, (3 * torch.randn(2, 5, 3, 24)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_pytorchs(dtype: torch.dtype) -> None:
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

    def of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
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
