# SPDX-License-Identifier: Apache-2.0
"""Many strings in two arrays: what a data set knows of its clips, without an object for each.

Python writes a reference count into every object that it looks at. Worker processes share the parent's memory until
it is written to, so a list of a million strings is slowly copied into each worker; arrays are not.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy


class PackedStrings(Sequence[str]):
    """A read-only list of strings of which none is kept as an object."""

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
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"string {index} of {len(self)}")
        return self._bytes[self._ends[place] : self._ends[place + 1]].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))
