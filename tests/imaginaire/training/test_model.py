# SPDX-License-Identifier: Apache-2.0
"""The power-function average of the weights, and modules that are built without memory."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from imaginaire.errors import ConfigError, TrainingError
from imaginaire.training.model import PowerEMA, has_meta, power_ema_exponent, require_memory, to_device


def _model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).to(dtype)
    model[0].bias.requires_grad_(False)
    return model


def _move(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator).to(param.dtype))


@pytest.mark.parametrize("rate", [0.0, -0.1, 0.5, float("nan")])
def test_a_rate_without_solution_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="relative width"):
        power_ema_exponent(rate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trajectory_follows_the_formula(dtype: torch.dtype) -> None:
    model = _model(dtype)
    ema = PowerEMA(model, rate=0.1)
    expected: dict[str, Any] = {}
    for i in range(6):
        _move(model, i)
        ema.update(model, i)
        beta = ema.beta(i)
        for name, param in model.named_parameters():
            expected[name] = beta * expected.get(name, 0.0) + (1 - beta) * param.detach().double()
    for name, shadow in ema.shadows.items():
        assert shadow.dtype == torch.float32
        assert_close(shadow.double(), expected[name], rtol=1e-6, atol=1e-6)
    assert "0.bias" in ema.shadows  # frozen, averaged all the same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scope_swaps_and_restores_exactly(dtype: torch.dtype) -> None:
    model = _model(dtype)
    ema = PowerEMA(model)
    _move(model, 0)
    before = copy.deepcopy(dict(model.named_parameters()))
    with pytest.raises(KeyError), ema.scope(model):
        assert all(torch.equal(param, ema.shadows[name].to(dtype)) for name, param in model.named_parameters())
        raise KeyError
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) and param.requires_grad == before[name].requires_grad


def test_state_is_a_complete_state_dict() -> None:
    model = _model()
    ema = PowerEMA(model)
    model(torch.randn(8, 4))
    state = ema.state()
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    assert torch.equal(state["1.running_mean"], model[1].running_mean)
    assert state["1.running_mean"].data_ptr() != model[1].running_mean.data_ptr()


def test_another_module_is_refused() -> None:
    ema = PowerEMA(_model())
    with pytest.raises(ConfigError, match=r"it has \['2.bias', '2.weight'\], the module \['3.bias', '3.weight'\]"):
        ema.update(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)), 0)


def _half_built() -> nn.Sequential:
    with torch.device("meta"):
        late = nn.BatchNorm2d(3)
    return nn.Sequential(nn.Conv2d(3, 3, 1), late)


def test_what_has_memory_is_moved_and_the_rest_stays() -> None:
    module = _half_built()
    weight = module[0].weight
    to_device(module, torch.device("cpu"), torch.channels_last)
    assert module[0].weight is weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert all(tensor.is_meta for tensor in [*module[1].parameters(), *module[1].buffers()])
    whole = nn.Conv2d(3, 3, 2)
    to_device(whole, torch.device("cpu"), torch.channels_last)
    assert whole.weight.is_contiguous(memory_format=torch.channels_last)


def test_what_never_got_memory_is_named() -> None:
    module = _half_built()
    with pytest.raises(TrainingError, match=r"5 of the 7 parameters and buffers of Sequential .*1\.weight, 1\.bias"):
        require_memory(module)
    module.to_empty(device="cpu")
    assert not has_meta(module)
    require_memory(module)
