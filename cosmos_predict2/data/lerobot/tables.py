# SPDX-License-Identifier: Apache-2.0
"""Rows of Parquet files: numbers as arrays, pictures as tensors, reading no more than what holds the wanted rows."""

import io
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.data.video.clips import Fit
from cosmos_predict2.data.video.media import decoded_picture
from imaginaire.errors import DataError, optional_module

Numbers = NDArray[Any]


UNFINISHED = " Fetch it again; lerobot's own recordings can be read after dataset.finalize() alone: record again so."


class TableReader:
    """Columns of numbers, of which those read last are kept, up to ``most_bytes``.

    Files that hold one episode in each of their row groups are read episode by episode; a file that is one row group
    can only be read as a whole, which is why it is kept.
    """

    def __init__(self, most_bytes: int = 64 * 2**20) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[tuple[str, int, str, bool], Numbers] = OrderedDict()
        self._num_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return TableReader, (self._most_bytes,)  # a worker process begins with nothing

    def read(
        self, path: Path, columns: Sequence[str], first: int, count: int, *, is_all: bool = False, gaps: bool = False
    ) -> dict[str, Numbers]:
        """Each column's rows ``first`` ... ``first + count - 1``: [count], or [count, d] of a column of vectors.

        ``is_all``: the file holds these rows only. ``gaps``: a number that is missing is NaN, not an error.
        """
        with opened(path) as file:
            if is_all and file.metadata.num_rows != count:
                raise DataError(f"{path} has {file.metadata.num_rows} rows, but the index has {count} frames.")
            groups = _groups(file, path, first, count)
            absent = [column for column in columns if column not in file.schema_arrow.names]
            if absent:
                raise DataError(f"{path} has no column '{absent[0]}'; it has {', '.join(file.schema_arrow.names)}.")
            return {
                column: numpy.concatenate(
                    [self._column(file, path, group, column, gaps)[start:stop] for group, _, start, stop in groups]
                )
                for column in columns
            }

    def _column(self, file: Any, path: Path, group: int, column: str, gaps: bool) -> Numbers:
        key = (str(path), group, column, gaps)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        read = file.read_row_group(group, columns=[column], use_threads=False).column(column)
        numbers = _numbers(read, f"{path}: column '{column}'", gaps)
        self._kept[key] = numbers
        self._num_bytes += numbers.nbytes
        while self._num_bytes > self._most_bytes and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].nbytes
        return numbers


def read_images(path: Path, column: str, rows: Sequence[int], root: Path, fit: Fit | None = None) -> Tensor:
    """uint8 [3, F, H, W]: the pictures in these rows of a column of encoded pictures (or of their paths).

    ``fit`` brings [3, 1, H, W] to another size.
    """
    with opened(path) as file:
        if column not in file.schema_arrow.names:
            raise DataError(f"{path} has no column '{column}'; it has {', '.join(file.schema_arrow.names)}.")
        wanted = sorted(set(rows))
        encoded: dict[int, Any] = {}
        for group, before, start, stop in _groups(file, path, wanted[0], wanted[-1] - wanted[0] + 1):
            row = before
            for batch in file.iter_batches(batch_size=16, row_groups=[group], columns=[column], use_threads=False):
                values = batch.column(0)
                here = [k for k in wanted if max(row, before + start) <= k < row + len(values)]
                encoded.update((k, values[k - row].as_py()) for k in here)
                row += len(values)
                if row >= before + stop:
                    break
    pictures = {row: _picture(value, f"{path}: column '{column}', row {row}", root) for row, value in encoded.items()}
    shapes = {picture.shape for picture in pictures.values()}
    if len(shapes) > 1:
        raise DataError(f"{path}: the pictures of '{column}' have different sizes: {sorted(map(tuple, shapes))}.")
    if fit is not None:
        pictures = {row: fit(picture[:, None])[:, 0] for row, picture in pictures.items()}
    return torch.stack([pictures[row] for row in rows], dim=1)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """An open Parquet file; whatever is wrong with it is an error that names it."""
    pyarrow, parquet = (optional_module(name, "data") for name in ("pyarrow", "pyarrow.parquet"))
    if not path.is_file():
        raise DataError(f"{path} does not exist; the data set's index names it.")
    try:
        with parquet.ParquetFile(path, memory_map=True) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        cause = str(error).rstrip(".")
        raise DataError(f"{path} is not a Parquet file that can be read: {cause}.{UNFINISHED}") from error


def _groups(file: Any, path: Path, first: int, count: int) -> list[tuple[int, int, int, int]]:
    """(row group, rows before it, first row in it, row after the last) of the row groups that hold these rows."""
    total = int(file.metadata.num_rows)
    if first < 0 or count < 1 or first + count > total:
        raise DataError(f"{path} has {total} rows, but rows {first} to {first + count - 1} are wanted.")
    groups, before = [], 0
    for group in range(file.metadata.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        start, stop = max(0, first - before), min(size, first + count - before)
        if start < stop:
            groups.append((group, before, start, stop))
        before += size
    return groups


def _numbers(column: Any, what: str, gaps: bool) -> Numbers:
    """A column as an array [n] or [n, d, ...]; rows of different lengths are an error, and without ``gaps`` also rows
    without a value."""
    import pyarrow
    from pyarrow import compute, types

    values = pyarrow.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    shape = [len(values)]
    while True:
        if isinstance(values, pyarrow.ExtensionArray):
            values = values.storage
            continue
        is_list = (
            types.is_list(values.type) or types.is_large_list(values.type) or types.is_fixed_size_list(values.type)
        )
        if values.null_count and (is_list or not gaps):
            raise DataError(f"{what} has rows without a value.")
        if not is_list:
            break
        lengths = numpy.unique(compute.list_value_length(values).to_numpy(zero_copy_only=False))
        if len(lengths) != 1:
            raise DataError(f"{what} has rows of {lengths.min()} to {lengths.max()} numbers; they must be alike.")
        values = values.flatten()
        shape.append(int(lengths[0]))
    if not (types.is_integer(values.type) or types.is_floating(values.type) or types.is_boolean(values.type)):
        raise DataError(f"{what} holds {values.type}, not numbers.")
    if values.null_count:
        values = values.cast("float64")
    numbers = values.to_numpy(zero_copy_only=False)
    return numpy.ascontiguousarray(numbers).reshape(shape)


def inside(name: str, where: Path | str) -> str:
    """A path that a data set names in its own folder; links that lie there are followed, as a hub's cache has them."""
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise DataError(f"{where}: '{name}' leads out of the data set's folder.")
    return name


def _picture(value: Any, what: str, root: Path) -> Tensor:
    """uint8 [3, H, W] of {"bytes", "path"} or of bytes."""
    data = value.get("bytes") if isinstance(value, dict) else value
    if data is None and isinstance(value, dict) and value.get("path"):
        path = root / inside(str(value["path"]), what)
        if not path.is_file():
            raise DataError(f"{what}: the picture {path} does not exist.")
        data = path.read_bytes()
    if not isinstance(data, bytes):
        raise DataError(f"{what} holds no picture.")
    return decoded_picture(io.BytesIO(data), what)
