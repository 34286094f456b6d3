# SPDX-License-Identifier: Apache-2.0
"""Which episodes a data set has and where each lies: a few arrays, which worker processes share without copying."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy
from numpy.typing import NDArray

from cosmos_predict2.data.samples import PackedStrings
from imaginaire.errors import DataError


@dataclass(frozen=True)
class Episodes:
    """One entry per episode, in the order of the index."""

    numbers: NDArray[numpy.int64]  # as the files call them
    lengths: NDArray[numpy.int64]  # frames
    texts: PackedStrings  # distinct tasks
    text_of: NDArray[numpy.int64]  # the episode's tasks, one after another ...
    first_text: NDArray[numpy.int64]  # ... beginning here, [n + 1]

    def __len__(self) -> int:
        return len(self.numbers)

    def tasks(self, i: int) -> list[str]:
        """What the episode shows; mostly one task, and none where nobody wrote it down."""
        return [self.texts[int(k)] for k in self.text_of[self.first_text[i] : self.first_text[i + 1]]]

    def several_tasks(self) -> str | None:
        """Which episodes have several tasks, in words; None where none has."""
        found = numpy.flatnonzero(numpy.diff(self.first_text) > 1)
        if not len(found):
            return None
        tasks = ", ".join(repr(text) for text in self.tasks(int(found[0])))
        first = self.numbers[found[0]]
        return f"{len(found)} of {len(self)} episodes have several tasks, the first of them episode {first}: {tasks}"


@dataclass(frozen=True, slots=True)
class Rows:
    """Where an episode's rows are."""

    path: Path
    first: int


@dataclass(frozen=True, slots=True)
class Clip:
    """Where an episode's pictures are: in ``path``, from ``start`` seconds on; ``seconds`` long where that is known."""

    path: Path
    start: float = 0.0
    seconds: float | None = None


class Layout(Protocol):
    """What one version of the format keeps where."""

    @property
    def episodes(self) -> Episodes: ...

    @property
    def tasks(self) -> Mapping[int, str]: ...

    def rows(self, i: int) -> Rows: ...

    def clip(self, i: int, camera: str) -> Clip: ...


def make_episodes(
    numbers: Sequence[int], lengths: Sequence[int], tasks: Iterable[Sequence[str]], where: Path
) -> Episodes:
    """The index in arrays, after checking it."""
    if not len(numbers):
        raise DataError(f"{where} lists no episodes.")
    if len(set(numbers)) < len(numbers):
        raise DataError(f"{where} lists an episode twice.")
    if min(lengths) < 1:
        i = int(numpy.argmin(lengths))
        raise DataError(f"{where}: episode {numbers[i]} has {lengths[i]} frames.")
    known: dict[str, int] = {}
    text_of: list[int] = []
    first_text = [0]
    for texts in tasks:
        text_of += [known.setdefault(text, len(known)) for text in texts]
        first_text.append(len(text_of))
    return Episodes(
        numbers=numpy.asarray(numbers, numpy.int64),
        lengths=numpy.asarray(lengths, numpy.int64),
        texts=PackedStrings(known),
        text_of=numpy.asarray(text_of, numpy.int64),
        first_text=numpy.asarray(first_text, numpy.int64),
    )


def fill(template: str, where: Path, **values: Any) -> str:
    """A path of info.json with its braces filled."""
    try:
        return template.format(**values)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise DataError(
            f"{where}: the path '{template}' cannot be filled in ({error!r}); it may name {', '.join(values)}."
        ) from error


def texts(value: Any) -> list[str]:
    """The tasks of an index entry: a list, one string, or nothing; empty strings say nothing."""
    listed = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    return [text.strip() for text in listed if isinstance(text, str) and text.strip()]
