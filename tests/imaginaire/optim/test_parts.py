# SPDX-License-Identifier: Apache-2.0
"""Parts with optimizers of their own: a step touches the parts that have gradients, and saves go by name."""

from typing import Any

import torch
from torch import nn

from imaginaire.optim.adamw import adamw
from imaginaire.optim.muon import muon
from imaginaire.optim.schedules import PartsOptimizer, PartsScheduler, Repeated, constant, lambda_linear
from imaginaire.optim.state import load_named_state, named_state
from tests.training import difference


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
