# SPDX-License-Identifier: Apache-2.0
"""torch's generator after draws that were skipped is where the draws would have left it, to the bit."""

import pytest
import torch
from torch import nn

from imaginaire import skipped_draws
from imaginaire.skipped_draws import SkippedDraws, advance


@pytest.mark.parametrize("before", [0, 1, 623, 624, 625])
def test_it_advances_as_draws_do(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipped_draws, "FEW", 1000)
    for count in (1, 1001, 1247, 1248, 1249, 20_000, 1_000_003):
        states = []
        for draw in (torch.rand, advance):
            torch.manual_seed(before)
            torch.rand(before)
            draw(count)
            states.append(torch.get_rng_state())
        assert torch.equal(*states), count


def test_it_advances_by_more_than_anyone_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipped_draws, "FEW", 1000)
    found = []
    for counts in ((15 * 10**9, 7 * 10**10), (7 * 10**10 + 5000, 15 * 10**9 - 5000)):
        torch.manual_seed(0)
        for count in counts:
            advance(count)
        found.append(torch.get_rng_state())
    assert torch.equal(*found)


@pytest.mark.parametrize("few", [1000, 2**24])
def test_what_is_drawn_after_a_network_is_the_same(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipped_draws, "FEW", few)

    def build() -> nn.Module:
        parts: list[nn.Module] = [nn.Linear(70, 33), nn.Embedding(100, 17), nn.Conv2d(3, 5, 3), nn.Linear(2, 3)]
        nn.init.normal_(parts[3].weight)  # type: ignore[arg-type]
        nn.init.trunc_normal_(parts[2].weight, a=-1.0, b=1.0)  # type: ignore[arg-type]
        parts[0].register_buffer("count", torch.arange(4))
        parts[0].register_buffer("noise", torch.randn(20))
        return nn.ModuleList([*parts, nn.LayerNorm(7)])

    torch.manual_seed(1)
    drawn = build()
    after = torch.get_rng_state()
    torch.manual_seed(1)
    with SkippedDraws():
        skipped = build()
    assert torch.equal(torch.get_rng_state(), after)
    assert not torch.equal(skipped[0].weight, drawn[0].weight)  # type: ignore[index]
    for name in (
        "0.count",
        "0.noise",
        "2.weight",
        "3.weight",
        "4.weight",
        "4.bias",
    ):  # known, or few and drawn in another way
        assert torch.equal(skipped.state_dict()[name], drawn.state_dict()[name]), name
