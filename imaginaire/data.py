# SPDX-License-Identifier: Apache-2.0
"""The endless stream of training batches, which can begin at any position.

Position p of the stream is sample ``permutation(seed, epoch)[p % n]`` of the data set, with ``epoch = p // n``: a pure
function, so nothing is stored but how many samples were used, prefetching cannot skew it, and any number of processes
continues what another number began. Before a sample is read, Python, NumPy and torch are seeded from (seed, position),
so random crops repeat as well, also those of data sets that know nothing of this.

A loader that is not ours is resumed by its own order: the sampler's ``set_epoch`` is called and its batches are
skipped as indices.
"""

import logging
import multiprocessing.util
import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from imaginaire import random
from imaginaire.errors import DataError
from imaginaire.parallel import ParallelDims, current_dims

log = logging.getLogger(__name__)

Indices = list[tuple[int, int]]  # (position in the stream, index in the data set) of each sample of a batch


class ResumableLoader:
    """Batches of a map-style data set, for training (an endless stream) and for validation (one pass).

    ``batch_size`` counts the samples of one data-parallel rank. Iterating gives one pass in order, in which the last
    batch is filled up from the beginning; the trainer takes the endless, shuffled form from `stream`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        num_workers: int = 0,
        shuffle: bool = True,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if batch_size < 1 or num_workers < 0:
            raise DataError(f"batch_size={batch_size} and num_workers={num_workers}: need at least 1 and 0.")
        if not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized):
            raise DataError(f"{type(dataset).__name__} has no __len__ and __getitem__, which ResumableLoader needs.")
        if len(dataset) == 0:
            raise DataError(f"The data set {type(dataset).__name__} is empty (0 samples).")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self._options = {
            "num_workers": num_workers,
            "pin_memory": pin_memory and torch.cuda.is_available(),
            "prefetch_factor": prefetch_factor if num_workers else None,
            "collate_fn": collate_fn,
        }

    def __len__(self) -> int:
        """Batches of one pass over the data set, for each rank."""
        global_batch = self.batch_size * current_dims().dp_size
        return -(-len(self.dataset) // global_batch)

    def __iter__(self) -> Iterator[Any]:
        dims = current_dims()
        global_batch = self.batch_size * dims.dp_size
        count = len(self.dataset)
        starts = range(0, count, global_batch)
        batches = [[(p, p % count) for p in _block(start, self.batch_size, dims)] for start in starts]
        for batch, indices in zip(_load(self.dataset, batches, 0, "validation", self._options), batches, strict=True):
            yield _with_positions(batch, indices)

    def batches(self, seed: int, start: int, dims: ParallelDims) -> Iterator[Indices]:
        """Positions and indices of this rank's batches, from a position on, without end."""
        count = len(self.dataset)
        epoch, order = -1, torch.empty(0)
        while True:
            batch: Indices = []
            for position in _block(start, self.batch_size, dims):
                if position // count != epoch:
                    epoch = position // count
                    order = self._order(seed, epoch)
                batch.append((position, int(order[position % count])))
            yield batch
            start += self.batch_size * dims.dp_size

    def _order(self, seed: int, epoch: int) -> Tensor:
        count = len(self.dataset)
        return (
            torch.randperm(count, generator=random.generator(seed, epoch, "shuffle"))
            if self.shuffle
            else torch.arange(count)
        )


