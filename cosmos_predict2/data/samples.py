# SPDX-License-Identifier: Apache-2.0
"""Samples of all data sets: their keys, finding one by its index, skipping bad ones, and names in arrays; and rules
that choose the frames of a clip, or the states of an episode, for one.

Frames are counted in pixel frames from 0. A rule spans ``frames_needed`` frames of the clip and gives ``num_frames`` of
them: every ``stride``-th, or the nearest ones at ``fps`` frames per second (which repeats frames of a slower clip).
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from imaginaire.errors import CheckpointError, ConfigError, DataError, near

log = logging.getLogger(__name__)

Item = TypeVar("Item")

SAMPLINGS = ("random", "first", "center", "uniform", "reference")
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
    return {"image_size": torch.tensor([height, width, height, width]), "padding_mask": torch.zeros(1, height, width)}


class BadSamples:
    """Reads samples by index. With ``skip`` a bad one is replaced by the next good one after it, counted and logged.

    The replacement follows from the index alone, so a resumed run sees the same. After ``most`` bad samples in a row,
    or when no other is left, the last error is raised.
    """

    def __init__(self, skip: bool = False, most: int = 16, cure: str = CURE) -> None:
        if most < 1:
            raise ConfigError(f"most_bad_samples={most}, but it must be 1 or more.")
        self.skip = skip
        self.most = most
        self.cure = cure
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
                    raise DataError(f"{_sentence(error)} {self.cure}, or set skip_bad_samples=True.") from error
                if step == tries - 1:
                    raise DataError(f"{_sentence(error)} That is bad sample {tries} in a row. {self.cure}.") from error
                worker: Any = get_worker_info()
                count = f"{self.count} so far" + ("" if worker is None else f" in worker {worker.id}")
                log.warning("skipped sample %d (%s): %s", (index + step) % length, count, error)
        raise AssertionError("the last try returns or raises")


def _sentence(error: Exception) -> str:
    return f"{str(error).rstrip('.: ')}."


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


# ---- which frames ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRule:
    """Rule that chooses ``num_frames`` frames of a clip.

    sampling: ``random`` draws the start of the window uniformly from all that fit; ``first`` and ``center`` fix it;
    ``uniform`` spreads the frames over the whole clip; ``reference`` repeats the published training code, whose draw
    excludes the last start that fits.
    """

    num_frames: int
    fps: float | None = None
    stride: int = 1
    sampling: str = "random"

    def __post_init__(self) -> None:
        for name in ("num_frames", "stride"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number, 1 or more.")
        if self.fps is not None and not (math.isfinite(self.fps) and self.fps > 0):
            raise ConfigError(
                f"fps={self.fps!r} must be a positive number of frames per second, or null for the clip's own."
            )
        if self.sampling not in SAMPLINGS:
            raise ConfigError(f"There is no sampling '{self.sampling}'.{near(str(self.sampling), SAMPLINGS)}")
        if self.fps is not None and self.stride != 1:
            raise ConfigError(f"fps={self.fps:g} and stride={self.stride} mean the same: set one of them.")
        if self.sampling == "uniform" and (self.fps is not None or self.stride != 1):
            raise ConfigError("sampling='uniform' spreads the frames over the whole clip: remove fps and stride.")

    def frames_needed(self, native_fps: float) -> int:
        """The shortest clip of this rate that has enough frames."""
        return self.num_frames if self.sampling == "uniform" else self._offset(self.num_frames - 1, native_fps) + 1

    def choose(self, total: int, native_fps: float, draw: Callable[[int], int]) -> list[int]:
        """The frames, in ascending order; ``draw(n)`` gives a number from 0 to n - 1."""
        num_starts = total - self.frames_needed(native_fps) + 1
        if num_starts < 1:
            raise DataError(f"{total} frames, but {self.in_words(native_fps)}.")
        if self.sampling == "uniform":
            last = self.num_frames - 1
            return [_nearest(k * (total - 1) / last) if last else (total - 1) // 2 for k in range(self.num_frames)]
        start = self._start(num_starts, draw)
        return [start + self._offset(k, native_fps) for k in range(self.num_frames)]

    def item_fps(self, frames: list[int], native_fps: float) -> float:
        """Frames per second of the chosen frames."""
        if self.fps is not None:
            return float(self.fps)
        if self.sampling == "uniform" and len(frames) > 1 and frames[-1] > frames[0]:
            return native_fps * (len(frames) - 1) / (frames[-1] - frames[0])
        return native_fps / self.stride

    def in_words(self, native_fps: float) -> str:
        """The requirement on a clip of this rate, for messages."""
        rate = f" at fps={self.fps:g}" if self.fps is not None else f" with stride={self.stride}"
        how = "" if self.fps is None and self.stride == 1 else rate
        return f"num_frames={self.num_frames}{how} needs {self.frames_needed(native_fps)}"

    def _offset(self, k: int, native_fps: float) -> int:
        return k * self.stride if self.fps is None else _nearest(k * native_fps / self.fps)

    def _start(self, num_starts: int, draw: Callable[[int], int]) -> int:
        if self.sampling == "random":
            return int(draw(num_starts))
        if self.sampling == "reference":
            return int(draw(num_starts - 1)) if num_starts > 1 else 0
        return (num_starts - 1) // 2 if self.sampling == "center" else 0


def evenly(length: int, num: int) -> list[int]:
    """At most ``num`` places in ``length``, from the first to the last."""
    last = min(num, length) - 1
    return [k * (length - 1) // max(1, last) for k in range(last + 1)]


def _nearest(position: float) -> int:
    """The nearest frame; halves go up, where Python's round would alternate."""
    return math.floor(position + 0.5)
