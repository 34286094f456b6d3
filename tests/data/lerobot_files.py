# SPDX-License-Identifier: Apache-2.0
"""Writes recordings as LeRobot data sets of every version: a file per episode, or several episodes in each file."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

from cosmos_predict2.data.lerobot import writer
from cosmos_predict2.data.lerobot.writer import DATA_PATH, VIDEO_PATH, Recording, Writer, write_lines, write_table
from cosmos_predict2.data.video.media import write_video
from tests.data.sources_lerobot import write_json

Columns = dict[str, Any]
COUNTERS = {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in writer.COUNTERS.items()}
FILE_V3 = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH_V3, VIDEO_PATH_V3 = f"data/{FILE_V3}.parquet", f"videos/{{video_key}}/{FILE_V3}.mp4"


@dataclass(frozen=True)
class Recordings:
    """Episodes, each with its task, the columns of its table without counters, and frames [F, H, W, 3] by camera."""

    robot: str
    fps: int
    tasks: Sequence[str]
    tables: Sequence[Columns]
    films: Sequence[Mapping[str, numpy.ndarray]]
    features: Mapping[str, Any]  # as in info.json
    film_fps: int

    @property
    def lengths(self) -> list[int]:
        return [len(next(iter(table.values()))) for table in self.tables]

    @property
    def distinct_tasks(self) -> list[str]:
        return list(dict.fromkeys(self.tasks))

    def counters(self, episode: int) -> Columns:
        frames = numpy.arange(self.lengths[episode])
        return {
            "timestamp": (frames / self.fps).astype(numpy.float32),
            "frame_index": frames,
            "episode_index": numpy.full(len(frames), episode),
            "index": frames + sum(self.lengths[:episode]),
            "task_index": numpy.full(len(frames), self.distinct_tasks.index(self.tasks[episode])),
        }

    def index(self) -> list[dict[str, Any]]:
        rows = enumerate(zip(self.tasks, self.lengths, strict=True))
        return [{"episode_index": i, "tasks": [task], "length": length} for i, (task, length) in rows]


def write_v2(folder: Path, version: str, of: Recordings) -> None:
    for i, (table, films) in enumerate(zip(of.tables, of.films, strict=True)):
        write_table(folder / DATA_PATH.format(episode_chunk=0, episode_index=i), {**table, **of.counters(i)})
        for camera, film in films.items():
            path = VIDEO_PATH.format(episode_chunk=0, episode_index=i, video_key=camera)
            write_film(folder / path, film, of.film_fps)
    meta = folder / "meta"
    write_lines(meta / "tasks.jsonl", [{"task_index": k, "task": task} for k, task in enumerate(of.distinct_tasks)])
    write_lines(meta / "episodes.jsonl", of.index())
    if version == "v2.0":
        write_json(meta / "stats.json", {})
    else:
        write_lines(meta / "episodes_stats.jsonl", [{"episode_index": i, "stats": {}} for i in range(len(of.tables))])
    _write_info(folder, version, of, data_path=DATA_PATH, video_path=VIDEO_PATH)


def write_v3(folder: Path, of: Recordings, episodes_per_file: int) -> None:
    index: dict[str, list[Any]] = {}
    cameras = list(of.films[0])
    for file, first in enumerate(range(0, len(of.tables), episodes_per_file)):
        group = range(first, min(first + episodes_per_file, len(of.tables)))
        tables = [{**of.tables[i], **of.counters(i)} for i in group]
        columns = {name: [value for table in tables for value in table[name]] for name in tables[0]}
        columns = {n: numpy.stack(v) if isinstance(tables[0][n], numpy.ndarray) else v for n, v in columns.items()}
        place = dict(chunk_index=0, file_index=file)
        write_table(folder / DATA_PATH_V3.format(**place), columns)
        for camera in cameras:
            film = numpy.concatenate([of.films[i][camera] for i in group])
            write_film(folder / VIDEO_PATH_V3.format(**place, video_key=camera), film, of.film_fps)
        for i in group:
            before, begin = sum(of.lengths[:i]), sum(of.lengths[first:i])
            row = {**of.index()[i], "dataset_from_index": before, "dataset_to_index": before + of.lengths[i]}
            times = {"from_timestamp": begin / of.fps, "to_timestamp": (begin + of.lengths[i]) / of.fps}
            row |= {f"videos/{camera}/{key}": value for camera in cameras for key, value in times.items()}
            files = ("data", *(f"videos/{camera}" for camera in cameras))
            row |= {f"{what}/{key}": value for what in files for key, value in place.items()}
            for name, value in row.items():
                index.setdefault(name, []).append(value)
    write_table(folder / "meta/episodes/chunk-000/file-000.parquet", index)
    tasks = of.distinct_tasks
    write_table(folder / "meta/tasks.parquet", {"task_index": list(range(len(tasks))), "__index_level_0__": tasks})
    _write_info(folder, "v3.0", of, data_path=DATA_PATH_V3, video_path=VIDEO_PATH_V3)


def _write_info(folder: Path, version: str, of: Recordings, **paths: str) -> None:
    content = {
        "codebase_version": version,
        "robot_type": of.robot,
        "total_episodes": len(of.tables),
        "total_frames": sum(of.lengths),
        "chunks_size": 1000,
        "fps": of.fps,
        "splits": {"train": f"0:{len(of.tables)}"},
        "features": of.features,
        **paths,
    }
    write_json(folder / "meta" / "info.json", content)


def png(frames: numpy.ndarray) -> list[dict[str, Any]]:
    """Pictures as a column of a table."""
    found = []
    for k, frame in enumerate(frames):
        content = io.BytesIO()
        Image.fromarray(frame).save(content, "PNG")
        found.append({"bytes": content.getvalue(), "path": f"frame-{k:06d}.png"})
    return found


def write_film(path: Path, frames: numpy.ndarray, fps: int) -> None:
    write_video(path, torch.from_numpy(frames).permute(3, 0, 1, 2), fps)


def write_random(folder: Path, num: int, cameras: Sequence[str], side: int, state: int = 0) -> Path:
    """Recordings of one task, 13 pictures of each camera at 5 a second: actions, pictures and the numbers of a state
    are drawn."""
    draws, writer = numpy.random.default_rng(0), Writer(folder, fps=5, robot="own")
    for _ in range(num):
        columns = {"action": draws.uniform(-1, 1, (13, 4)), "next.success": numpy.ones(13)}
        if state:
            columns["observation.state"] = draws.uniform(-1, 1, (13, state))
        films = draws.integers(0, 255, (len(cameras), 3, 13, side, side), dtype=numpy.uint8)
        videos = {f"observation.images.{name}": torch.from_numpy(film) for name, film in zip(cameras, films)}
        writer.add(Recording({name: rows.astype(numpy.float32) for name, rows in columns.items()}, videos, "go"))
    writer.finish()
    return folder
