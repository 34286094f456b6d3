# SPDX-License-Identifier: Apache-2.0

from collections import Counter
from itertools import islice
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from cosmos_predict2.data.loaders import get_sampler
from cosmos_predict2.data.mixing import DatasetTurns, JoinedDatasets, MixedLoader
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from imaginaire.data.stream import DataStream, ResumableLoader, open_pass
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import ConfigError, DataError
from tests.multiprocess import run_distributed


class Rows(Dataset[dict[str, Any]]):
    """Item i is its number and one draw."""

    def __init__(self, count: int, width: int = 2, **more: Any) -> None:
        self.count = count
        self.width = width
        self.more = more

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {"row": torch.full((self.width,), index), "draw": float(numpy.random.random()), **self.more}


def dims(world: int = 1, rank: int = 0) -> ParallelDims:
    return ParallelDims(world_size=world, rank=rank, context_parallel_size=1)


def take(loader: Any, count: int, state: Any = None, of: ParallelDims | None = None) -> tuple[list[Any], Any]:
    stream = DataStream(loader, seed=3, dims=of or dims())
    stream.load_state_dict(state or {})
    return list(islice(iter(stream), count)), stream.state_dict()


def read(batches: list[Any]) -> list[tuple[str, int, float]]:
    return [
        (name, int(row[0]), float(draw))
        for batch in batches
        for name, row, draw in zip(batch["dataset_name"], batch["row"], batch["draw"], strict=True)
    ]


def first_of_both(datasets: Any, **options: Any) -> list[dict[str, Any]]:
    members = JoinedDatasets(datasets, **options)
    return [members[0, 0], members[1, 0]]


@pytest.mark.parametrize("ratios", [[1], [1, 1], [3, 1], [0.7, 0.2, 0.1], [5, 3, 3, 2, 1], [1 / 3, 2 / 3], [99, 1]])
def test_every_beginning_has_each_share_to_less_than_one(ratios: list[float]) -> None:
    ratios = [round(ratio, 2) for ratio in ratios]
    turns, counts = DatasetTurns(ratios), [0] * len(ratios)
    for turn in range(2 * turns.period + 3):
        which, own = turns[turn]
        assert own == counts[which], "its own turns are counted without gaps"
        counts[which] += 1
        for count, ratio in zip(counts, ratios, strict=True):
            assert abs(count - (turn + 1) * ratio / sum(ratios)) < 1


def test_a_mixture_of_samples_resumes_exactly() -> None:
    def build() -> MixedLoader:
        return MixedLoader({"a": Rows(6), "b": Rows(4)}, [1, 2], batch_size=3, by="sample", num_workers=2)

    whole, _ = take(build(), 12)
    first, state = take(build(), 5)
    rest, _ = take(build(), 7, state)
    assert read(first + rest) == read(whole)
    rows = {name: [row for which, row, _ in read(whole) if which == name] for name in "ab"}
    assert [sorted(rows["a"][i : i + 6]) for i in (0, 6)] == [[*range(6)]] * 2, "two passes"
    passes = [rows["b"][i : i + 4] for i in range(0, 24, 4)]
    assert all(sorted(one) == [*range(4)] for one in passes), "whole before it is begun again"
    assert len({tuple(one) for one in passes}) > 1, "in another order"


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_one_data_set_each_resume_exactly(workers: int) -> None:
    def build() -> MixedLoader:
        images, videos = Rows(10, width=2), Rows(7, width=5, frames=13)
        return MixedLoader(
            {"image": images, "video": videos}, [1, 2], batch_size={"image": 4, "video": 1}, num_workers=workers
        )

    whole, end = take(build(), 12)
    sizes = [len(batch["draw"]) for batch in whole]
    assert sorted(sizes) == [1] * 8 + [4] * 4 and all(len(set(batch["dataset_name"])) == 1 for batch in whole)
    assert all(("frames" in batch) == (batch["dataset_name"][0] == "video") for batch in whole)
    positions = [int(p) for batch in whole for p in batch["sample_position"]]
    assert positions == list(range(24)) and end["samples_seen"] == 24
    for stop in (4, 7) if workers else range(12):
        first, state = take(build(), stop)
        rest, _ = take(build(), 12 - stop, state)
        assert read(first + rest) == read(whole)
    of_images = [row for name, row, _ in read(whole) if name == "image"]
    assert sorted(of_images[:10]) == list(range(10)), "whole before it is begun again"


@pytest.mark.parametrize("by", ["batch", "sample"])
def test_ranks_divide_a_mixture_without_repeats(by: Any) -> None:
    def build() -> MixedLoader:
        return MixedLoader({"a": Rows(12), "b": Rows(24)}, [1, 2], batch_size=2, by=by)

    parts = [take(build(), 9, of=dims(2, rank))[0] for rank in range(2)]
    places = [(name, row) for part in parts for name, row, _ in read(part)]
    assert len(set(places)) == len(places) == 36, "each of the 36 samples once"
    names = [[batch["dataset_name"][0] for batch in part] for part in parts]
    assert by == "sample" or names[0] == names[1], "all ranks have the same kind of batch at a time"
    other, _ = take(build(), 18)
    if by == "sample":
        order = [p for pair in zip(*parts, strict=True) for batch in pair for p in read([batch])]
        assert order == read(other), "one process reads the same order"


