# SPDX-License-Identifier: Apache-2.0
"""What a data set does about a sample that cannot be read: stop, or take the next one and say so."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from imaginaire.errors import CheckpointError, ConfigError, DataError

log = logging.getLogger(__name__)

Item = TypeVar("Item")

CURE = "Run python -m scripts.check_dataset on the folder, which lists all faults"


class BadSamples:
    """Reads samples by index. With ``skip`` a bad one is replaced by the next good one after it, counted and logged.

    The replacement follows from the index alone, so a resumed run sees the same. After ``most`` bad samples in a row,
    or when no other is left, the last error is raised.
    """

    def __init__(self, skip: bool = False, most: int = 16) -> None:
        if most < 1:
            raise ConfigError(f"At most {most} bad samples in a row; need 1 or more.")
        self.skip = skip
        self.most = most
        self.count = 0  # by this process: each worker of a loader counts its own

    def read(self, index: int, length: int, read: Callable[[int], Item]) -> Item:
        """``read(index)``, or with ``skip`` the first of the samples from ``index`` on that can be read."""
        if not -length <= index < length:
            raise IndexError(f"item {index} of {length}")  # which is what ends a for loop over a data set
        index %= length
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
