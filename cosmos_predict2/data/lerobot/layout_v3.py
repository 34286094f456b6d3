# SPDX-License-Identifier: Apache-2.0
"""Version 3.0: many episodes in a table and in a video.

meta/episodes/chunk-000/file-000.parquet    for each episode its tasks, length, and where its rows and pictures are
meta/tasks.parquet                          tasks by number
data/chunk-000/file-000.parquet
videos/CAMERA/chunk-000/file-000.mp4        an episode is from ``from_timestamp`` to ``to_timestamp``
"""

from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from cosmos_predict2.data.lerobot.episodes import Clip, Rows, fill, make_episodes, texts
from cosmos_predict2.data.lerobot.info import Info
from cosmos_predict2.data.lerobot.tables import opened
from imaginaire.errors import DataError

_DATA = ("data/chunk_index", "data/file_index", "dataset_from_index")
_VIDEO = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")


class LayoutV3:
    """Finds episodes by the index."""

    def __init__(self, info: Info) -> None:
        self._info = info
        self._where = info.root / "meta" / "info.json"
        folder = info.root / "meta" / "episodes"
        columns = _index_columns(folder, info)
        self.episodes = make_episodes(
            columns["episode_index"], columns["length"], map(texts, columns.pop("tasks")), folder
        )
        self._columns = {name: _array(values, folder, name) for name, values in columns.items()}
        self._first_rows = _first_rows(*(self._columns[name] for name in _DATA))
        self.tasks = read_tasks(info.root)

    def rows(self, i: int) -> Rows:
        path = fill(
            self._info.data_path,
            self._where,
            chunk_index=int(self._columns["data/chunk_index"][i]),
            file_index=int(self._columns["data/file_index"][i]),
        )
        return Rows(self._info.root / path, int(self._first_rows[i]))

    def clip(self, i: int, camera: str) -> Clip:
        if self._info.video_path is None:
            raise DataError(f"{self._where} has no 'video_path', but '{camera}' is a video.")
        chunk, file, start, end = (self._columns[f"videos/{camera}/{name}"][i] for name in _VIDEO)
        if numpy.isnan([chunk, file, start, end]).any():
            raise DataError(f"{self._info.root}: episode {self.episodes.numbers[i]} has no video of '{camera}'.")
        path = fill(self._info.video_path, self._where, video_key=camera, chunk_index=int(chunk), file_index=int(file))
        return Clip(self._info.root / path, float(start), float(end - start))


def read_tasks(root: Path) -> dict[int, str]:
    """Tasks by their number: their text is the table's index, whatever that is called."""
    path = root / "meta" / "tasks.parquet"
    if not path.is_file():
        return {}
    with opened(path) as file:
        table = file.read()
    names = [name for name in table.column_names if name != "task_index" and "string" in str(table[name].type)]
    if "task_index" not in table.column_names or not names:
        raise DataError(f"{path} has the columns {', '.join(table.column_names)}; 'task_index' and a text are needed.")
    name = "task" if "task" in names else names[0]
    return {int(k): str(text).strip() for k, text in zip(table["task_index"].to_pylist(), table[name].to_pylist())}


def _index_columns(folder: Path, info: Info) -> dict[str, list[Any]]:
    """The columns of the index that are needed; its statistics, which are most of it, are not read."""
    files = sorted(folder.glob("*/*.parquet"))
    if not files:
        raise DataError(f"{folder} holds no index (chunk-*/file-*.parquet).")
    names = ["episode_index", "length", "tasks", *_DATA]
    names += [f"videos/{camera}/{name}" for camera in info.cameras if info.is_video(camera) for name in _VIDEO]
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for path in files:
        with opened(path) as file:
            present = set(file.schema_arrow.names)
            absent = [name for name in names if name not in present and name != "tasks"]
            if absent:
                raise DataError(f"{path} has no column '{absent[0]}'.")
            table = file.read(columns=[name for name in names if name in present])
            for name in names:
                columns[name] += table[name].to_pylist() if name in present else [None] * table.num_rows
    order = sorted(range(len(columns["episode_index"])), key=lambda k: columns["episode_index"][k])
    return {name: [values[k] for k in order] for name, values in columns.items()}


def _array(values: list[Any], folder: Path, name: str) -> NDArray[Any]:
    if name.startswith("videos/"):
        return numpy.array([numpy.nan if value is None else value for value in values], numpy.float64)
    if any(value is None for value in values):
        raise DataError(f"{folder}: an episode has no '{name}'.")
    return numpy.array(values, numpy.int64)


def _first_rows(chunks: NDArray[Any], files: NDArray[Any], from_index: NDArray[Any]) -> NDArray[numpy.int64]:
    """The row in its file at which each episode begins: the file's first row is that of its first episode."""
    _, group = numpy.unique(numpy.stack([chunks, files], axis=1), axis=0, return_inverse=True)
    first = numpy.full(int(group.max()) + 1, numpy.iinfo(numpy.int64).max)
    numpy.minimum.at(first, group.reshape(-1), from_index)
    return from_index - first[group.reshape(-1)]
