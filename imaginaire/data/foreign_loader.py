# SPDX-License-Identifier: Apache-2.0
"""The order of a torch DataLoader that is not ours, epoch by epoch, and the ranks that read each part of it."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from imaginaire import random
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import DataError

_UNDIVIDED = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_END = object()


def is_map_style(loader: Any) -> bool:
    """True if its sampler and its data set alone define its batches."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__  # a subclass may change them
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def epoch_of(loader: DataLoader[Any], seed: int, epoch: int) -> Iterator[list[int]]:
    """The index batches of one epoch; samplers that draw from the global generators are seeded by (seed, epoch)."""
    start_epoch(loader, seed, epoch)
    sampler: Any = loader.batch_sampler
    if length(sampler) is None:  # it may be endless
        yield from (list(batch) for batch in drawn_apart(sampler, seed, epoch, "sampler"))
        return
    with random.preserved():
        random.seed_all(seed, epoch, "sampler")
        batches = [list(batch) for batch in sampler]
    yield from batches


def start_epoch(loader: Any, seed: int, epoch: int) -> None:
    """Set the epoch of the parts of a loader; those that have a torch generator get it seeded by (seed, epoch)."""
    parts = [*_samplers(loader), loader]
    if not is_map_style(loader):
        parts.append(getattr(loader, "dataset", None))
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        if isinstance(getattr(part, "generator", None), torch.Generator):
            part.generator.manual_seed(random.derive_seed(seed, epoch, "sampler"))


def drawn_apart(items: Iterable[Any], seed: int, position: int, purpose: str) -> Iterator[Any]:
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


def batch_size(loader: Any) -> int | None:
    """Samples of one rank's batch; None where the loader does not state it."""
    found = getattr(loader, "batch_size", None)
    if found is None:
        found = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return found if isinstance(found, int) else None


def check_ranks(loader: Any, dims: ParallelDims) -> None:
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
    if dims.dp_size > 1 and is_map_style(loader) and all(type(sampler) in _UNDIVIDED for sampler in samplers):
        names = " with ".join(type(sampler).__name__ for sampler in samplers)
        raise DataError(f"dataloader_train: all {dims.dp_size} ranks read the same samples by {names}. {cure}")


def _samplers(loader: Any) -> list[Any]:
    """The samplers of a torch DataLoader, each once: of batches, of their indices, of samples."""
    of_batches = getattr(loader, "batch_sampler", None)
    found = (of_batches, getattr(of_batches, "sampler", None), getattr(loader, "sampler", None))
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())
