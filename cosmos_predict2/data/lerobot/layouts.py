# SPDX-License-Identifier: Apache-2.0
"""Episodes of a data set and the place of each, in all versions of the format.

2.0 and 2.1: a table and a video per episode
    meta/episodes.jsonl                                {"episode_index": 0, "tasks": ["..."], "length": 120}
    meta/tasks.jsonl                                   {"task_index": 0, "task": "..."}
    data/chunk-000/episode_000000.parquet
    videos/chunk-000/CAMERA/episode_000000.mp4

3.0: many episodes in a table and in a video
    meta/episodes/chunk-000/file-000.parquet           an episode's tasks, length, and where its rows and pictures are
    meta/tasks.parquet                                 tasks by number
    data/chunk-000/file-000.parquet
    videos/CAMERA/chunk-000/file-000.mp4               an episode is from ``from_timestamp`` to ``to_timestamp``

The index is a few arrays, which worker processes share without copying.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from cosmos_predict2.data.lerobot.info import Info
from cosmos_predict2.data.lerobot.tables import UNFINISHED, inside, opened
from cosmos_predict2.data.samples import PackedStrings
from imaginaire import foreign_json
from imaginaire.errors import MISSHAPEN, DataError, raised_as

_DATA = ("data/chunk_index", "data/file_index", "dataset_from_index")
_VIDEO = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")


@dataclass(frozen=True)
class EpisodeIndex:
    """One entry per episode, in the order of the index."""

    numbers: NDArray[numpy.int64]  # as the files call them
    lengths: NDArray[numpy.int64]  # frames
    texts: PackedStrings  # distinct tasks
    text_of: NDArray[numpy.int64]  # the episode's tasks, one after another ...
    first_text: NDArray[numpy.int64]  # ... beginning here, [n + 1]

    def __len__(self) -> int:
        return len(self.numbers)

    def tasks(self, i: int) -> list[str]:
        """The episode's tasks: mostly one, none where the data set has none."""
        return [self.texts[int(k)] for k in self.text_of[self.first_text[i] : self.first_text[i + 1]]]

    def several_tasks(self) -> str | None:
        """A note on the episodes with several tasks; None without any."""
        found = numpy.flatnonzero(numpy.diff(self.first_text) > 1)
        if not len(found):
            return None
        tasks = ", ".join(repr(text) for text in self.tasks(int(found[0])))
        first = self.numbers[found[0]]
        return f"{len(found)} of {len(self)} episodes have several tasks, the first of them episode {first}: {tasks}"


@dataclass(frozen=True, slots=True)
class RowsLocation:
    """Place of an episode's rows."""

    path: Path
    first: int


@dataclass(frozen=True, slots=True)
class VideoLocation:
    """Place of an episode's pictures: in ``path``, from ``start`` seconds on; ``seconds`` long if that is known."""

    path: Path
    start: float = 0.0
    seconds: float | None = None


def make_episodes(
    numbers: Sequence[int], lengths: Sequence[int], tasks: Iterable[Sequence[str]], where: Path, total: int | None
) -> EpisodeIndex:
    """The index in arrays, after checking it; ``total`` episodes by info.json."""
    if not len(numbers):
        raise DataError(f"{where} lists no episodes.")
    if total is not None and len(numbers) < total:
        raise DataError(
            f"{where} lists {len(numbers)} episodes, but meta/info.json has total_episodes {total}: it is cut short."
            f" Fetch it again; if the others were removed on purpose, write total_episodes {len(numbers)}."
        )
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
    return EpisodeIndex(
        numbers=numpy.asarray(numbers, numpy.int64),
        lengths=numpy.asarray(lengths, numpy.int64),
        texts=PackedStrings(known),
        text_of=numpy.asarray(text_of, numpy.int64),
        first_text=numpy.asarray(first_text, numpy.int64),
    )


def _video_path(info: Info, camera: str) -> str:
    if info.video_path is None:
        raise DataError(f"{info.root / 'meta' / 'info.json'} has no 'video_path', but '{camera}' is a video.")
    return info.video_path


def fill(template: str, where: Path, **values: Any) -> str:
    """A path of info.json with its {name} and {name:03d} filled, inside the data set's folder.

    ``str.format`` would follow attributes that the file names, and pad to any width.
    """
    parts = _FIELD.split(template)  # text, name, width, text, ...
    try:
        found = parts[0] + "".join(
            str(values[name]).zfill(int(width or 0)) + text
            for name, width, text in zip(parts[1::3], parts[2::3], parts[3::3])
        )
    except KeyError as error:
        raise DataError(f"{where}: the path '{template}' names {error}; it may name {', '.join(values)}.") from error
    if any(brace in text for text in parts[0::3] for brace in "{}"):
        raise DataError(f"{where}: the path '{template}' may only have fields such as {{episode_index:06d}}.")
    return inside(found, where)