class DataStream:
    """Iterates over training batches for ever; `samples_seen` counts, over all ranks, what was handed out.

    Mappings get a key ``sample_position``: the stream position of each sample, from which a model derives its own
    draws.
    """

    def __init__(
        self,
        loader: Any,
        seed: int,
        dims: ParallelDims,
        state: Mapping[str, int] | None = None,
    ) -> None:
        self._loader = loader
        self._seed = seed
        self._dims = dims
        state = state or {}
        self.samples_seen = state.get("samples_seen", 0)
        self.epoch = state.get("epoch", 0)  # these two are used by foreign loaders only
        self.samples_in_epoch = state.get("samples_in_epoch", 0)
        _check_not_empty(loader)

    def state_dict(self) -> dict[str, int]:
        return {
            "samples_seen": self.samples_seen,
            "epoch": self.epoch,
            "samples_in_epoch": self.samples_in_epoch,
        }

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._loader, ResumableLoader):
            return self._own()
        if _is_map_style(self._loader):
            return self._foreign()
        return self._opaque()

    def _own(self) -> Iterator[Any]:
        loader: ResumableLoader = self._loader
        drawn: deque[Indices] = deque()
        source = _remember(loader.batches(self._seed, self.samples_seen, self._dims), drawn)
        for batch in _load(loader.dataset, source, self._seed, "sample", loader._options):
            indices = drawn.popleft()
            self.samples_seen += len(indices) * self._dims.dp_size
            yield _with_positions(batch, indices)

    def _foreign(self) -> Iterator[Any]:
        """Batches of a torch DataLoader over a map-style data set, in its own sampler's order."""
        loader: DataLoader[Any] = self._loader
        drawn: deque[tuple[int, Indices]] = deque()

        def source() -> Iterator[Indices]:
            epoch, used, position = self.epoch, self.samples_in_epoch, self.samples_seen
            while True:
                if used:
                    log.info(
                        "resuming %s: epoch %d, skipping %d samples by index",
                        type(loader).__name__,
                        epoch,
                        used,
                    )
                seen, empty = 0, True
                for indices in _epoch_of(loader, self._seed, epoch):
                    empty = False
                    seen += len(indices) * self._dims.dp_size
                    if seen <= used:
                        continue
                    first = position + self._dims.dp_rank
                    batch = [(first + k * self._dims.dp_size, index) for k, index in enumerate(indices)]
                    position += len(indices) * self._dims.dp_size
                    drawn.append((epoch, batch))
                    yield batch
                if empty:
                    raise DataError(f"The sampler of {type(loader.dataset).__name__} gave no batch in epoch {epoch}.")
                epoch, used = epoch + 1, 0

        options = {
            "num_workers": loader.num_workers,
            "pin_memory": loader.pin_memory and torch.cuda.is_available(),
            "prefetch_factor": loader.prefetch_factor if loader.num_workers else None,
            "collate_fn": loader.collate_fn,
            "worker_init_fn": loader.worker_init_fn,
            "timeout": loader.timeout,
            "multiprocessing_context": loader.multiprocessing_context,
        }
        for batch in _load(loader.dataset, source(), self._seed, "sample", options):
            epoch, indices = drawn.popleft()
            if epoch != self.epoch:
                self.epoch, self.samples_in_epoch = epoch, 0
            count = len(indices) * self._dims.dp_size
            self.samples_seen += count
            self.samples_in_epoch += count
            yield _with_positions(batch, indices)

    def _opaque(self) -> Iterator[Any]:
        """Batches of any other iterable: passes over it are repeated, and a resumed run has to read what it skips."""
        skip = self.samples_in_epoch
        if skip:
            log.warning(
                "%s can only be resumed by reading its first %d samples again; a map-style data set would skip them "
                "by index",
                type(self._loader).__name__,
                skip,
            )
        while True:
            seen = 0
            for batch in self._loader:
                count = _batch_length(batch) * self._dims.dp_size
                seen += count
                if seen <= skip:
                    continue
                self.samples_seen += count
                self.samples_in_epoch = seen
                yield batch
            if seen == 0:
                raise DataError(f"{type(self._loader).__name__} gave no batch at all in epoch {self.epoch}.")
            self.epoch, self.samples_in_epoch, skip = self.epoch + 1, 0, 0


class _Positioned(Dataset[Any]):
    """The data set, asked by (position, index): seeds the global generators before each sample."""

    def __init__(self, dataset: Any, seed: int, purpose: str) -> None:
        self._dataset = dataset
        self._seed = seed
        self._purpose = purpose

    def __getitems__(self, places: Indices) -> list[Any]:
        if get_worker_info() is not None:
            return [self._read(*place) for place in places]
        with random.preserved():  # in the training process the generators belong to the model
            return [self._read(*place) for place in places]

    def _read(self, position: int, index: int) -> Any:
        random.seed_host(self._seed, position, self._purpose)
        return self._dataset[index]


