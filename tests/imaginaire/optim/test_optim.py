# SPDX-License-Identifier: Apache-2.0
"""The optimizers against the written formula, their state by name, schedules, and parts with their own optimizers."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.optim.adamw import FusedAdamW, _put_lr_on, _UpdateWithApex, adamw, fused_adamw
from imaginaire.optim.muon import muon
from imaginaire.optim.schedules import (
    ConfiguredLR,
    PartsOptimizer,
    PartsScheduler,
    Repeated,
    constant,
    lambda_cosine,
    lambda_linear,
    note_end,
)
from imaginaire.optim.state import load_named_state, named_state, reset_masters
from tests.imaginaire.optim.gradients import equal, set_grads, take_steps
from tests.training import difference


def _model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def _reference(w: Tensor, grads: list[Tensor], lr: float, wd: float, betas: tuple[float, float], eps: float) -> Tensor:
    """The formula, literally, in float64."""
    w, m, v = w.double(), torch.zeros_like(w).double(), torch.zeros_like(w).double()
    for t, g in enumerate(grads, start=1):
        g = g.double()
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps) + wd * w
        w = w - lr * u
    return w


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_follows_the_formula(dtype: torch.dtype, eps: float) -> None:
    model = _model(dtype)
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = fused_adamw(model, lr=1e-2, weight_decay=0.1, betas=[0.9, 0.99], eps=eps)
    grads: list[list[Tensor]] = []
    for number in range(20):
        take_steps([number], (model, optimizer))
        grads.append([p.grad.clone() for p in model.parameters()])
    for i, (param, w) in enumerate(zip(model.parameters(), start, strict=True)):
        expected = _reference(w, [g[i] for g in grads], 1e-2, 0.1, (0.9, 0.99), eps)
        state = optimizer.state[param]
        assert {state[key].dtype for key in state} == {torch.float32}
        if dtype == torch.bfloat16:
            assert_close(state["master"].double(), expected, rtol=1e-5, atol=1e-6)
            assert torch.equal(param, state["master"].bfloat16())
        else:
            assert "master" not in state
            assert_close(param.double(), expected, rtol=1e-5, atol=1e-6)


def test_equals_torch_adamw_in_float32() -> None:
    ours, theirs = _model(), _model()
    a = fused_adamw(ours, lr=3e-3, weight_decay=0.05)
    b = torch.optim.AdamW(theirs.parameters(), lr=3e-3, weight_decay=0.05, betas=(0.9, 0.99), fused=True)
    take_steps(range(10), (ours, a), (theirs, b))
    assert equal(ours, theirs)


def test_masters_can_be_left_out() -> None:
    model = _model(torch.bfloat16)
    optimizer = fused_adamw(model, master_weights=False)
    take_steps([0], (model, optimizer))
    assert not any("master" in values for values in optimizer.state.values())


def test_a_parameter_without_gradient_is_left_alone() -> None:
    model = _model()
    optimizer = fused_adamw(model)
    before = model[2].weight.detach().clone()
    set_grads(model, 0)
    model[2].weight.grad = None
    optimizer.step()
    assert torch.equal(model[2].weight, before) and model[2].weight not in optimizer.state
    take_steps([1], (model, optimizer))
    assert optimizer.state[model[2].weight]["step"] == 1 and optimizer.state[model[0].weight]["step"] == 2


def test_decay_1d_switches_the_decay_of_norms_and_biases() -> None:
    assert [group["weight_decay"] for group in fused_adamw(_model()).param_groups] == [0.1]
    matrices, vectors = fused_adamw(_model(), decay_1d=False).param_groups
    assert {p.dim() for p in matrices["params"]} == {2} and matrices["weight_decay"] == 0.1
    assert {p.dim() for p in vectors["params"]} == {1} and vectors["weight_decay"] == 0.0
    for torchs in (adamw(_model(), decay_1d=False), fused_adamw(_model(), optim_type="adamw", decay_1d=False)):
        assert [group["weight_decay"] for group in torchs.param_groups] == [0.1, 0.0]


def test_frozen_parameters_are_not_optimized() -> None:
    model = _model()
    model[0].requires_grad_(False)
    assert len(fused_adamw(model).param_groups[0]["params"]) == 4


def test_optim_type_adamw_is_torchs() -> None:
    optimizer = fused_adamw(_model(), optim_type="adamw", master_weights=True)
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["betas"] == (0.9, 0.99)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: fused_adamw(_model(), optim_type="fusedadm"), "optimizer.optim_type.*fusedadam"),
        (lambda: fused_adamw(_model(), capturable=False), "optimizer.master_weights.*optimizer.capturable"),
        (lambda: fused_adamw(_model(), lr=-1.0), "optimizer.lr"),
        (lambda: fused_adamw(_model(), betas=[0.9, 1.0]), "optimizer.betas"),
        (lambda: fused_adamw(_model().requires_grad_(False)), "Sequential"),
        (lambda: lambda_linear([1, 2], [10], [0.0], [1.0], [0.0]), "warm_up_steps.*cycle_lengths.*f_start"),
        (lambda: lambda_linear([], [], [], [], []), "scheduler|cycle"),
        (lambda: lambda_linear(1000, [10], [0.0], [1.0], [0.0]), "scheduler.warm_up_steps"),
        (lambda: lambda_linear([1], ["10"], [0.0], [1.0], [0.0]), "scheduler.cycle_lengths"),
        (lambda: lambda_linear([1], [0], [0.0], [1.0], [0.0]), "cycle_lengths=0"),
    ],
)
def test_wrong_settings_name_their_key(call: Callable[[], object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        call()


def test_grad_scaler_unscales_and_skips_infinities() -> None:
    model = _model()
    optimizer = fused_adamw(model, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    plain = copy.deepcopy(model)
    expected = fused_adamw(plain, lr=1e-2)
    x = torch.randn(2, 5)
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    plain(x).sum().backward()
    expected.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(p, q)
    scaler.scale(model(x).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0 and optimizer.state[model[0].weight]["step"] == 1


class _ApexOnPaper:
    """The arithmetic of apex's capturable kernels, written out; the extension itself runs on CUDA only."""

    multi_tensor_adam_capturable = "plain"
    multi_tensor_adam_capturable_master = "master"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, kernel: str, overflow: Tensor, lists: list[list[Tensor]], *numbers: Any) -> None:
        lr, beta1, beta2, eps, step, adam_w_mode, bias_correction, weight_decay, inv_scale = numbers
        assert overflow.dtype == step.dtype == torch.int32 and adam_w_mode == bias_correction == 1
        self.calls.append(kernel)
        for g, p, m, v, *master in zip(*lists, strict=True):
            assert g.dtype == p.dtype and len(master) == (kernel == "master")
            w, grad = (master[0] if master else p), g.float() * inv_scale
            m.mul_(beta1).add_(grad, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            u = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps) + weight_decay * w
            w.sub_(lr * u)
            p.copy_(w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apex_path_equals_torchs(dtype: torch.dtype) -> None:
    ours, theirs = _model(dtype), _model(dtype)
    a, b = fused_adamw(ours, lr=1e-2), fused_adamw(theirs, lr=1e-2)
    apex = _ApexOnPaper()
    assert isinstance(a, FusedAdamW)
    a._kernel = _UpdateWithApex(apex, apex)
    for step in range(6):
        for model, optimizer in ((ours, a), (theirs, b)):
            set_grads(model, step)
            if step in (0, 3):
                model[2].weight.grad = None  # counters differ from here on: torch takes over
            optimizer.step()
    assert apex.calls == ["master" if dtype == torch.bfloat16 else "plain"] * 2  # steps 0 and 3, where they were equal
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.state[p]["step"] == b.state[q]["step"]
        assert_close(a.state[p].get("master", p), b.state[q].get("master", q), rtol=1e-5, atol=1e-7)


# State by name


def _trained(dtype: torch.dtype = torch.bfloat16, steps: int = 3, **options: Any) -> tuple[nn.Module, Any]:
    model = _model(dtype)
    optimizer = fused_adamw(model, lr=1e-2, **options)
    take_steps(range(steps), (model, optimizer))
    return model, optimizer


def _through_a_file(state: Any, path: Path) -> Any:
    torch.save(state, path)
    return torch.load(path, weights_only=True, mmap=True)


def test_state_by_name_continues_exactly(tmp_path: Path) -> None:
    model, optimizer = _trained()
    state = _through_a_file(named_state(optimizer, model), tmp_path / "optim.pt")
    assert set(state["state"]) == {name for name, _ in model.named_parameters()}
    assert state["state"]["0.weight"].keys() == {"step", "exp_avg", "exp_avg_sq", "master"}

    resumed = _model(torch.bfloat16, seed=1)
    resumed.load_state_dict(model.state_dict())
    again = fused_adamw(resumed, lr=1e-2)
    assert load_named_state(again, resumed, state) == []
    take_steps(range(3, 6), (model, optimizer), (resumed, again))
    assert equal(model, resumed)
    assert difference(named_state(optimizer, model), named_state(again, resumed)) is None
    plain = fused_adamw(resumed)
    plain.load_state_dict(optimizer.state_dict())  # torch's own form, which keeps float32 as well
    assert difference(named_state(optimizer, model)["state"], named_state(plain, resumed)["state"]) is None


def test_leaving_out_the_masters_is_noted_and_changes_the_run(tmp_path: Path) -> None:
    model, optimizer = _trained()
    state = _through_a_file(named_state(optimizer, model), tmp_path / "optim.pt")
    for values in state["state"].values():
        del values["master"]
    resumed = copy.deepcopy(model)
    again = fused_adamw(resumed, lr=1e-2)
    (note,) = load_named_state(again, resumed, state)
    assert "no float32 masters of 6 parameters" in note
    take_steps([9], (model, optimizer), (resumed, again))
    assert not torch.equal(optimizer.state[model[0].weight]["master"], again.state[resumed[0].weight]["master"])


def test_a_load_before_the_first_step_decides_the_masters() -> None:
    model, optimizer = _trained()
    state = copy.deepcopy(named_state(optimizer, model))
    other = _model(torch.bfloat16, seed=5)
    again = fused_adamw(other, lr=0.0)
    load_named_state(again, other, state)
    take_steps([0], (other, again))
    assert torch.equal(other[0].weight, model[0].weight)
    reset_masters(again)
    with torch.no_grad():
        other[0].weight.fill_(2.0)
    again.step()
    assert torch.equal(other[0].weight, torch.full_like(other[0].weight, 2.0))


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adamw_fused", "adagrad"])
def test_state_by_name_of_other_optimizers(kind: str, tmp_path: Path) -> None:
    def build(params: Any) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(params, lr=0.1, momentum=0.9)
        if kind == "adagrad":
            return torch.optim.Adagrad(params, lr=0.1)
        return torch.optim.AdamW(params, lr=0.1, fused=kind == "adamw_fused")

    model = _model()
    optimizer = build(model.parameters())
    take_steps([0], (model, optimizer))
    state = _through_a_file(named_state(optimizer, model), tmp_path / "optim.pt")
    resumed = copy.deepcopy(model)
    again = build(resumed.parameters())
    load_named_state(again, resumed, state)
    take_steps([1], (model, optimizer), (resumed, again))
    assert equal(model, resumed)


def test_state_by_position_is_read_in_both_known_orders() -> None:
    model, optimizer = _trained(torch.float32)
    again = fused_adamw(model)
    load_named_state(again, model, copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(again.state[model[1].bias]["exp_avg"], optimizer.state[model[1].bias]["exp_avg"])

    params = sorted(model.parameters(), key=lambda p: p.dim() < 2)  # as cosmos-predict2 orders them, one step per group
    foreign: dict[str, Any] = {
        "state": {},
        "param_groups": [{"params": list(range(6)), "lr": 1e-2, "step": torch.tensor([3])}],
    }
    for i, param in enumerate(params):
        foreign["state"][i] = {key: optimizer.state[param][key].clone() for key in ("exp_avg", "exp_avg_sq")}
    again = fused_adamw(model)
    load_named_state(again, model, foreign)
    for param in params:
        assert torch.equal(again.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])
        assert again.state[param]["step"] == 3


def test_what_does_not_fit_is_named_and_nothing_is_loaded() -> None:
    model, optimizer = _trained()
    state = copy.deepcopy(named_state(optimizer, model))
    state["state"]["3.weight"] = state["state"].pop("2.weight")
    state["param_groups"][0]["params"] = list(state["state"])
    state["state"]["0.weight"]["exp_avg"] = torch.zeros(2, 2)
    again = fused_adamw(model)
    with pytest.raises(CheckpointError) as caught:
        load_named_state(again, model, state)
    for part in ("missing: 2.weight", "unexpected: 3.weight", "0.weight.exp_avg (2, 2) instead of (7, 5)"):
        assert part in str(caught.value)
    assert not again.state
    with pytest.raises(CheckpointError, match="found \\['model'\\]"):
        load_named_state(again, model, {"model": {}})


def test_state_of_another_optimizer_is_refused() -> None:
    model = _model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    take_steps([0], (model, sgd))
    with pytest.raises(CheckpointError, match="is of SGD, this run configures FusedAdamW"):
        load_named_state(fused_adamw(model), model, named_state(sgd, model))
    with pytest.raises(CheckpointError, match="has momentum_buffer but no exp_avg, exp_avg_sq, step"):
        load_named_state(fused_adamw(model), model, sgd.state_dict())
    with pytest.raises(ConfigError, match=r"\(optimizer\) has parameters that are not the model's.*named_parameters"):
        named_state(fused_adamw(_model()), model)


def test_the_configs_hyper_parameters_win_and_differences_are_noted() -> None:
    model, optimizer = _trained()
    ConfiguredLR(optimizer, lambda_linear([10], [100], [0.5], [1.0], [0.0]))
    state = copy.deepcopy(named_state(optimizer, model))
    again = fused_adamw(model, lr=5e-3, weight_decay=0.2)
    notes = load_named_state(again, model, state)
    assert notes == [
        "optimizer.lr: checkpoint 0.01, config 0.005; using the config's from now on",
        "optimizer.weight_decay: checkpoint 0.1, config 0.2; using the config's from now on",
    ]
    assert again.param_groups[0]["lr"] == 5e-3


# Schedules


_QUARTER = 0.2 + 0.4 * (1 + math.cos(math.pi / 4))


@pytest.mark.parametrize(
    ("f", "values"),
    [
        (
            lambda_linear([2, 0], [4, 2], [0.0, 0.5], [1.0, 0.5], [0.2, 0.1]),
            dict(enumerate([0.0, 0.5, 1.0, 0.6, 0.2, 0.3, 0.1, 0.1, 0.1])),
        ),
        (
            lambda_cosine([2], [6], [0.0], [1.0], [0.2]),
            {0: 0.0, 1: 0.5, 2: 1.0, 3: _QUARTER, 4: 0.6, 6: 0.2, 7: 0.2, 10**6: 0.2},
        ),
        (
            lambda_linear([1000], [10000000000000], [1e-6], [1.0], [1.0]),  # the default group
            {0: 1e-6, 500: 0.5000005, 1000: 1.0, 10**9: 1.0},
        ),
        # all ramp: ends at its peak
        (lambda_linear([4], [4], [0.0], [1.0], [0.25]), {0: 0.0, 2: 0.5, 4: 1.0, 5: 0.25}),
        (lambda_cosine([4], [4], [0.0], [1.0], [0.25]), {0: 0.0, 2: 0.5, 4: 1.0, 5: 0.25}),
        (constant(), {7: 1.0}),
        (constant(rate=0.5), {10**12: 0.5}),
    ],
)
def test_schedules_have_these_values_also_after_pickling(f: Any, values: dict[int, float]) -> None:
    for schedule in (f, pickle.loads(pickle.dumps(f))):
        assert {n: schedule(n) for n in values} == pytest.approx(values, rel=1e-12)
    assert lambda_linear([2, 0], [4, 2], [0.0, 0.5], [1.0, 0.5], [0.2, 0.1]).length == 6


def test_scheduler_drives_the_rate_and_resumes_with_the_configs_schedule(tmp_path: Path) -> None:
    model = _model()

    def build(lr: float, f_max: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = fused_adamw(model, lr=lr, decay_1d=False)
        return optimizer, ConfiguredLR(optimizer, lambda_linear([4], [100], [0.0], [f_max], [0.0]))

    optimizer, scheduler = build(0.1, 1.0)
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[1]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.0, 0.025, 0.05, 0.075])
    state = _through_a_file(scheduler.state_dict(), tmp_path / "scheduler.pt")
    assert state == {"last_epoch": 4, "_step_count": 5}
    optimizer, scheduler = build(0.2, 0.5)
    scheduler.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == scheduler.get_last_lr() == pytest.approx([0.1, 0.1])
    scheduler.load_state_dict({"last_epoch": 2, "base_lrs": [7.0], "lr_lambdas": [{}], "_last_lr": [7.0]})
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    with pytest.raises(CheckpointError, match="no 'last_epoch'"):
        scheduler.load_state_dict({})


