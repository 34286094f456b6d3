# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers with gradients that follow from the number of the step."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer


def set_grads(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def take_steps(numbers: Iterable[int], *runs: tuple[nn.Module, Optimizer]) -> None:
    """Steps of every run, each with the same gradients."""
    for number in numbers:
        for model, optimizer in runs:
            set_grads(model, number)
            optimizer.step()


def equal(a: nn.Module, b: nn.Module) -> bool:
    """True if all parameters are the same bit for bit."""
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
