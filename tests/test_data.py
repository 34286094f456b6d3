# SPDX-License-Identifier: Apache-2.0
import random as python_random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from imaginaire.data import DataStream, ResumableLoader, move_to
from imaginaire.errors import DataError
from imaginaire.parallel import ParallelDims


class Numbers(Dataset[dict[str, Any]]):
    """Item i with draws from all three global generators."""

    def __init__(self, count: int = 10) -> None:
        self.count = count
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads.append(index)
        return {
            "index": index,
            "draws": torch.tensor([python_random.random(), float(numpy.random.random()), float(torch.rand(()))]),
        }


class Stream(IterableDataset[dict[str, int]]):
    def __iter__(self) -> Iterator[dict[str, int]]:
        yield from ({"index": i} for i in range(6))


def dims(world: int = 1, rank: int = 0, cp: int = 1) -> ParallelDims:
    return ParallelDims(world_size=world, rank=rank, context_parallel_size=cp)


def take(loader: Any, count: int, *, state: dict[str, int] | None = None, of: ParallelDims | None = None) -> Any:
    stream = DataStream(loader, seed=5, dims=of or dims(), state=state)
    batches = list(islice(iter(stream), count))
    return batches, stream.state_dict()


def indices(batches: list[dict[str, Any]]) -> list[int]:
    return [int(i) for batch in batches for i in batch["index"]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_taken_up_at_a_position_gives_the_same_samples_and_draws(workers: int) -> None:
    loader = ResumableLoader(Numbers(), batch_size=3, num_workers=workers)
    whole, _ = take(loader, 8)
    first, state = take(loader, 3)
    rest, _ = take(loader, 5, state=state)
    assert indices(first + rest) == indices(whole)
    for expected, found in zip(whole, first + rest, strict=True):
        assert torch.equal(expected["draws"], found["draws"])
        assert torch.equal(expected["sample_position"], found["sample_position"])


def test_workers_do_not_change_the_draws() -> None:
    alone, _ = take(ResumableLoader(Numbers(), batch_size=2), 4)
    helped, _ = take(ResumableLoader(Numbers(), batch_size=2, num_workers=2), 4)
    assert all(torch.equal(a["draws"], b["draws"]) for a, b in zip(alone, helped, strict=True))


def test_reading_data_leaves_the_generators_of_the_training_process_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    take(ResumableLoader(Numbers(), batch_size=2), 4)
    take(DataLoader(Numbers(), batch_size=2, shuffle=True), 4)
    assert torch.equal(torch.rand(3), expected)


def test_every_epoch_has_every_sample_once_in_another_order() -> None:
    batches, _ = take(
        ResumableLoader(Numbers(), batch_size=4), 5
    )  # 20 samples: two epochs, with a batch over the border
    order = indices(batches)
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]


@pytest.mark.parametrize("change", [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_another_number_of_ranks_continues_the_same_order(change: tuple[int, int]) -> None:
    before, after = change
    loader = ResumableLoader(Numbers(16), batch_size=2)
    whole, _ = take(loader, 24)

    def ranks(world: int, count: int, state: dict[str, int] | None) -> tuple[list[int], dict[str, int]]:
        parts = [take(loader, count, state=state, of=dims(world, rank)) for rank in range(world)]
        order = [int(i) for step in range(count) for part, _ in parts for i in part[step]["index"]]
        return order, parts[0][1]

    first, state = ranks(before, 8 // before, None)
    second, _ = ranks(after, 16 // after, state)
    assert first + second == indices(whole)[: len(first + second)]
    assert sorted((first + second)[:16]) == list(range(16))


def test_ranks_of_a_context_parallel_group_share_their_sample() -> None:
    loader = ResumableLoader(Numbers(), batch_size=2)
    parts = [take(loader, 3, of=dims(4, rank, cp=2))[0] for rank in range(4)]
    assert indices(parts[0]) == indices(parts[1]) != indices(parts[2]) == indices(parts[3])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["distributed", "random", "random_with_generator"])
def test_a_foreign_loader_is_skipped_ahead_by_index(kind: str, workers: int) -> None:
    def build() -> DataLoader[Any]:
        dataset = Numbers(10)
        if kind == "distributed":
            sampler: Any = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=0)
        else:
            generator = torch.Generator() if kind == "random_with_generator" else None
            sampler = torch.utils.data.RandomSampler(dataset, generator=generator)
        return DataLoader(dataset, sampler=sampler, batch_size=3, drop_last=True, num_workers=workers)

    whole, _ = take(build(), 9)
    assert indices(whole)[:9] != indices(whole)[9:18], "epochs repeat one order"
    first, state = take(build(), 4)
    loader = build()
    rest, _ = take(loader, 5, state=state)
    assert indices(first + rest) == indices(whole)
    assert all(torch.equal(a["draws"], b["draws"]) for a, b in zip(whole, first + rest, strict=True))
    if workers == 0:
        assert len(loader.dataset.reads) == 15, "skipped samples were read"  # type: ignore[attr-defined]


def test_a_foreign_sampler_on_fewer_ranks_goes_on_where_more_stopped() -> None:
    def build(world: int, rank: int) -> DataLoader[Any]:
        dataset = Numbers(9)  # 2 ranks pad it to 10
        return DataLoader(dataset, sampler=DistributedSampler(dataset, world, rank, seed=0), batch_size=1)

    parts = [take(build(2, rank), 5, of=dims(2, rank)) for rank in range(2)]
    one, _ = take(build(1, 0), 9, state=parts[0][1])
    assert sorted(indices(one)) == list(range(9)), "the second epoch is whole"


def test_other_iterables_repeat_and_resume_by_reading(caplog: pytest.LogCaptureFixture) -> None:
    whole, _ = take(DataLoader(Stream(), batch_size=2), 8)
    first, state = take(DataLoader(Stream(), batch_size=2), 4)
    with caplog.at_level("WARNING"):
        rest, _ = take(DataLoader(Stream(), batch_size=2), 4, state=state)
    assert indices(first + rest) == indices(whole)
    assert "only be resumed by reading its first 2 samples" in caplog.text


def test_an_empty_source_is_an_error_and_not_an_endless_wait() -> None:
    with pytest.raises(DataError, match=r"data set has 2 samples for this rank's batch_size=3 \(drop_last=True\)"):
        take(DataLoader(Numbers(2), batch_size=3, drop_last=True), 1)
    with pytest.raises(DataError, match="gave no batch at all in epoch 0"):
        take(iter([]), 1)
    with pytest.raises(DataError, match="is empty"):
        ResumableLoader(Numbers(0))


def test_a_pass_for_validation_is_in_order_and_always_alike() -> None:
    loader = ResumableLoader(Numbers(5), batch_size=2)
    first, second = list(loader), list(loader)
    assert indices(first) == [0, 1, 2, 3, 4, 0]
    assert len(loader) == 3
    assert all(torch.equal(a["draws"], b["draws"]) for a, b in zip(first, second, strict=True))


def test_move_to_keeps_containers() -> None:
    moved = move_to({"a": torch.ones(2), "b": [torch.zeros(1), "text"], "c": (1, torch.ones(1))}, torch.device("meta"))
    assert moved["a"].device.type == moved["b"][0].device.type == moved["c"][1].device.type == "meta"
    assert moved["b"][1] == "text" and moved["c"][0] == 1