def test_another_number_of_ranks_goes_on_near_the_place() -> None:
    def build() -> MixedLoader:
        return MixedLoader({"a": Rows(300), "b": Rows(300)}, [1, 2], batch_size=2)

    _, state = take(build(), 9)
    (batches, after), _ = (take(build(), 3, state, of=dims(2, rank)) for rank in range(2))
    assert after["samples_seen"] == state["samples_seen"] + 12
    assert Counter(batch["dataset_name"][0] for batch in batches) == {"a": 1, "b": 2}
    assert batches[0]["sample_position"].tolist() == [18, 19]


def test_a_pass_reads_everything_in_order_and_always_alike() -> None:
    loader = MixedLoader({"a": Rows(4), "b": Rows(3)}, [1, 1], batch_size=2, shuffle=False)
    first, second = list(open_pass(loader)), list(open_pass(loader))
    assert len(loader) == len(first) == 4 and read(first) == read(second)
    assert [row for name, row, _ in read(first) if name == "a"] == [0, 1, 2, 3]
    mixed = MixedLoader({"a": Rows(4), "b": Rows(3)}, [1, 1], batch_size=2, by="sample", shuffle=False)
    assert {(name, row) for name, row, _ in read(list(mixed))} == {("a", i) for i in range(4)} | {
        ("b", i) for i in range(3)
    }


def test_data_sets_that_do_not_fit_together_are_named() -> None:
    with pytest.raises(DataError, match="'small'"):
        first_of_both({"small": Rows(4), "large": Rows(4, width=3)})
    with pytest.raises(DataError, match=r"row is \[3\] in the first and \[2\]"):
        first_of_both({"large": Rows(4, width=3), "small": Rows(4)})
    captioned = {"plain": Rows(4), "captioned": Rows(4, caption="text")}
    with pytest.raises(DataError, match="only the second: caption"):
        first_of_both(captioned)
    assert [sorted(item) for item in first_of_both(captioned, keys=["row"])] == [["dataset_name", "row"]] * 2
    with pytest.raises(DataError, match="'plain'"):
        first_of_both(captioned, keys=["caption"])
    loader = MixedLoader({"small": Rows(4), "large": Rows(4, width=3)}, [1, 1], by="sample", num_workers=1)
    with pytest.raises(DataError, match="cannot be mixed sample by sample"):
        take(loader, 4)


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ([1, 0], "must be numbers above 0"),
        ([1, -1], "must be numbers above 0"),
        ([1, float("nan")], "must be numbers above 0"),
        ([1, "2"], "must be numbers above 0"),
        ([1], "1 numbers for 2 data sets"),
        ({"a": 1, "c": 1}, "numbers for a, c; the data sets: a, b"),
        ([1, 1.00001], "Round them"),
    ],
)
def test_wrong_ratios_are_errors(ratios: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MixedLoader({"a": Rows(2), "b": Rows(2)}, ratios)


def test_wrong_data_sets_are_errors() -> None:
    with pytest.raises(DataError, match="'b'"):
        MixedLoader({"a": Rows(2), "b": Rows(0)}, [1, 1])
    with pytest.raises(ConfigError, match="at least one"):
        MixedLoader({}, [])
    with pytest.raises(ConfigError, match="'a'"):
        MixedLoader({"a": 3}, [1])
    with pytest.raises(ConfigError, match="by='clip'"):
        MixedLoader([Rows(2)], [1], by="clip")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="by='batch'"):
        MixedLoader({"a": Rows(2)}, [1], batch_size={"a": 1}, by="sample")


def test_the_sampler_divides_among_data_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    for rank in range(4):
        monkeypatch.setattr(parallel, "_current", ParallelDims(world_size=4, rank=rank, context_parallel_size=2))
        read.append(list(get_sampler(range(8))))
    assert read[0] == read[1] != read[2] == read[3]
    assert sorted(read[0] + read[2]) == list(range(8))


def _first_samples() -> list[tuple[list[str], list[int]]]:
    """For groups of two ranks and of one: the clips of three batches by our loader, and the indices of its sampler."""
    dataset, found = ToyWorldVideos(num_episodes=8, num_steps=16), []
    for context_parallel_size in (2, 1):
        stream = iter(DataStream(ResumableLoader(dataset), seed=0, dims=parallel.init_dims(context_parallel_size)))
        clips = [next(stream)["video_name"]["video_path"][0] for _ in range(3)]
        found.append((clips, list(get_sampler(dataset))))
    return found


@pytest.mark.slow
def test_ranks_of_a_group_share_samples_across_processes() -> None:
    shared, apart = zip(*run_distributed(_first_samples, 2), strict=True)
    assert shared[0] == shared[1]
    assert not set(apart[0][0]) & set(apart[1][0])
    assert not set(apart[0][1]) & set(apart[1][1])
