# SPDX-License-Identifier: Apache-2.0
import os
import signal
import time
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from examples.minimal.data import Waves
from imaginaire.data import workers
from imaginaire.data.stream import DataStream, ResumableLoader
from imaginaire.data.workers import close_readers
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import DataError
from tests.programs import HANG_S
from tests.training import train


class Clips(Dataset[dict[str, Any]]):
    """Named clips of one size, of which one is something else."""

    def __init__(self, fault: str = "", at: int = 5) -> None:
        self.fault = fault
        self.at = at

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        size = 4
        if index == self.at:
            if self.fault == "damaged":
                raise DataError("videos/clip_5.mp4 cannot be decoded.")
            if self.fault == "bug":
                raise KeyError("no such key")
            if self.fault == "unpicklable":
                raise Unpicklable(lambda: None)
            if self.fault == "killed later":
                time.sleep(1)
            if self.fault.startswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "exits":
                os._exit(3)
            if self.fault == "hangs":
                time.sleep(HANG_S)
            if self.fault == "larger":
                size = 8
        return {"video": torch.zeros(3, size)}


class Unpicklable(Exception):
    pass


def read(fault: str, *, num_workers: int = 2, **options: Any) -> list[Any]:
    loader = ResumableLoader(Clips(fault), num_workers=num_workers, shuffle=False, **options)
    stream = DataStream(loader, seed=0, dims=ParallelDims(world_size=1, rank=0, context_parallel_size=1))
    try:
        return list(islice(iter(stream), 12))
    finally:
        close_readers()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_keeps_its_type_and_its_sentence(num_workers: int) -> None:
    with pytest.raises(DataError) as caught:
        read("damaged", num_workers=num_workers)
    assert str(caught.value) == "videos/clip_5.mp4 cannot be decoded."


def test_a_bug_in_a_worker_comes_with_the_traceback_and_the_sample() -> None:
    with pytest.raises(KeyError) as caught:
        read("bug")
    assert caught.value.args == ("no such key",)
    shown = "".join(traceback.format_exception(caught.value))
    assert "sample 5 of Clips (position 5 of the stream)" in shown
    assert 'raise KeyError("no such key")' in shown, "the worker's own lines"


def test_an_exception_that_cannot_be_sent_is_told_in_words() -> None:
    with pytest.raises(Exception, match=r"Unpicklable"):
        read("unpicklable")


# torch raises from the signal of the child's end, now and then inside of a destructor, whose exception goes nowhere
def test_a_death_that_torch_reports_meanwhile_is_that_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes whenever it comes, before the worker is asked after, too."""

    class Reader:
        _workers = (None,)

        def __iter__(self) -> Iterator[Any]:
            return self

        def __next__(self) -> Any:
            raise ConnectionResetError

    def signalled() -> float:
        raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly with exit code 3.")

    monkeypatch.setattr(workers.time, "monotonic", signalled)
    with pytest.raises(DataError, match="ended unexpectedly"):
        next(workers._batches_or_error(Reader(), 2))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", ["killed", "exits"])
def test_a_dead_worker_is_an_error_with_a_cure_and_no_hang(fault: str) -> None:
    with pytest.raises(DataError, match=r"ended unexpectedly.* lower num_workers \(now 2\)"):
        read(fault)


def test_a_worker_that_dies_during_a_step_is_explained_too() -> None:
    loader = ResumableLoader(Clips("killed later"), num_workers=1, shuffle=False, prefetch_factor=6)
    reader = iter(DataStream(loader, seed=0, dims=ParallelDims(world_size=1, rank=0, context_parallel_size=1)))
    next(reader)
    try:
        with pytest.raises(RuntimeError) as caught:
            time.sleep(HANG_S)  # torch raises from the signal, wherever the process is
        assert "num_workers" in str(workers.explained(caught.value))
    finally:
        close_readers()


def test_other_exceptions_are_not_explained_away() -> None:
    assert workers.explained(RuntimeError("shape mismatch")) is None
    assert workers.explained(KeyError("DataLoader worker (pid 1) exited unexpectedly")) is None
    crash = RuntimeError("DataLoader worker (pid 1) is killed by signal: Bus error.")
    assert "/dev/shm" in str(workers.explained(crash))


def test_a_worker_that_hangs_is_an_error_after_the_timeout() -> None:
    with pytest.raises(DataError, match=r"No batch came from the workers for 1 s"):
        read("hangs", timeout=1)
    with pytest.raises(DataError, match="timeout=-1"):
        read("", timeout=-1)
    assert len(read("", num_workers=0, timeout=1)) == 12


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_do_not_fit_into_a_batch_are_named(num_workers: int) -> None:
    with pytest.raises(DataError, match=r"samples 3 and 5 of Clips do not fit .*: video is \[3, 4\] .* and \[3, 8\]"):
        read("larger", num_workers=num_workers, batch_size=3)


def test_differences_are_in_words() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    assert workers.difference({"a": one}, {"a": one}) is None
    only = "keys that only the first has: b; only the second: none"
    assert workers.difference({"a": one, "b": 1}, {"a": one}) == only
    assert workers.difference({"a": {"b": one}}, {"a": {"b": two}}) == "a.b is [1] in the first and [2] in the second"
    assert workers.difference({"a": one}, {"a": 1.0}) == "a is a Tensor in the first and a float in the second"


class Fatal(Waves):
    """Ends the process that reads one of its samples."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.slow
def test_training_ends_with_the_cure_when_a_worker_was_killed(tmp_path: Path) -> None:
    target = "dataloader_train.dataset._target_=tests.imaginaire.data.test_workers.Fatal"
    with pytest.raises(DataError, match=r"ended unexpectedly .* lower num_workers"):
        train(tmp_path, [target, "dataloader_train.num_workers=2", "trainer.max_iter=40"])
