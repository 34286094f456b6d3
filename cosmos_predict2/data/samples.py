# SPDX-License-Identifier: Apache-2.0
"""What the samples of all data sets share: keys, finding one by its index, skipping bad ones, names in arrays."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from imaginaire.errors import CheckpointError, ConfigError, DataError

log = logging.getLogger(__name__)

Item = TypeVar("Item")

CURE = "Run python -m scripts.check_dataset on the folder, which lists all faults"


def place_of(index: int, length: int) -> int:
    """The index counted from 0; an IndexError, which ends a for loop over a data set, where there is no such item."""
    if not -length <= index < length:
        raise IndexError(f"item {index} of {length}")
    return index % length


def text_item(embedding: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return {"t5_text_embeddings": embedding, "t5_text_mask": mask}


def frame_item(size: tuple[int, int]) -> dict[str, Tensor]:
    """A sample's picture size (height, width) and its padding mask: nothing is padded."""
    height, width = size
    return {
        "image_size": torch.tensor([height, width, height, width]),
        "padding_mask": torch.zeros(1, height, width),
    }


class BadSamples:
    """Reads samples by index. With ``skip`` a bad one is replaced by the next good one after it, counted and logged.

    The replacement follows from the index alone, so a resumed run sees the same. After ``most`` bad samples in a row,
    or when no other is left, the last error is raised.
    """

    def __init__(self, skip: bool = False, most: int = 16) -> None:
        if most < 1:
            raise ConfigError(f"most_bad_samples={most}, but it must be 1 or more.")
        self.skip = skip
        self.most = most
        self.count = 0  # by this process: each worker of a loader counts its own

    def read(self, index: int, length: int, read: Callable[[int], Item]) -> Item:
        """``read(index)``, or with ``skip`` the first of the samples from ``index`` on that can be read."""
        index = place_of(index, length)
        tries = min(self.most, length)
        for step in range(tries):
            try:
                return read((index + step) % length)
            except (DataError, CheckpointError) as error:  # the latter: of storage, for files that have gone
                self.count += 1
                if not self.skip:
                    raise DataError(f"{_sentence(error)} {CURE}, or set skip_bad_samples=True.") from error
                if step == tries - 1:
                    raise DataError(f"{_sentence(error)} That is bad sample {tries} in a row. {CURE}.") from error
                log.warning("skipped sample %d (%d so far%s): %s", (index + step) % length, self.count, _whose(), error)
        raise AssertionError("the last try returns or raises")


def _sentence(error: Exception) -> str:
    return f"{str(error).rstrip('.: ')}."


def _whose() -> str:
    info: Any = get_worker_info()
    return "" if info is None else f" in worker {info.id}"


class PackedStrings(Sequence[str]):
    """A read-only list of strings in two arrays.

    Python writes a reference count into every object that it looks at. Worker processes share the parent's memory until
    it is written to, so a list of a million strings is slowly copied into each worker; arrays are not.
    """

    def __init__(self, strings: Iterable[str] = ()) -> None:
        encoded = [string.encode("utf-8", "surrogateescape") for string in strings]
        self._ends = numpy.cumsum([0, *map(len, encoded)], dtype=numpy.int64)
        self._bytes = numpy.frombuffer(b"".join(encoded), dtype=numpy.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = place_of(index, len(self))
        return self._bytes[self._ends[place] : self._ends[place + 1]].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))
