# SPDX-License-Identifier: Apache-2.0
"""The endless stream of training batches, which can begin at any position.

Position p of the stream is sample ``permutation(seed, epoch)[p % n]`` of the data set, with ``epoch = p // n``: a pure
function, so nothing is stored but how many samples were used, prefetching cannot skew it, and any number of processes
continues what another number began. Before a sample is read, Python, NumPy and torch are seeded from (seed, position),
so random crops repeat as well, also those of data sets written without regard to this.

A plain torch DataLoader over a map-style data set is resumed by its own order: the sampler's ``set_epoch`` is called
and its batches are skipped as indices. What else can be iterated over is read again up to the place.
"""

import copy
import dataclasses
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from itertools import tee
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from imaginaire import random
from imaginaire.data import workers
from imaginaire.data.workers import Indices
from imaginaire.distributed.parallel import ParallelDims, current_dims
from imaginaire.errors import DataError
from imaginaire.training.model import ImaginaireModel

log = logging.getLogger(__name__)

POSITION_KEY = "sample_position"  # of a training batch: each sample's place in the stream
WEIGHT_KEY = "sample_weight"  # of a validation batch: 0 for samples that are in the pass a second time
_UNDIVIDED = (
    *(torch_data.BatchSampler, torch_data.RandomSampler, torch_data.SequentialSampler),
    *(torch_data.SubsetRandomSampler, torch_data.WeightedRandomSampler),
)
_END = object()


class ResumableLoader:
    """Batches of a map-style data set, for training (an endless stream) and for validation (one pass).

    ``batch_size`` counts the samples of one data-parallel rank. Iterating gives one pass in order, whose last batch is
    shorter where the samples do not suffice; it is as long on all ranks, for which fewer samples than there are ranks
    are taken a second time, from the beginning, with ``sample_weight`` 0 (without this key, all of a batch count). The
    trainer takes the endless, shuffled form from `batches`. Workers that give no batch for ``timeout`` seconds are an
    error; 0 waits for ever.
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
        timeout: float = 0,
    ) -> None:
        if batch_size < 1 or num_workers < 0 or timeout < 0:
            raise DataError(
                f"batch_size={batch_size}, num_workers={num_workers} and timeout={timeout}: need at least 1, 0 and 0."
            )
        if not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized):
            raise DataError(f"{type(dataset).__name__} has no __len__ and __getitem__, which ResumableLoader needs.")
        if len(dataset) == 0:
            raise DataError(f"The data set {type(dataset).__name__} is empty (0 samples).")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self._options: dict[str, Any] = dict(num_workers=num_workers, prefetch_factor=prefetch_factor, timeout=timeout)
        self._options |= dict(pin_memory=pin_memory, collate_fn=collate_fn)

    def __len__(self) -> int:
        """Batches of one pass over the data set, for each rank."""
        global_batch = self.batch_size * current_dims().dp_size
        return -(-len(self.dataset) // global_batch)

    def __iter__(self) -> Iterator[Any]:
        dims = current_dims()
        global_batch = self.batch_size * dims.dp_size
        count = len(self.dataset)
        sizes = [
            (start, min(self.batch_size, -(-(count - start) // dims.dp_size)))
            for start in range(0, count, global_batch)
        ]
        batches = [[(p, p % count) for p in _block(start, size, dims)] for start, size in sizes]
        read = workers.load(self.dataset, batches, 0, "validation", self._options)
        for batch, indices in zip(read, batches, strict=True):
            yield with_positions(batch, indices, count)

    def batches(self, seed: int, start: int, dims: ParallelDims) -> Iterator[Indices]:
        """Positions and indices of this rank's batches, from a position on, without end."""
        count = len(self.dataset)
        epoch, order = -1, torch.arange(count)
        while True:
            batch: Indices = []
            for position in _block(start, self.batch_size, dims):
                if position // count != epoch:
                    epoch = position // count
                    if self.shuffle:
                        order = torch.randperm(count, generator=random.generator(seed, epoch, "shuffle"))
                batch.append((position, int(order[position % count])))
            yield batch
            start += self.batch_size * dims.dp_size