@pytest.mark.parametrize(("length", "noted"), [(3.0, 1), (4.0, 0), (None, 0)])
def test_the_end_of_a_schedule_of_ones_own_is_noted_where_it_has_one(
    length: float | None, noted: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    schedule: Any = type("Own", (), {"length": length, "__call__": lambda self, step: 1.0})()
    optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
    note_end(torch.optim.lr_scheduler.LambdaLR(optimizer, schedule), max_iter=4)
    assert caplog.text.count("the schedule ends after 3 steps, trainer.max_iter is 4") == noted


def test_a_rate_in_a_tensor_follows_the_schedule() -> None:
    runs = []
    for in_tensor in (False, True):
        model = _model()
        optimizer = fused_adamw(model, lr=1e-2)
        if in_tensor:  # what capturable does on CUDA
            _put_lr_on(torch.device("cpu"), optimizer.param_groups[0])
        scheduler = ConfiguredLR(optimizer, lambda_linear([4], [100], [0.1], [1.0], [0.0]))
        for number in range(6):
            take_steps([number], (model, optimizer))
            scheduler.step()
        scheduler.load_state_dict(scheduler.state_dict())
        runs.append((model, float(optimizer.param_groups[0]["lr"]), named_state(optimizer, model)))
    (a, lr_a, state_a), (b, lr_b, state_b) = runs
    assert lr_b == pytest.approx(lr_a, rel=1e-6)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert_close(p, q, rtol=1e-6, atol=1e-8)
    assert type(state_b["param_groups"][0]["lr"]) is float
    assert load_named_state(fused_adamw(a, lr=1e-2), a, copy.deepcopy(state_b)) == []
    assert state_a["param_groups"][0]["initial_lr"] == state_b["param_groups"][0]["initial_lr"] == 1e-2


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.second = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(3, 3)])})

    def optimizers(self) -> tuple[PartsOptimizer, PartsScheduler]:
        parts = {"first": adamw(self.first, lr=0.1), "second": muon(self.second, lr=0.02, adam_lr=0.01)}
        optimizer = PartsOptimizer(parts)
        falling = lambda_linear([0], [4], [1.0], [1.0], [0.0])
        return optimizer, PartsScheduler(optimizer, {"first": constant(), "second": Repeated(falling, 4)})

    def step(self, name: str, optimizer: PartsOptimizer, scheduler: PartsScheduler) -> None:
        layer: Any = self.first if name == "first" else self.second["blocks"][0]  # type: ignore[index]
        layer(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def test_a_step_leaves_parts_without_gradients_as_they_are() -> None:
    pair = Pair()
    optimizer, scheduler = pair.optimizers()
    before = {name: p.detach().clone() for name, p in pair.named_parameters()}
    pair.step("second", optimizer, scheduler)
    assert optimizer.stepped == ["second"]
    assert {name for name, p in pair.named_parameters() if not torch.equal(p, before[name])} == {
        "second.blocks.0.weight",
        "second.blocks.0.bias",
    }
    assert scheduler.state_dict()["first"]["last_epoch"] == 0
    assert len(optimizer.state) == 2


def test_each_part_has_a_schedule_of_its_own_steps() -> None:
    pair = Pair()
    optimizer, scheduler = pair.optimizers()
    rates = []
    for name in ("second", "first", "second", "first", "second", "second", "second"):
        pair.step(name, optimizer, scheduler)
        rates.append(optimizer.param_groups[1]["lr"] / 0.02)
    assert [round(rate, 6) for rate in rates] == [0.75, 0.75, 0.5, 0.5, 0.25, 1.0, 0.75]  # it begins anew after four
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_step_that_is_left_out_counts_in_the_schedule_of_its_part() -> None:
    pair = Pair()
    optimizer, scheduler = pair.optimizers()
    pair.step("first", optimizer, scheduler)
    before = {name: p.detach().clone() for name, p in pair.named_parameters()}
    pair.second["blocks"][0](torch.ones(1, 3)).sum().backward()  # type: ignore[index]
    for call in (optimizer.zero_grad, optimizer.step, scheduler.step, optimizer.zero_grad):
        call()
    assert all(torch.equal(p, before[name]) for name, p in pair.named_parameters())
    assert [scheduler.state_dict()[name]["last_epoch"] for name in ("first", "second")] == [1, 1]


def test_resumed_parts_go_on_as_if_never_stopped() -> None:
    order = ("first", "second", "second", "first", "second")
    whole, parts = Pair(), Pair()
    optimizer, scheduler = whole.optimizers()
    for name in order:
        whole.step(name, optimizer, scheduler)
    early, early_schedule = parts.optimizers()
    for name in order[:3]:
        parts.step(name, early, early_schedule)
    tree, place = named_state(early, parts), early_schedule.state_dict()
    late, late_schedule = parts.optimizers()
    assert load_named_state(late, parts, tree) == []
    late_schedule.load_state_dict(place)
    for name in order[3:]:
        parts.step(name, late, late_schedule)
    assert difference(dict(whole.state_dict()), dict(parts.state_dict())) is None
    assert difference(named_state(optimizer, whole), named_state(late, parts)) is None
