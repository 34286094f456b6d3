# SPDX-License-Identifier: Apache-2.0
"""Reading samples in other processes: how these are seeded, what they report when they fail, and how they are ended.

An exception in a worker arrives in the training process as it was raised there, with the worker's own traceback as its
cause. A worker that is killed (most often because memory ran out) becomes an error with its cure.
"""

import multiprocessing.util
import pickle
import re
import signal
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils.data._utils
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from imaginaire import random
from imaginaire.errors import DataError

Indices = list[tuple[int, Any]]  # (position in the stream, index in the data set) of each sample of a batch


def load(
    dataset: Any, batches: Iterable[Indices], seed: int, purpose: str, options: Mapping[str, Any]
) -> Iterator[Any]:
    """The batches with these samples, read ahead by ``num_workers`` processes or here; options are DataLoader's."""
    options = {k: v for k, v in options.items() if v is not None}
    num_workers = options.get("num_workers", 0)
    if num_workers == 0:
        options.pop("timeout", None)
        options.pop("prefetch_factor", None)
    start = WorkerStart(options.pop("worker_init_fn", None))
    collate = _Collate(options.pop("collate_fn", None) or default_collate)
    # its own generator: the loader must not draw its base seed from the model's
    loader: DataLoader[Any] = DataLoader(
        _Positioned(dataset, seed, purpose),
        batch_sampler=cast(Any, batches),  # an endless iterable, which DataLoader accepts
        generator=random.generator(seed, 0, "workers"),
        worker_init_fn=start,
        collate_fn=collate,
        pin_memory=options.pop("pin_memory", False) and torch.cuda.is_available(),
        **options,
    )
    return _batches_or_error(registered(iter(loader)), num_workers)


def explained(error: BaseException, num_workers: int | None = None) -> DataError | None:
    """The error for the death or the silence of a worker, with its cure; None for any other exception."""
    text = str(error)
    if not isinstance(error, RuntimeError):
        return None
    now = "" if num_workers is None else f" (now {num_workers})"
    if found := re.search(r"DataLoader timed out after (\S+) seconds", text):
        return DataError(
            f"No batch came from the workers for {found[1]} s (the loader's timeout). Raise timeout, lower"
            f" num_workers{now} if they share a slow disk, or set num_workers=0 to see where it waits."
        )
    if "DataLoader worker" not in text or not re.search("killed by signal|exited unexpectedly", text):
        return None
    return DataError(
        f"A worker process of the data loader ended unexpectedly ({text.splitlines()[0].strip()}). Most often memory"
        f" ran out, the machine's (see dmesg) or /dev/shm (docker run --shm-size=8g): lower num_workers{now},"
        " prefetch_factor or batch_size; num_workers=0 shows whether a library crashed."
    )


class WorkerTraceback(Exception):
    """The traceback of a worker, as the cause of the exception that it sent."""


@dataclass(frozen=True)
class _Failure:
    """An exception on its way out of a worker, in place of a batch."""

    error: Exception
    place: str


def _batches_or_error(reader: Iterator[Any], num_workers: int) -> Iterator[Any]:
    """The batches; failures become exceptions."""
    over = object()
    while True:
        try:
            batch = next(reader, over)
        except (RuntimeError, OSError, EOFError) as error:
            try:
                meaning = explained(error, num_workers) or _dead_worker(reader, error, num_workers)
            except RuntimeError as reported:  # raised by torch's handler of SIGCHLD, wherever this process is then
                meaning = explained(reported, num_workers)
            if meaning is None:
                raise
            raise meaning from error
        if batch is over:
            return
        if isinstance(batch, _Failure):
            raise batch.error from WorkerTraceback(batch.place)
        yield batch