class DataStream:
    """Iterates over training batches for ever; `samples_seen` counts, over all ranks, what was handed out.

    Mappings get a key ``sample_position``: the stream position of each sample, from which a model derives its own
    draws. ``waiting`` is entered while a batch is waited for.
    """

    def __init__(
        self,
        loader: Any,
        seed: int,
        dims: ParallelDims,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.loader = loader
        self._waiting = waiting
        self._seed = seed
        self._dims = dims
        self.samples_seen = self.epoch = self.samples_in_epoch = 0  # the last two are used by foreign loaders only
        self._identity = {
            "seed": seed,
            "dataset_size": length(getattr(loader, "dataset", None)),
            "batch_size": _batch_size(loader),
        }
        if not isinstance(loader, ResumableLoader) and length(loader) == 0:
            raise DataError(
                f"dataloader_train gives no batch: the data set has {self._identity['dataset_size']} samples for this"
                f" rank's batch_size={getattr(loader, 'batch_size', None)}. Lower dataloader_train.batch_size or add"
                " data."
            )
        _check_ranks(loader, dims)

    def state_dict(self) -> dict[str, int | None]:
        """The place, and what the order follows from: the seed, the number of samples and the batch size of a rank."""
        place = {"samples_seen": self.samples_seen, "epoch": self.epoch, "samples_in_epoch": self.samples_in_epoch}
        return {**place, **self._identity}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Go on from a saved place, before the first batch; report in which way this is another stream."""
        self.samples_seen = state.get("samples_seen") or 0
        self.epoch = state.get("epoch") or 0
        self.samples_in_epoch = state.get("samples_in_epoch") or 0
        changes = [
            f"{key} {state[key]} -> {new}"
            for key, new in self._identity.items()
            if key != "batch_size" and state.get(key) is not None and new is not None and state[key] != new
        ]  # another batch size leaves the order of the samples
        if changes:
            log.warning(
                "data: %s since the checkpoint was written: this epoch may repeat some samples and leave some out",
                ", ".join(changes),
            )

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.loader, ResumableLoader):
            batches = self._own()
        elif _is_map_style(self.loader):
            batches = self._foreign()
        else:
            batches = self._opaque()
        while True:
            with self._waiting():
                batch = next(batches)
            yield batch

    def _own(self) -> Iterator[Any]:
        loader: ResumableLoader = self.loader
        batches, drawn = tee(loader.batches(self._seed, self.samples_seen, self._dims))  # one is read ahead
        read = workers.load(loader.dataset, batches, self._seed, "sample", loader._options)
        for batch, indices in zip(read, drawn, strict=False):
            self.samples_seen += len(indices) * self._dims.dp_size
            yield with_positions(batch, indices)

    def _foreign(self) -> Iterator[Any]:
        """Batches of a torch DataLoader over a map-style data set, in its own sampler's order.

        Sample k of a rank is taken for sample ``k * dp_size + dp_rank`` of the epoch, as a DistributedSampler deals
        them out. So another number of ranks may stop inside a batch: its rest comes first, as a shorter batch, or when
        it has not a sample for each rank, with the batch that follows.
        """
        loader: DataLoader[Any] = self.loader
        dp_size, dp_rank = self._dims.dp_size, self._dims.dp_rank

        def source() -> Iterator[tuple[tuple[int, int, int], Indices]]:
            """(the place after a batch, the batch)"""
            epoch, used = self.epoch, self.samples_in_epoch
            start = self.samples_seen - used  # of the epoch in the stream
            batch: Indices = []
            while True:
                if used:
                    log.info("resuming %s: epoch %d, skipping %d samples by index", type(loader).__name__, epoch, used)
                seen, empty = 0, True
                for indices in _epoch_of(loader, self._seed, epoch):
                    empty = False
                    first, seen = seen, seen + len(indices) * dp_size
                    if seen <= used:
                        continue
                    places = ((first + k * dp_size + dp_rank, index) for k, index in enumerate(indices))
                    batch += [(start + place, index) for place, index in places if place >= used]
                    if seen - used < dp_size:
                        continue
                    yield (epoch, seen, start + seen), batch
                    batch = []
                if empty:
                    raise DataError(f"The sampler of {type(loader.dataset).__name__} gave no batch in epoch {epoch}.")
                epoch, start, used = epoch + 1, start + max(seen, used), 0

        names = ("num_workers", "prefetch_factor", "timeout", "pin_memory", "collate_fn", "worker_init_fn")
        options = {name: getattr(loader, name) for name in (*names, "multiprocessing_context")}
        ahead, drawn = tee(source())
        read = workers.load(loader.dataset, (batch for _, batch in ahead), self._seed, "sample", options)
        for batch, (place, indices) in zip(read, drawn, strict=False):
            self.epoch, self.samples_in_epoch, self.samples_seen = place
            yield with_positions(batch, indices)

    def _opaque(self) -> Iterator[Any]:
        """Batches of any other iterable: passes over it are repeated, and a resumed run has to read what it skips.

        What it draws from the global generators follows from (seed, epoch, dp_rank) and leaves the model's alone.
        """
        skip = self.samples_in_epoch
        if skip:
            log.warning(
                f"{type(self.loader).__name__} can only be resumed by reading its first {skip} samples again; a plain"
                " DataLoader over a map-style data set, or a ResumableLoader, would skip them by index. Draws repeat"
                " exactly if they come from the global generators, with the same num_workers and number of ranks."
            )
        workers.leave_signals_alone(self.loader)
        purpose = f"loader of rank {self._dims.dp_rank}"
        while True:
            seen = 0
            _start_epoch(self.loader, self._seed, self.epoch)
            for batch in _drawn_apart(self.loader, self._seed, self.epoch, purpose):
                size, first = _batch_length(batch), self.samples_seen + self._dims.dp_rank
                count = size * self._dims.dp_size
                seen += count
                if seen <= skip:
                    continue
                self.samples_seen += count
                self.samples_in_epoch = seen
                yield with_positions(batch, [(first + k * self._dims.dp_size, k) for k in range(size)])
            if seen == 0:
                raise DataError(f"{type(self.loader).__name__} gave no batch at all in epoch {self.epoch}.")
            self.epoch, self.samples_in_epoch, skip = self.epoch + 1, 0, 0


def open_pass(loader: Any) -> Iterator[Any]:
    """One pass over a loader of any kind, as for validation, with workers that `workers.close_readers` can end."""
    workers.leave_signals_alone(loader)
    return iter(loader)


def without_end(model: ImaginaireModel, stream: DataStream) -> Generator[Any, None, None]:
    """Training batches without end: whatever the model makes of the stream, again and again."""
    while True:
        empty = True
        for batch in model.train_batches(stream):
            empty = False
            yield batch
        if empty:
            raise DataError(f"{type(model).__name__}.train_batches gave no batch from {type(stream.loader).__name__}.")


def data_sets(*loaders: Any) -> list[Any]:
    """Every data set that loaders read, also those inside data sets that join or cut others: under the usual names
    whatever it is, under any other name a torch ``Dataset``."""
    usual = ("dataset", "datasets", "members")
    found: dict[int, Any] = {}
    holders = [*loaders]
    for holder in holders:  # it grows meanwhile, by every sample of a data set that keeps them in such a list
        for name in dict.fromkeys((*usual, *getattr(holder, "__dict__", ()))):
            inner = getattr(holder, name, None)
            if isinstance(inner, Mapping):
                inner = list(inner.values())
            parts = inner if isinstance(inner, list | tuple) else [inner]
            held = [one for one in parts if isinstance(one, Dataset) or (name in usual and one is not None)]
            new = {id(one): one for one in held if id(one) not in found}
            found |= new
            holders += new.values()
    return list(found.values())


def _block(start: int, batch_size: int, dims: ParallelDims) -> range:
    first = start + dims.dp_rank * batch_size
    return range(first, first + batch_size)


def with_positions(batch: Any, indices: Indices, end: int | None = None) -> Any:
    """The batch with the place of each sample; from ``end`` on they are repetitions, which do not count."""
    if isinstance(batch, dict):
        places = torch.tensor([position for position, _ in indices])
        batch[POSITION_KEY] = places
        if end is not None and bool((places >= end).any()):
            batch[WEIGHT_KEY] = (places < end).float()
    return batch


def _batch_length(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor, else 1."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    values = batch if isinstance(batch, list | tuple) else ()
    return next((_batch_length(value) for value in values if isinstance(value, Tensor)), 1)


def move_to(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device, but the samples' positions: the host draws by them.

    Mappings, lists, tuples and dataclasses (also frozen ones) are rebuilt, whatever they hold.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: value if key == POSITION_KEY else move_to(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move_to(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        moved = copy.copy(batch)
        for field in dataclasses.fields(batch):
            if field.name != POSITION_KEY:
                object.__setattr__(moved, field.name, move_to(getattr(batch, field.name), device))
        return moved
    return batch


# --- loaders that are not ours: their order, epoch by epoch, and the ranks that read each part of it


def _is_map_style(loader: Any) -> bool:
    """True if its sampler and its data set alone define its batches."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__  # a subclass may change them
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def _epoch_of(loader: DataLoader[Any], seed: int, epoch: int) -> Iterator[list[int]]:
    """The index batches of one epoch; samplers that draw from the global generators are seeded by (seed, epoch)."""
    _start_epoch(loader, seed, epoch)
    sampler: Any = loader.batch_sampler
    if length(sampler) is None:  # it may be endless
        yield from (list(batch) for batch in _drawn_apart(sampler, seed, epoch, "sampler"))
        return
    with random.preserved():
        random.seed_all(seed, epoch, "sampler")
        batches = [list(batch) for batch in sampler]
    yield from batches


def _start_epoch(loader: Any, seed: int, epoch: int) -> None:
    """Set the epoch of the parts of a loader; those that have a torch generator get it seeded by (seed, epoch)."""
    parts = [*_samplers(loader), loader]
    if not _is_map_style(loader):
        parts.append(getattr(loader, "dataset", None))
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        if isinstance(getattr(part, "generator", None), torch.Generator):
            part.generator.manual_seed(random.derive_seed(seed, epoch, "sampler"))


def _drawn_apart(items: Iterable[Any], seed: int, position: int, purpose: str) -> Iterator[Any]:
    """One pass over the items, whose draws go on from one to the next and never mix with those of the model."""
    with random.preserved():
        random.seed_all(seed, position, purpose)
        reader = iter(items)
        state = random.get_rng_state()
    while True:
        with random.preserved():
            random.set_rng_state(state)
            item = next(reader, _END)
            state = random.get_rng_state()
        if item is _END:
            return
        yield item


def length(items: Any) -> int | None:
    """The number of items, or None; torch's wrappers have a ``__len__`` even where what they wrap has none."""
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None


def _batch_size(loader: Any) -> int | None:
    """Samples of one rank's batch; None where the loader does not state it."""
    found = getattr(loader, "batch_size", None)
    if found is None:
        found = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return found if isinstance(found, int) else None


def _check_ranks(loader: Any, dims: ParallelDims) -> None:
    """Refuse a torch DataLoader that gives several ranks the same samples, or divides them among other ranks."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    cure = (
        "Give it a DistributedSampler with num_replicas=dp_size and rank=dp_rank of imaginaire.distributed.parallel"
        ".current_dims(), or use imaginaire.data.stream.ResumableLoader, which divides the samples itself."
    )
    samplers = _samplers(loader)
    for sampler in samplers:
        own, other = length(loader.dataset), length(getattr(sampler, "dataset", None))
        if isinstance(sampler, DistributedSampler) and own != other:
            raise DataError(
                f"dataloader_train: its data set has {own} samples, but its {type(sampler).__name__} is for one of"
                f" {other}. Override dataloader_train.sampler.dataset like dataloader_train.dataset."
            )
        replicas, rank = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", dims.dp_rank)
        if replicas is not None and (replicas, rank) != (dims.dp_size, dims.dp_rank):
            raise DataError(
                f"dataloader_train: its {type(sampler).__name__} is for rank {rank} of {replicas}, but this is "
                f"data-parallel rank {dims.dp_rank} of {dims.dp_size}. {cure}"
            )
    if dims.dp_size > 1 and _is_map_style(loader) and all(type(sampler) in _UNDIVIDED for sampler in samplers):
        names = " with ".join(type(sampler).__name__ for sampler in samplers)
        raise DataError(f"dataloader_train: all {dims.dp_size} ranks read the same samples by {names}. {cure}")


def _samplers(loader: Any) -> list[Any]:
    """The samplers of a torch DataLoader, each once: of batches, of their indices, of samples."""
    of_batches = getattr(loader, "batch_sampler", None)
    found = (of_batches, getattr(of_batches, "sampler", None), getattr(loader, "sampler", None))
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())
