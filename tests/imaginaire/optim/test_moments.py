# SPDX-License-Identifier: Apache-2.0
"""Moments in fewer bytes, and optimizer state on the host: bytes, rounding, learning, resuming, other layouts."""

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from imaginaire.distributed import parallel
from imaginaire.errors import ConfigError
from imaginaire.optim import adamw as adamw_module
from imaginaire.optim import moments
from imaginaire.optim.adamw import FusedAdamW, fused_adamw
from imaginaire.optim.state import load_named_state, named_state
from imaginaire.training.model import PowerEMA
from tests.far_device import FarDevice, device, register
from tests.imaginaire.optim.gradients import equal
from tests.multiprocess import run_distributed
from tests.training import difference

FORMS: list[dict[str, Any]] = [
    dict(moments="bfloat16"),
    dict(moments="int8"),
    dict(offload=True),
    dict(moments="int8", offload=True),
]


def _model(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 300), nn.GELU(), nn.Linear(300, 40)).to(dtype)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> float:
    """The mean loss of the steps; the task is to turn a vector's entries around."""
    total = 0.0
    weights = next(model.parameters())
    for step in steps:
        x = torch.randn(32, 40, generator=torch.Generator().manual_seed(step)).to(weights)
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        total += float(loss.detach()) / len(steps)
    return total


def _trained(steps: int = 30, dtype: torch.dtype = torch.bfloat16, **kept: Any) -> tuple[nn.Sequential, FusedAdamW]:
    model = _model(dtype)
    optimizer = fused_adamw(model, lr=3e-3, **kept)
    assert isinstance(optimizer, FusedAdamW)
    _train(model, optimizer, range(steps))
    return model, optimizer


def _bytes(optimizer: torch.optim.Optimizer, key: str) -> int:
    found = [
        values[name] for values in optimizer.state.values() for name in (key, key + moments.SCALE) if name in values
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in found)


