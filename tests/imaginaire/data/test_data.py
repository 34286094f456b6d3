# SPDX-License-Identifier: Apache-2.0
import contextlib
import dataclasses
import multiprocessing
import os
import random as python_random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, get_worker_info

from imaginaire.data.stream import WEIGHT_KEY, DataStream, ResumableLoader, move_to, open_pass
from imaginaire.data.workers import close_readers
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import DataError
from tests.programs import HANG_S, finished


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


class Stream(IterableDataset[dict[str, Any]]):
    """Shuffled numbers with draws, all from the global generators."""

    def __init__(self, count: int = 6) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = list(range(self.count))
        python_random.shuffle(order)
        for i in order:
            yield {"index": i, "draws": torch.tensor([float(numpy.random.random()), float(torch.rand(()))])}


class Shifting(DataLoader[Any]):
    """Changes its batches on their way out."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            batch["index"] = batch["index"] + 100
            yield batch


class EndlessBatches:
    """A batch sampler that draws from the global generators as it goes and has no length."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield torch.randint(10, (3,)).tolist()


class EndlessIndices:
    def __iter__(self) -> Iterator[int]:
        while True:
            yield python_random.randrange(10)


class Slow(Numbers):
    """Far longer at one of its samples than anybody waits."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 2:
            time.sleep(HANG_S)
        return super().__getitem__(index)


class Passing(IterableDataset[dict[str, Any]]):
    """The items of a data set, of which a worker reads its share."""

    def __init__(self, dataset: Numbers) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from (self.dataset[i] for i in range(first, len(self.dataset), step))


class Broken(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 3:
            raise KeyError("a bug in the data")
        return super().__getitem__(index)


def dims(world: int = 1, rank: int = 0, cp: int = 1) -> ParallelDims:
    return ParallelDims(world_size=world, rank=rank, context_parallel_size=cp)


def take(loader: Any, count: int, *, state: dict[str, int | None] | None = None, of: ParallelDims | None = None) -> Any:
    stream = DataStream(loader, seed=5, dims=of or dims())
    stream.load_state_dict(state or {})
    batches = list(islice(iter(stream), count))
    return batches, stream.state_dict()


def indices(batches: list[dict[str, Any]]) -> list[int]:
    return [int(i) for batch in batches for i in batch["index"]]


def resumed(build: Callable[[], Any], stop: int, total: int) -> tuple[list[dict[str, Any]], Any]:
    """The batches of an uninterrupted run, which those of a run that is taken up after ``stop`` of them equal, and the
    loader of what was taken up."""
    whole, _ = take(build(), total)
    first, state = take(build(), stop)
    loader = build()
    rest, _ = take(loader, total - stop, state=state)
    assert indices(first + rest) == indices(whole)
    assert all(torch.equal(a["draws"], b["draws"]) for a, b in zip(whole, first + rest, strict=True))
    return whole, loader


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_taken_up_at_a_position_gives_the_same_samples_and_draws(workers: int) -> None:
    loader = ResumableLoader(Numbers(), batch_size=3, num_workers=workers)
    whole, _ = take(ResumableLoader(Numbers(), batch_size=3), 8)  # workers do not change the draws
    assert len(torch.cat([batch["draws"] for batch in whole]).unique(dim=0)) == 24, "each sample has its own"
    first, state = take(loader, 3)
    rest, _ = take(loader, 5, state=state)
    order = indices(whole)
    assert indices(first + rest) == order
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(10)) and order[:10] != order[10:20]
    for expected, found in zip(whole, first + rest, strict=True):
        assert torch.equal(expected["draws"], found["draws"])
        assert torch.equal(expected["sample_position"], found["sample_position"])


def test_reading_data_leaves_the_generators_of_the_training_process_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    take(ResumableLoader(Numbers(), batch_size=2), 4)
    take(DataLoader(Numbers(), batch_size=2, shuffle=True), 4)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("change", [(1, 2), (4, 1)])
def test_another_number_of_ranks_continues_the_same_order(change: tuple[int, int]) -> None:
    before, after = change
    loader = ResumableLoader(Numbers(16), batch_size=2)
    whole, _ = take(loader, 24)

    def ranks(world: int, count: int, state: dict[str, int | None] | None) -> tuple[list[int], dict[str, int | None]]:
        parts = [take(loader, count, state=state, of=dims(world, rank)) for rank in range(world)]
        order = [int(i) for step in range(count) for part, _ in parts for i in part[step]["index"]]
        return order, parts[0][1]

    first, state = ranks(before, 8 // before, None)
    second, _ = ranks(after, 16 // after, state)
    assert first + second == indices(whole)[: len(first + second)]
    assert sorted((first + second)[:16]) == list(range(16))


def test_ranks_of_context_parallel_groups_and_those_that_are_told_to_share_their_samples() -> None:
    loader, (whole, end) = ResumableLoader(Numbers(), batch_size=2), take(ResumableLoader(Numbers(), batch_size=2), 6)
    parts = [take(loader, 3, of=dims(8, rank, cp=2).sharing_samples(2)) for rank in range(8)]
    found = [indices(part) for part, _ in parts]
    assert found[0] == found[1] == found[2] == found[3] != found[4] == found[5] == found[6] == found[7]
    assert sorted(found[0] + found[4]) == sorted(indices(whole))
    assert parts[7][1]["samples_seen"] == end["samples_seen"]


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

    whole, loader = resumed(build, 4, 9)
    assert indices(whole)[:9] != indices(whole)[9:18], "epochs repeat one order"
    if workers == 0:
        assert len(loader.dataset.reads) == 15, "skipped samples were read"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("change", "batch_size"), [((1, 2), 1), ((1, 3), 2), ((2, 1), 3), ((3, 2), 1), ((2, 4), 2)])
def test_a_foreign_sampler_on_other_ranks_repeats_and_loses_nothing(change: tuple[int, int], batch_size: int) -> None:
    def steps(world: int, count: int, state: dict[str, int | None] | None) -> tuple[list[list[int]], Any]:
        """Positions of each step over all ranks; every rank has to count alike."""
        parts = []
        for rank in range(world):
            dataset = Numbers(60)
            sampler = DistributedSampler(dataset, world, rank, shuffle=True)
            loader = DataLoader(dataset, sampler=sampler, batch_size=batch_size)
            parts.append(take(loader, count, state=state, of=dims(world, rank)))
            read.extend(indices(parts[-1][0]))
        assert all(state == parts[0][1] for _, state in parts)
        return [[int(p) for part, _ in parts for p in part[i]["sample_position"]] for i in range(count)], parts[0][1]

    before, after = change
    for stop in (1, 3):
        read: list[int] = []
        first, state = steps(before, stop, None)
        second, end = steps(after, 3, state)
        positions = [p for step in first + second for p in step]
        assert sorted(positions) == list(range(end["samples_seen"])), "in the stream, all of them and each once"
        assert len(set(read)) == len(read), "of the data set, each once"
        assert len(second[1]) == batch_size * after, "the step after the cut is whole again"


def test_ranks_that_would_read_the_same_samples_are_refused() -> None:
    of = dims(2, 1)
    with pytest.raises(DataError, match=r"all 2 ranks read the same samples by BatchSampler with RandomSampler"):
        take(DataLoader(Numbers(), batch_size=2, shuffle=True), 1, of=of)
    with pytest.raises(DataError, match=r"DistributedSampler is for rank 3 of 4, but this is .* rank 1 of 2"):
        take(DataLoader(Numbers(), sampler=DistributedSampler(Numbers(), 4, 3)), 1, of=dims(4, 3, cp=2))
    with pytest.raises(DataError, match=r"its data set has 10 samples, but its DistributedSampler is for one of 7"):
        take(DataLoader(Numbers(), sampler=DistributedSampler(range(7), 1, 0)), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [{"batch_sampler": EndlessBatches()}, {"sampler": EndlessIndices(), "batch_size": 3}])
def test_an_endless_sampler_repeats_its_draws_and_leaves_the_generators_alone(kind: dict[str, Any]) -> None:
    torch.manual_seed(0)
    python_random.seed(0)
    expected = torch.rand(3), python_random.random()
    torch.manual_seed(0)
    python_random.seed(0)
    whole, _ = resumed(lambda: DataLoader(Numbers(), **kind), 3, 7)
    assert torch.equal(torch.rand(3), expected[0]) and python_random.random() == expected[1]
    assert len({tuple(indices([batch])) for batch in whole}) > 1, "one batch again and again"


@pytest.mark.parametrize("workers", [0, 2])
def test_other_iterables_repeat_and_resume_by_reading(caplog: pytest.LogCaptureFixture, workers: int) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(Stream(), batch_size=2, num_workers=workers)

    epoch = 3 * max(1, workers)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    whole, _ = resumed(build, epoch + 1, 2 * epoch)
    assert indices(whole[:epoch]) != indices(whole[epoch:]), "epochs repeat one order"
    assert "only be resumed by reading its first 2 samples" in caplog.text
    assert torch.equal(torch.rand(3), expected), "draws of the data set came from the model's generators"


def test_a_loader_with_its_own_iter_is_asked_and_not_bypassed() -> None:
    def build() -> DataLoader[Any]:
        dataset = Numbers()
        return Shifting(dataset, batch_size=3, sampler=RandomSampler(dataset, generator=torch.Generator()))

    whole, _ = resumed(build, 5, 8)
    assert sorted(indices(whole[:4])) == sorted(indices(whole[4:])) == list(range(100, 110))
    assert indices(whole[:4]) != indices(whole[4:])


def test_a_resumed_stream_says_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    _, state = take(ResumableLoader(Numbers(), batch_size=2), 2)
    assert state["seed"] == 5 and state["dataset_size"] == 10 and state["batch_size"] == 2
    take(ResumableLoader(Numbers(), batch_size=2), 1, state=state)
    take(ResumableLoader(Numbers(), batch_size=4), 1, state={"samples_seen": 4})  # by an earlier version
    assert not caplog.records
    DataStream(ResumableLoader(Numbers(12), batch_size=4), seed=6, dims=dims()).load_state_dict(state)
    assert "seed 5 -> 6, dataset_size 10 -> 12 since the checkpoint was written" in caplog.text


LOADERS = {
    "own": lambda dataset: ResumableLoader(dataset, batch_size=1, num_workers=2, shuffle=False),
    "plain": lambda dataset: DataLoader(dataset, num_workers=2),
    "subclass": lambda dataset: Shifting(dataset, num_workers=2),
    "iterable": lambda dataset: DataLoader(Passing(dataset), num_workers=2),
}


@pytest.mark.parametrize(("kind", "is_validation"), [*((kind, False) for kind in LOADERS), ("own", True)])
def test_workers_outlive_the_signals_that_the_training_process_answers(kind: str, is_validation: bool) -> None:
    others = set(multiprocessing.active_children())
    loader = LOADERS[kind](Numbers(60))
    reader = open_pass(loader) if is_validation else iter(DataStream(loader, seed=5, dims=dims()))
    next(reader)
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    next(reader)  # by now both have started
    for worker in workers:
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(worker.pid or 0, name)
    assert len(list(islice(reader, 20))) == 20
    close_readers()
    assert not any(worker.is_alive() for worker in workers)


def end_with_bugs() -> None:
    """A program that breaks in its workers, which is caught, and then beside other workers, some of which are stuck."""
    readers = []
    for kind in ("plain", "iterable"):
        left_behind = iter(DataStream(LOADERS[kind](Broken()), seed=5, dims=dims()))
        with contextlib.suppress(KeyError):
            list(islice(left_behind, 100))
        reader = iter(DataStream(LOADERS[kind](Slow()), seed=5, dims=dims()))
        next(reader)
        readers += [left_behind, reader]
    raise RuntimeError("a bug in the model")


@pytest.mark.slow
def test_a_bug_ends_the_program_and_its_workers() -> None:
    code = "from tests.imaginaire.data.test_data import end_with_bugs; end_with_bugs()"
    result = finished(sys.executable, "-c", code)
    assert result.returncode == 1
    # perhaps not the last line: in forked workers torch complains of the iterators of their parent
    assert "RuntimeError: a bug in the model" in result.stderr.splitlines()


def test_an_empty_source_is_an_error_and_not_an_endless_wait() -> None:
    with pytest.raises(DataError, match=r"data set has 2 samples for this rank's batch_size=3"):
        take(DataLoader(Numbers(2), batch_size=3, drop_last=True), 1)
    with pytest.raises(DataError, match="gave no batch at all in epoch 0"):
        take(iter([]), 1)
    with pytest.raises(DataError, match="is empty"):
        ResumableLoader(Numbers(0))


def test_a_pass_for_validation_is_in_order_and_always_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ResumableLoader(Numbers(5), batch_size=2)
    first, second = list(open_pass(loader)), list(loader)
    assert indices(first) == [0, 1, 2, 3, 4], "no sample counts twice"
    assert len(loader) == len(first) == 3
    assert all(torch.equal(a["draws"], b["draws"]) for a, b in zip(first, second, strict=True))
    parts = []
    for rank in range(2):
        monkeypatch.setattr(parallel, "_current", dims(2, rank))
        parts.append([indices([batch]) for batch in ResumableLoader(Numbers(7), batch_size=2)])
        weights = [batch.get(WEIGHT_KEY) for batch in ResumableLoader(Numbers(7), batch_size=2)]
        assert weights[0] is None, "no key: all samples count"
        assert (weights[1] is None) == (rank == 0)
    assert parts == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]], "as many batches on each rank, one sample twice"
    assert weights[1].tolist() == [1.0, 0.0], "the second time it does not count"


@dataclasses.dataclass(frozen=True)
class Experience:
    advantage: torch.Tensor
    sample_position: torch.Tensor
    history: tuple[torch.Tensor, ...] = ()
    text: str = "push"
    whole: bool = dataclasses.field(default=True, init=False)

    def __post_init__(self) -> None:
        assert self.advantage.device.type == "cpu", "a copy is not made anew"


@dataclasses.dataclass(slots=True)
class Scored:
    experience: Experience


def test_move_to_moves_dataclasses_and_leaves_the_original() -> None:
    one = Experience(torch.ones(2), torch.tensor([7]), (torch.zeros(1),))
    moved = move_to({"first": one, "all": [Scored(one)]}, torch.device("meta"))
    for found in (moved["first"], moved["all"][0].experience):
        assert isinstance(found, Experience) and found.advantage.is_meta and found.history[0].is_meta
        assert (found.text, found.whole) == ("push", True) and not found.sample_position.is_meta
    assert not one.advantage.is_meta and not one.history[0].is_meta


def _mark_data_set(worker_id: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.count = 1000 + worker_id  # type: ignore[attr-defined]


class Marked(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "mark": self.count}


def test_worker_init_fn_finds_the_data_set_itself() -> None:
    loader = DataLoader(Marked(), batch_size=2, num_workers=1, worker_init_fn=_mark_data_set)
    batches, _ = take(loader, 2)
    assert all(int(mark) == 1000 for batch in batches for mark in batch["mark"])
