# SPDX-License-Identifier: Apache-2.0
"""Versions 2.0 and 2.1: a table and a video per episode.

    meta/episodes.jsonl                                {"episode_index": 0, "tasks": ["..."], "length": 120}
    meta/tasks.jsonl                                   {"task_index": 0, "task": "..."}
    data/chunk-000/episode_000000.parquet
    videos/chunk-000/CAMERA/episode_000000.mp4

The two differ in their statistics only: ``meta/stats.json`` of all, or ``meta/episodes_stats.jsonl`` of each.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosmos_predict2.data.lerobot.episodes import Clip, Rows, fill, make_episodes, texts
from cosmos_predict2.data.lerobot.info import Info
from imaginaire.errors import DataError


class LayoutV2:
    """Finds episodes by their number."""

    def __init__(self, info: Info) -> None:
        self._info = info
        self._where = info.root / "meta" / "info.json"
        path = info.root / "meta" / "episodes.jsonl"
        entries = list(read_lines(path))
        try:
            numbers = [int(entry["episode_index"]) for entry in entries]
            lengths = [int(entry["length"]) for entry in entries]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: an episode lacks 'episode_index' or 'length' ({error}).") from error
        self.episodes = make_episodes(numbers, lengths, (texts(entry.get("tasks")) for entry in entries), path)
        self.tasks = read_tasks(info.root)

    def rows(self, i: int) -> Rows:
        return Rows(self._path(self._info.data_path, i), 0)

    def clip(self, i: int, camera: str) -> Clip:
        if self._info.video_path is None:
            raise DataError(f"{self._where} has no 'video_path', but '{camera}' is a video.")
        return Clip(self._path(self._info.video_path, i, video_key=camera))

    def _path(self, template: str, i: int, **values: str) -> Path:
        number = int(self.episodes.numbers[i])
        chunk = number // self._info.chunks_size
        return self._info.root / fill(template, self._where, episode_chunk=chunk, episode_index=number, **values)


def read_tasks(root: Path) -> dict[int, str]:
    """Tasks by their number; empty where nobody wrote them down."""
    path = root / "meta" / "tasks.jsonl"
    if not path.is_file():
        return {}
    try:
        return {int(entry["task_index"]): str(entry["task"]).strip() for entry in read_lines(path)}
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: a line lacks 'task_index' or 'task' ({error}).") from error


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file with one per line."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise DataError(f"{path}, line {number}: an object was expected, not {type(entry).__name__}.")
                yield entry
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{path} is not JSON lines: {error}") from error