_readers: weakref.WeakSet[Any] = weakref.WeakSet()  # iterators that may have workers


def close_readers() -> None:
    """End the workers of every loader that is still being read, also of one that an exception left behind.

    They ignore SIGTERM, by which Python would otherwise end them at exit, and wait for ever.
    """
    for reader in list(_readers):
        if hasattr(reader, "_shutdown_workers"):
            reader._shutdown_workers()
        for worker in getattr(reader, "_workers", ()):
            if worker.is_alive():
                worker.kill()
        _readers.discard(reader)


multiprocessing.util.Finalize(None, close_readers, exitpriority=100)  # before Python joins its children


class _WorkerStart:
    """Leaves signals for the training process to answer: workers must outlive them until the checkpoint is written."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        for name in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(name, signal.SIG_IGN)
        if self._then is not None:
            self._then(worker_id)


def _load(
    dataset: Any,
    batches: Iterable[Indices],
    seed: int,
    purpose: str,
    options: Mapping[str, Any],
) -> Iterator[Any]:
    options = {k: v for k, v in options.items() if v is not None}
    start = _WorkerStart(options.pop("worker_init_fn", None))
    # its own generator: the loader must not draw its base seed from the model's
    loader: DataLoader[Any] = DataLoader(
        _Positioned(dataset, seed, purpose),
        batch_sampler=cast(Any, batches),  # an endless iterable, which DataLoader accepts
        generator=random.generator(seed, 0, "workers"),
        worker_init_fn=start,
        **options,
    )
    reader = iter(loader)
    _readers.add(reader)
    return reader


def _block(start: int, batch_size: int, dims: ParallelDims) -> range:
    first = start + dims.dp_rank * batch_size
    return range(first, first + batch_size)


def _remember(batches: Iterator[Indices], into: deque[Indices]) -> Iterator[Indices]:
    for batch in batches:
        into.append(batch)
        yield batch


def _with_positions(batch: Any, indices: Indices) -> Any:
    if isinstance(batch, dict):
        batch["sample_position"] = torch.tensor([position for position, _ in indices])
    return batch


def _is_map_style(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def _epoch_of(loader: DataLoader[Any], seed: int, epoch: int) -> Iterator[list[int]]:
    """The index batches of one epoch; samplers that draw from torch's global generator are seeded by (seed, epoch)."""
    of_samples: Any = loader.sampler
    of_batches: Any = loader.batch_sampler
    for sampler in (of_samples, of_batches):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
    if not hasattr(of_batches, "__len__"):
        yield from (list(batch) for batch in of_batches)  # it may be endless
        return
    if getattr(of_samples, "generator", None) is not None:
        of_samples.generator.manual_seed(random.derive_seed(seed, epoch, "sampler"))
    with random.preserved():
        random.seed_all(seed, epoch, "sampler")
        batches = [list(batch) for batch in of_batches]
    yield from batches


def _check_not_empty(loader: Any) -> None:
    if isinstance(loader, ResumableLoader) or not isinstance(loader, Sized):
        return
    try:
        length = len(loader)
    except TypeError:  # an iterable data set without a length
        return
    if length == 0:
        dataset = getattr(loader, "dataset", None)
        samples = len(dataset) if isinstance(dataset, Sized) else "?"
        batch_size = getattr(loader, "batch_size", "?")
        raise DataError(
            f"dataloader_train gives no batch: the data set has {samples} samples for this rank's "
            f"batch_size={batch_size} "
            f"(drop_last={getattr(loader, 'drop_last', '?')}). Lower dataloader_train.batch_size or add data."
        )


def _batch_length(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor, else 1."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((_batch_length(value) for value in values if isinstance(value, Tensor)), 1)


def move_to(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move_to(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move_to(value, device) for value in batch)
    return batch