def _dead_worker(reader: Iterator[Any], error: Exception, num_workers: int) -> DataError | None:
    """The error for a broken connection to a dead worker: its last batches can no longer be fetched from it."""
    workers = getattr(reader, "_workers", ())
    if isinstance(error, RuntimeError) or not workers:
        return None
    deadline = time.monotonic() + 2
    while all(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    dead = next((worker for worker in workers if not worker.is_alive()), None)
    if dead is None:
        return None
    return explained(RuntimeError(f"DataLoader worker (pid {dead.pid}) exited unexpectedly"), num_workers)


class _Positioned(Dataset[Any]):
    """The data set, asked by (position, index): seeds the global generators before each sample."""

    def __init__(self, dataset: Any, seed: int, purpose: str) -> None:
        self.dataset = dataset
        self._seed = seed
        self._purpose = purpose

    def __getitems__(self, places: Indices) -> Any:
        worker = get_worker_info()
        if worker is None:
            with random.preserved():  # in the training process the generators belong to the model
                return _Samples([self._read(*place) for place in places], places, self._name)
        samples: list[Any] = []
        try:
            for place in places:
                samples.append(self._read(*place))
        except Exception as error:
            position, index = places[len(samples)]
            where = f"worker {worker.id}, sample {index} of {self._name} (position {position} of the stream)"
            return _failure(error, where)
        return _Samples(samples, places, self._name)

    def _read(self, position: int, index: Any) -> Any:
        random.seed_host(self._seed, position, self._purpose)
        return self.dataset[index]

    @property
    def _name(self) -> str:
        return type(self.dataset).__name__


class _Samples(list[Any]):
    """The samples of a batch, with their places and their data set for messages."""

    def __init__(self, samples: list[Any], places: Indices, name: str) -> None:
        super().__init__(samples)
        self.places = places
        self.name = name


class _Collate:
    """Makes batches; when that fails, the error names the samples that differ. Failures pass through."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> Any:
        if isinstance(samples, _Failure):
            return samples
        try:
            return self._collate(list(samples))
        except Exception as error:
            difference = _difference(samples)
            if difference is not None:
                found = DataError(difference)
                found.__cause__ = error
                error = found
            worker = get_worker_info()
            if worker is None:
                raise error from error.__cause__
            return _failure(error, f"worker {worker.id}, making a batch of {len(samples)} samples of {samples.name}")


def _failure(error: Exception, where: str) -> _Failure:
    """The exception in a form that can be sent; one that cannot is left to torch, which sends its text."""
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        raise error from error.__cause__
    return _Failure(error, f"in {where}:\n\n{trace}")


def _difference(samples: _Samples) -> str | None:
    """The first thing in which two samples of a batch differ, in a sentence."""
    first = samples[0]
    if not isinstance(first, Mapping):
        return None
    for sample, (_, index) in zip(samples[1:], samples.places[1:], strict=True):
        if (found := difference(first, sample)) is not None:
            return (
                f"The samples {samples.places[0][1]} and {index} of {samples.name} do not fit into one batch: {found}."
                " Give them one size, or set batch_size=1."
            )
    return None


def difference(a: Any, b: Any, key: str = "") -> str | None:
    """The key, type or shape in which two samples differ, in words; None where they fit into one batch."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            only = [f"{', '.join(sorted(map(str, x.keys() - y.keys()))) or 'none'}" for x, y in ((a, b), (b, a))]
            return f"keys{key and f' of {key}'} that only the first has: {only[0]}; only the second: {only[1]}"
        return next((d for k in a if (d := difference(a[k], b[k], f"{key}.{k}" if key else str(k))) is not None), None)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape:
            return f"{key} is {list(a.shape)} in the first and {list(b.shape)} in the second"
        return None
    if isinstance(a, Tensor) != isinstance(b, Tensor):
        return f"{key} is a {type(a).__name__} in the first and a {type(b).__name__} in the second"
    return None


_readers: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators that may have workers
_workers: weakref.WeakSet[Any] = weakref.WeakSet()  # their processes, which may outlive them


def registered(reader: Iterator[Any]) -> Iterator[Any]:
    """The iterator of a DataLoader, whose workers `close_readers` will end."""
    _readers.add(reader)
    for worker in getattr(reader, "_workers", ()):
        worker.terminate = worker.kill  # by which torch ends a worker that is stuck: it ignores SIGTERM
        _workers.add(worker)
    return reader


def close_readers() -> None:
    """End the workers of every loader that is still being read, also of one that an exception left behind.

    They ignore SIGTERM, by which Python would otherwise end them at exit, and wait for ever.
    """
    torch_utils: Any = torch.utils.data._utils
    patience, torch_utils.MP_STATUS_CHECK_INTERVAL = torch_utils.MP_STATUS_CHECK_INTERVAL, 1.0  # s for a stuck worker
    try:
        for reader in list(_readers):
            if hasattr(reader, "_shutdown_workers"):
                reader._shutdown_workers()
    finally:
        torch_utils.MP_STATUS_CHECK_INTERVAL = patience
    for worker in list(_workers):
        if worker.is_alive():
            worker.kill()
    _readers.clear()
    _workers.clear()


multiprocessing.util.Finalize(None, close_readers, exitpriority=100)  # before Python joins its children


def leave_signals_alone(loader: Any) -> None:
    """Make the workers of a torch DataLoader that is not ours like those of ours."""
    if not isinstance(loader, DataLoader) or loader.num_workers == 0 or isinstance(loader.worker_init_fn, WorkerStart):
        return
    loader.worker_init_fn = WorkerStart(loader.worker_init_fn)
    start = loader._get_iterator  # __iter__ would not do: a subclass makes it a generator, which hides the workers
    cast(Any, loader)._get_iterator = lambda: registered(start())


class WorkerStart:
    """Leaves signals for the training process to answer: workers must outlive them until the checkpoint is written."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        for name in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(name, signal.SIG_IGN)
        info: Any = get_worker_info()
        if isinstance(info.dataset, _Positioned):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # what a worker_init_fn expects there
        if self._then is not None:
            self._then(worker_id)