def _opened(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Both moments of the first weight."""
    state = optimizer.state[next(model.parameters())]
    pairs = ((state[key], state.get(key + moments.SCALE), key == moments.KEYS[0]) for key in moments.KEYS)
    return [moments.opened(v, s, signed=signed, device=v.device).float() for v, s, signed in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1 << 22, 5000])
def test_offloading_changes_no_number(dtype: torch.dtype, numel: int) -> None:
    models = [_model(dtype), _model(dtype)]
    with mock.patch.object(adamw_module, "OPEN_NUMEL", numel):
        for model, offload in zip(models, (False, True), strict=True):
            _train(model, fused_adamw(model, lr=3e-3, offload=offload), range(20))
    assert equal(*models)


def test_bytes_and_numbers_of_each_form(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(300, 40), (40, 40), (9000,)]  # small matrices and vectors are not worth it
    assert [moments.form_of(shape, "int8") for shape in shapes] == ["int8", "float32", "float32"]
    monkeypatch.setattr(adamw_module, "OPEN_NUMEL", 5000)  # rows of a parameter in parts
    weights, biases = 2 * 40 * 300, 340
    exact = _opened(*_trained(2))
    for form, of_weights in (("float32", 4 * weights), ("bfloat16", 2 * weights), ("int8", weights)):
        scales = 4 * (300 + 40 * 2) if form == "int8" else 0
        of_biases = biases * (2 if form == "bfloat16" else 4)
        model, optimizer = _trained(2, moments=form)
        for key in moments.KEYS:
            assert _bytes(optimizer, key) == of_weights + scales + of_biases
        for found, wanted in zip(_opened(model, optimizer), exact, strict=True):
            assert_close(found, wanted, rtol=0.01, atol=0.04 * float(wanted.abs().max()))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_rounding_keeps_the_mean_and_no_second_moment_becomes_zero(form: str, signed: bool) -> None:
    value = torch.randn(8, 600, generator=torch.Generator().manual_seed(0)) * 1e-3
    value = value if signed else value.square()
    key = moments.KEYS[0 if signed else 1]
    kept = moments.empty(value, form, key, value.device)
    total = torch.zeros_like(value)
    for step in range(200):
        stored = (kept[key], kept.get(key + moments.SCALE))
        moments.keep(*stored, value, signed=signed, generator=moments.draws(step, value.device))
        total += moments.opened(*stored, signed=signed, device=value.device) / 200
        assert signed or bool((moments.opened(*stored, signed=signed, device=value.device) > 0).all())
    tolerance = dict(rtol=0.01, atol=0.003 * float(value.abs().max())) if form == "int8" else dict(rtol=1e-3, atol=0)
    assert_close(total, value, **tolerance)


def test_the_number_of_a_block_that_is_furthest_from_0_stays_whatever_its_sign() -> None:
    value = torch.full((16, 256), 1e-3)
    value[::2, 5], value[1::2, 5] = -0.7, 0.7
    kept = moments.empty(value, "int8", "exp_avg", value.device)
    moments.keep(*kept.values(), value, signed=True, generator=moments.draws(0, value.device))
    assert torch.equal(moments.opened(*kept.values(), signed=True, device=value.device)[:, 5], value[:, 5])


def test_what_is_not_finite_stays_so_in_bfloat16() -> None:
    value = torch.tensor([0x7FFFFFFF, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)  # of CUDA; +-inf
    kept = torch.zeros(3, dtype=torch.bfloat16)
    moments.keep(kept, None, value, signed=True, generator=moments.draws(0, value.device))
    assert kept.isnan().tolist() == [True, False, False] and kept[1:].tolist() == [float("inf"), -float("inf")]


def test_the_memory_order_of_a_parameter_changes_no_number() -> None:
    learnt = []
    for order in (torch.contiguous_format, torch.channels_last):
        module = nn.Conv2d(8, 64, 4, bias=False, dtype=torch.float32)
        weight = module.weight = nn.Parameter(torch.ones(64, 8, 4, 4).contiguous(memory_format=order))
        optimizer = fused_adamw(module, lr=1e-2, moments="int8")
        for step in range(3):
            drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
            weight.grad = drawn.contiguous(memory_format=order)
            optimizer.step()
        learnt.append(weight.detach())
    assert torch.equal(*learnt)


@pytest.mark.parametrize("kept", FORMS, ids=str)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, kept: dict[str, Any]) -> None:
    model, optimizer = _trained(10, **kept)
    torch.save(named_state(optimizer, model), tmp_path / "optim.pt")
    resumed = _model(seed=1)
    resumed.load_state_dict(model.state_dict())
    again = fused_adamw(resumed, lr=3e-3, **kept)
    assert load_named_state(again, resumed, torch.load(tmp_path / "optim.pt", weights_only=True)) == []
    for a, b in ((model, optimizer), (resumed, again)):
        _train(a, b, range(10, 20))
    assert equal(model, resumed)
    assert difference(named_state(optimizer, model), named_state(again, resumed)) is None


@pytest.mark.parametrize("before", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("after", ["float32", "bfloat16", "int8", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_one_form_is_loaded_by_another(before: str, after: str, dtype: torch.dtype) -> None:
    model, optimizer = _trained(10, dtype, moments=before)
    state = copy.deepcopy(named_state(optimizer, model))
    form = dict(optim_type="adamw") if after == "adamw" else dict(moments=after)
    again = fused_adamw(model, lr=3e-3, **form)  # type: ignore[arg-type]
    notes = load_named_state(again, model, state)
    is_converted = before == "int8" if after == "adamw" else before != after
    assert any("optimizer.moments" in note for note in notes) == is_converted
    for found, wanted in zip(_opened(model, again), _opened(model, optimizer), strict=True):
        assert_close(found, wanted, rtol=0.01, atol=0.04 * float(wanted.abs().max()))
    _train(model, again, range(10, 12))


def test_a_state_by_position_stays_as_it_is_kept() -> None:
    model, optimizer = _trained(5, moments="int8", offload=True)
    again = fused_adamw(model, lr=3e-3, moments="int8", offload=True)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert difference(named_state(optimizer, model), named_state(again, model)) is None


def test_impossible_combinations_are_named() -> None:
    for wrong, named in (
        (dict(moments="int4"), "optimizer.moments is 'int4'"),
        (dict(optim_type="adamw", moments="int8"), "optimizer.optim_type=adamw"),
        (dict(optim_type="adamw", offload=True), "optimizer.offload=True"),
    ):
        with pytest.raises(ConfigError, match=named):
            fused_adamw(_model(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="float64 moments"):
        fused_adamw(_model(torch.float64), moments="int8")


# --- two devices, two processes


@pytest.mark.slow
def test_state_on_the_host_of_another_device() -> None:
    run_distributed(_step_on_a_far_device, world_size=1)


def _step_on_a_far_device() -> None:
    register()
    here, there = _model(), _model()
    averages = [PowerEMA(here), PowerEMA(here)]
    with FarDevice():
        there.to(device())
        optimizers = [fused_adamw(here, lr=3e-3), fused_adamw(there, lr=3e-3, offload=True)]
        averages[1] = PowerEMA(there, offload=True)
        for step in range(4):
            for model, optimizer, average in zip((here, there), optimizers, averages, strict=True):
                for param in model.parameters():
                    drawn = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
                    param.grad = drawn.to(param.device, param.dtype)
                optimizer.step()
                average.update(model, step)
        optimizers[1].load_state_dict(optimizers[1].state_dict())
        for values in optimizers[1].state.values():
            assert values["step"].device == device()
            assert all(value.device.type == "cpu" for key, value in values.items() if key != "step")
        before = [param.cpu() for param in there.parameters()]
        with averages[1].scope(there):
            assert not torch.equal(before[0], next(there.parameters()).cpu())
        assert all(torch.equal(a, b.cpu()) for a, b in zip(before, there.parameters(), strict=True))
        assert all(torch.equal(a, b.cpu()) for a, b in zip(here.parameters(), there.parameters(), strict=True))
        assert all(shadow.device.type == "cpu" for shadow in averages[1].shadows.values())
        assert all(torch.equal(averages[0].shadows[name], found) for name, found in averages[1].shadows.items())


@pytest.mark.slow
def test_shards_hold_whole_blocks(tmp_path: Path) -> None:
    model, optimizer = _trained(5, moments="int8")
    torch.save((model.state_dict(), named_state(optimizer, model)), tmp_path / "whole.pt")
    run_distributed(_sharded, world_size=2, args=(str(tmp_path),))
    _, state = torch.load(tmp_path / "gathered.pt", weights_only=True)
    assert difference(state["state"], named_state(optimizer, model)["state"]) is None
    again = fused_adamw(model, lr=3e-3, moments="int8")
    assert load_named_state(again, model, state) == []


def _sharded(folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    weights, state = torch.load(Path(folder) / "whole.pt", weights_only=True)
    model = _model(seed=1)
    model.load_state_dict(weights)
    mesh = parallel.init_dims().fsdp_mesh(-1)
    assert mesh is not None
    fully_shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match=r"optimizer\.offload"):
        fused_adamw(model, offload=True)
    with pytest.raises(ConfigError, match=r"ema\.offload"):
        PowerEMA(model, offload=True)
    optimizer = fused_adamw(model, lr=3e-3, moments="int8")
    assert load_named_state(optimizer, model, state) == []
    tree = named_state(optimizer, model)
    whole = {n: {k: parallel.full_tensor(v) for k, v in values.items()} for n, values in tree["state"].items()}
    if torch.distributed.get_rank() == 0:
        torch.save((weights, {**tree, "state": whole}), Path(folder) / "gathered.pt")
    losses = [_train(model, optimizer, range(start, start + 20)) for start in (5, 25)]
    assert losses[1] < losses[0]
