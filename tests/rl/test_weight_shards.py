# SPDX-License-Identifier: Apache-2.0
"""Weights on their way to rollout workers: what travels every time, what once, and who has taken it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardedOver

from cosmos_predict2.rl.episodes import weight_shards
from cosmos_predict2.rl.episodes.weight_shards import (
    CHANGING,
    FROZEN,
    fill,
    reference_table,
    shards_of,
    without_weights,
)


class Partly(nn.Module):
    """One weight that is trained, one that is not, and a buffer."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.full((2, 3), value))
        self.frozen = nn.Parameter(torch.full((2,), value, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("step", torch.full((), int(value)))


def test_what_is_trained_and_buffers_travel_every_time_and_the_rest_once() -> None:
    ours, there = Partly(3.0), Partly(0.0)
    with without_weights(there):
        assert there.trained.numel() == there.frozen.numel() == 0
        fill(there, [{**shards_of(ours, CHANGING), **shards_of(ours, FROZEN)}])
        assert torch.equal(there.trained, ours.trained) and torch.equal(there.frozen, ours.frozen)
    assert set(shards_of(ours, CHANGING)) == {"trained", "step"} and set(shards_of(ours, FROZEN)) == {"frozen"}
    with torch.no_grad():
        ours.trained += 1
        ours.frozen += 1
    ours.step += 1
    fill(there, [shards_of(ours, CHANGING)])
    assert there.trained.unique().tolist() == [4.0] and there.step == 4
    assert there.frozen.unique().tolist() == [0.0]


@pytest.mark.parametrize(
    ("place", "placements", "sends"),
    [
        ((0, 1), [Replicate(), ShardedOver(0)], True),
        ((1, 0), [Replicate(), ShardedOver(0)], False),
        ((1, 0), [ShardedOver(0), Replicate()], True),
        ((1, 1), [ShardedOver(0), Replicate()], False),
        ((1, 1), [ShardedOver(0), ShardedOver(1)], True),
        ((0, 0), [Replicate(), Replicate()], True),
    ],
)
def test_of_replicas_the_first_sends_and_every_shard_is_sent(
    place: tuple[int, int], placements: list[Any], sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Placed(SimpleNamespace):
        __class__ = DTensor  # type: ignore[assignment]

    mesh = SimpleNamespace(get_coordinate=lambda: place)
    assert weight_shards._sends(Placed(device_mesh=mesh, placements=placements)) is sends  # type: ignore[arg-type]


def test_references_are_in_the_order_of_ranks_and_kept_until_all_have_taken_them() -> None:
    table = reference_table()(3)
    for number in (1, 2):
        for rank in (2, 0, 1):
            table.put(number, rank, [(number, rank)])
    for _ in range(3):
        assert set(table.references) == {1, 2}
        assert table.take(1) == [(1, 0), (1, 1), (1, 2)]
    assert set(table.references) == {2} and not table.num_taken
