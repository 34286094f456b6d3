# SPDX-License-Identifier: Apache-2.0
"""Writes episodes as a LeRobot data set of version 2.1, which the lerobot and GR00T packages read.

Files that are there are kept, so that writing the same episodes again goes on where it stopped; the index comes last,
and a data set that has one is refused. `Writer.after` adds other episodes to it.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.data.lerobot.info import COUNTERS, Info, read_info
from cosmos_predict2.data.lerobot.layouts import read_lines
from cosmos_predict2.data.video.media import write_video
from imaginaire import storage
from imaginaire.errors import DataError, optional_module

VERSION = "v2.1"
CHUNK = 1000  # episodes in a folder
DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
_NUMBERS = ("bool", "int32", "int64", "float32", "float64")


@dataclass(frozen=True)
class Recording:
    """One episode: columns [F, d] or [F], a video uint8 [3, F, H, W] per camera, and what it shows."""

    columns: Mapping[str, NDArray[Any]]
    videos: Mapping[str, Tensor]
    task: str

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def with_only(self, names: Collection[str]) -> "Recording":
        """The same without columns and cameras of other names."""
        columns = {name: values for name, values in self.columns.items() if name in names}
        videos = {name: video for name, video in self.videos.items() if name in names}
        return Recording(columns, videos, self.task)


class Writer:
    """Writes into a folder at a rate; ``finish`` writes the index of all episodes that were added.

    ``features`` are what info.json is to have of columns and cameras, such as names of numbers; the rest is found.
    """

    def __init__(
        self,
        root: Path,
        fps: float,
        robot: str = "",
        features: Mapping[str, Mapping[str, Any]] = {},
        *,
        extends: bool = False,  # see `after`
    ) -> None:
        self.root, self.fps, self.robot = Path(root), fps, robot
        if not isinstance(fps, int | float) or not 0 < fps < math.inf:
            raise DataError(f"{root}: fps={fps!r} is no rate, which is a number of pictures per second above 0.")
        if not extends and (self.root / "meta" / "info.json").exists():
            raise DataError(
                f"{root} is a data set of {read_info(self.root).total_episodes} episodes already. Give another folder,"
                " remove it to record anew, or add episodes to it: Writer.after(Path(...))."
            )
        self._tasks: dict[str, int] = {}
        self._lengths: list[int] = []
        self._episodes: list[dict[str, Any]] = []
        self._statistics: list[dict[str, Any]] = []
        self._features: dict[str, dict[str, Any]] = {name: dict(feature) for name, feature in features.items()}

    @classmethod
    def after(cls, root: Path) -> "Writer":
        """A writer of the episodes that follow those of a data set of this layout, which is as it was until `finish`.

        What an interrupted writer left behind the last episode of the index is removed.
        """
        info = require_own_layout(root)
        writer = cls(root, info.fps, info.robot, info.features, extends=True)
        meta = root / "meta"
        writer._tasks = {str(row["task"]): int(row["task_index"]) for row in read_lines(meta / "tasks.jsonl")}
        writer._episodes = read_lines(meta / "episodes.jsonl")
        writer._statistics = read_lines(meta / "episodes_stats.jsonl")
        writer._lengths = [int(row["length"]) for row in writer._episodes]
        for path in (*root.glob("data/*/episode_*.parquet"), *root.glob("videos/*/*/episode_*.mp4")):
            if int(path.stem.removeprefix("episode_")) >= len(writer):
                path.unlink()
        return writer

    def __len__(self) -> int:
        return len(self._lengths)

    @property
    def names(self) -> Collection[str]:
        """Columns and cameras of the episodes that were added, or that were declared."""
        return self._features

    def add(self, recording: Recording) -> None:
        """The next episode: its videos and its table, where they are not there yet."""
        number = len(self._lengths)
        videos = {camera: torch.as_tensor(video) for camera, video in recording.videos.items()}
        columns = {name: numpy.asarray(values) for name, values in recording.columns.items()}
        for camera, video in videos.items():
            if video.ndim != 4 or video.shape[0] != 3 or video.dtype != torch.uint8:
                found = f"{self.root}: episode {number}, camera '{camera}' is {video.dtype} {list(video.shape)}"
                raise DataError(f"{found}, where pictures are torch.uint8 [3, pictures, height, width], 0 to 255.")
        lengths = {name: len(values) for name, values in columns.items()}
        lengths |= {camera: video.shape[1] for camera, video in videos.items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise DataError(
                f"{self.root}: episode {number} has columns and pictures of unequal lengths: {found}. A row is a moment"
                " with its picture, so give as many of each; the action of the last picture may be the one before"
                " again."
            )
        for name, values in columns.items():
            if values.dtype.kind not in "biuf":
                found = f"{self.root}: episode {number}, column '{name}' holds {values.dtype}"
                raise DataError(f"{found}, where numbers are expected: a text belongs into the task.")
        task = self._tasks.setdefault(recording.task, len(self._tasks))
        for name, values in columns.items():  # success may be recorded as a truth or as a number
            known = self._features.get(name, {}).get("dtype", "")
            columns[name] = values.astype(known) if known in _NUMBERS else values
        recording = replace(recording, columns=columns, videos=videos)
        features = _features(recording, self.fps)
        own, others = ({name: _form(one) for name, one in found.items()} for found in (features, self._features))
        if self._lengths and own != others:
            name = next(name for name in {**own, **others} if own.get(name) != others.get(name))
            raise DataError(
                f"{self.root}: episode {number} has '{name}' as {features.get(name)}, but the others as"
                f" {self._features.get(name)}: episodes of a data set have the same columns and cameras."
            )
        self._features = {name: self._features.get(name, feature) for name, feature in features.items()}
        columns = {**recording.columns, **self._counters(number, len(recording), task)}
        table = self.root / DATA_PATH.format(episode_chunk=number // CHUNK, episode_index=number)
        for camera, video in recording.videos.items():
            place = VIDEO_PATH.format(episode_chunk=number // CHUNK, episode_index=number, video_key=camera)
            if not (self.root / place).exists():
                write_video(self.root / place, video, self.fps)
        if not table.exists():
            write_table(table, columns)
        self._lengths.append(len(recording))
        self._episodes.append({"episode_index": number, "tasks": [recording.task], "length": len(recording)})
        self._statistics.append({"episode_index": number, "stats": _statistics(columns, recording.videos)})

    def finish(
        self, splits: Mapping[str, tuple[int, int]] | None = None, modality: Mapping[str, Any] | None = None
    ) -> None:
        """Write the index; ``splits`` are ranges of episodes, by default all of them for training."""
        count = len(self._lengths)
        cameras = [key for key, feature in self._features.items() if feature["dtype"] == "video"]
        meta = self.root / "meta"
        write_lines(meta / "episodes.jsonl", self._episodes)
        write_lines(meta / "episodes_stats.jsonl", self._statistics)
        write_lines(meta / "tasks.jsonl", [{"task_index": k, "task": task} for task, k in self._tasks.items()])
        if modality is not None:
            storage.write_json(meta / "modality.json", modality, indent=4)
        info = {
            "codebase_version": VERSION,
            "robot_type": self.robot or None,
            "total_episodes": count,
            "total_frames": sum(self._lengths),
            "total_tasks": len(self._tasks),
            "total_videos": count * len(cameras),
            "total_chunks": -(-count // CHUNK),
            "chunks_size": CHUNK,
            "fps": int(self.fps) if float(self.fps).is_integer() else self.fps,
            "splits": {name: f"{first}:{last}" for name, (first, last) in (splits or {"train": (0, count)}).items()},
            "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if cameras else None,
            "features": self._features,
        }
        storage.write_json(meta / "info.json", info, indent=4)

    def _counters(self, number: int, length: int, task: int) -> dict[str, NDArray[Any]]:
        frames = numpy.arange(length)
        return {
            "timestamp": (frames / self.fps).astype(numpy.float32),
            "frame_index": frames,
            "episode_index": numpy.full(length, number),
            "index": frames + sum(self._lengths),
            "task_index": numpy.full(length, task),
        }


def require_own_layout(root: Path) -> Info:
    """Read the info.json of a data set of this program, to which episodes can be added; another's is refused."""
    info = read_info(root)
    if not is_own_layout(info):
        raise DataError(
            f"{root} is a data set of version {info.version} that another program wrote: episodes are added to"
            f" those of this one alone ({VERSION}, {DATA_PATH}, videos). python -m scripts.collect --base {root} --out"
            " ANOTHER adds them to a copy."
        )
    return info