_FIELD = re.compile(r"\{(\w+)(?::0?(\d{1,2})d)?\}")


def texts(value: Any) -> list[str]:
    """The tasks of an index entry: a list, one string, or nothing; empty strings are dropped."""
    listed = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    return [text.strip() for text in listed if isinstance(text, str) and text.strip()]


class LayoutV2:
    """Versions 2.0 and 2.1: files by the episode's number."""

    def __init__(self, info: Info) -> None:
        self._info = info
        self._where = info.root / "meta" / "info.json"
        path = info.root / "meta" / "episodes.jsonl"
        entries = read_lines(path)
        with raised_as(DataError, f"{path}: an episode lacks 'episode_index' or 'length'", *MISSHAPEN):
            numbers = [int(entry["episode_index"]) for entry in entries]
            lengths = [int(entry["length"]) for entry in entries]
        self.episodes = make_episodes(
            numbers, lengths, (texts(entry.get("tasks")) for entry in entries), path, info.total_episodes
        )
        self.tasks = _tasks_v2(info.root)

    def rows(self, i: int) -> RowsLocation:
        return RowsLocation(self._path(self._info.data_path, i), 0)

    def clip(self, i: int, camera: str) -> VideoLocation:
        return VideoLocation(self._path(_video_path(self._info, camera), i, video_key=camera))

    def _path(self, template: str, i: int, **values: str) -> Path:
        number = int(self.episodes.numbers[i])
        chunk = number // self._info.chunks_size
        return self._info.root / fill(template, self._where, episode_chunk=chunk, episode_index=number, **values)


def _tasks_v2(root: Path) -> dict[int, str]:
    """Tasks by their number; empty without a file of them."""
    path = root / "meta" / "tasks.jsonl"
    if not path.is_file():
        return {}
    with raised_as(DataError, f"{path}: a line lacks 'task_index' or 'task'", KeyError, TypeError, ValueError):
        return {int(entry["task_index"]): str(entry["task"]).strip() for entry in read_lines(path)}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one per line."""
    try:
        with path.open(encoding="utf-8") as file:
            entries = {number: foreign_json.loads(line) for number, line in enumerate(file, 1) if line.strip()}
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON lines: {error}") from error
    for number, entry in entries.items():
        if not isinstance(entry, dict):
            raise DataError(f"{path}, line {number}: an object was expected, not {type(entry).__name__}.")
    return list(entries.values())


class LayoutV3:
    """Version 3.0: files and places by the index."""

    def __init__(self, info: Info) -> None:
        self._info = info
        self._where = info.root / "meta" / "info.json"
        folder = info.root / "meta" / "episodes"
        columns = _index_columns(folder, info)
        self.episodes = make_episodes(
            columns["episode_index"], columns["length"], map(texts, columns.pop("tasks")), folder, info.total_episodes
        )
        self._columns = {name: _array(values, folder, name) for name, values in columns.items()}
        self._first_rows = _first_rows(*(self._columns[name] for name in _DATA))
        self.tasks = _tasks_v3(info.root)

    def rows(self, i: int) -> RowsLocation:
        path = fill(
            self._info.data_path,
            self._where,
            chunk_index=int(self._columns["data/chunk_index"][i]),
            file_index=int(self._columns["data/file_index"][i]),
        )
        return RowsLocation(self._info.root / path, int(self._first_rows[i]))

    def clip(self, i: int, camera: str) -> VideoLocation:
        template = _video_path(self._info, camera)
        chunk, file, start, end = (self._columns[f"videos/{camera}/{name}"][i] for name in _VIDEO)
        if numpy.isnan([chunk, file, start, end]).any():
            raise DataError(f"{self._info.root}: episode {self.episodes.numbers[i]} has no video of '{camera}'.")
        path = fill(template, self._where, video_key=camera, chunk_index=int(chunk), file_index=int(file))
        return VideoLocation(self._info.root / path, float(start), float(end - start))


def _tasks_v3(root: Path) -> dict[int, str]:
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
        raise DataError(f"{folder} holds no index (chunk-*/file-*.parquet).{UNFINISHED}")
    names = ["episode_index", "length", "tasks", *_DATA]
    names += [f"videos/{camera}/{name}" for camera in info.cameras if info.is_video(camera) for name in _VIDEO]
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for path in files:
        with opened(path) as file:
            present = set(file.schema_arrow.names)
            absent = [name for name in names if name not in present and name != "tasks"]
            if absent:
                cure = " Its videos were never encoded: record again." if absent[0].startswith("videos/") else ""
                raise DataError(f"{path} has no column '{absent[0]}'.{cure}")
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