def is_own_layout(info: Info) -> bool:
    is_alike = (info.version, info.data_path, info.chunks_size) == (VERSION, DATA_PATH, CHUNK)
    return is_alike and all(map(info.is_video, info.cameras))


def write_table(path: Path, columns: Mapping[str, Any]) -> None:
    """A Parquet file of columns: arrays [F], or [F, d] as vectors of d; lists are taken as they are."""
    pyarrow, parquet = (optional_module(name, "data") for name in ("pyarrow", "pyarrow.parquet"))
    arrays = {}
    for name, values in columns.items():
        if isinstance(values, numpy.ndarray) and values.ndim == 2:
            arrays[name] = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.reshape(-1)), values.shape[1])
        else:
            arrays[name] = pyarrow.array(values)
    buffer = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(arrays), buffer)
    storage.write_bytes(path, buffer.getvalue())


def write_lines(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    storage.write_text(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def _form(feature: Mapping[str, Any]) -> tuple[Any, ...]:
    """The type and the sizes of a feature's rows; names and codecs may differ, and colours may come first."""
    shape = list(feature["shape"])
    return feature["dtype"], *(shape[1:] + shape[:1] if len(shape) == 3 and shape[-1] != 3 else shape)


def _features(recording: Recording, fps: float) -> dict[str, dict[str, Any]]:
    features: dict[str, dict[str, Any]] = {}
    for name, values in recording.columns.items():
        features[name] = {"dtype": str(values.dtype), "shape": list(values.shape[1:]) or [1], "names": None}
    for camera, video in recording.videos.items():
        _, _, height, width = video.shape
        features[camera] = {
            "dtype": "video",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
            "info": {
                "video.fps": fps,
                "video.height": height,
                "video.width": width,
                "video.channels": 3,
                "video.codec": "h264",
                "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False,
                "has_audio": False,
            },
        }
    for name, dtype in COUNTERS.items():
        features[name] = {"dtype": dtype, "shape": [1], "names": None}
    return features


def _statistics(columns: Mapping[str, NDArray[Any]], videos: Mapping[str, Tensor]) -> dict[str, Any]:
    """min, max, mean, std and count of every column, and of the videos' colours from 0 to 1, each as [3, 1, 1]."""
    found = {}
    for name, values in columns.items():
        rows = values.astype(numpy.float64).reshape(len(values), -1)
        figures = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
        found[name] = {key: figure.tolist() for key, figure in figures.items()} | {"count": [len(values)]}
    for camera, video in videos.items():
        colours = video.reshape(3, -1).to(torch.float64) / 255
        by_name = {
            "min": colours.amin(1),
            "max": colours.amax(1),
            "mean": colours.mean(1),
            "std": colours.std(1, correction=0),
        }
        found[camera] = {key: figure.reshape(3, 1, 1).tolist() for key, figure in by_name.items()}
        found[camera]["count"] = [video.shape[1]]
    return found
