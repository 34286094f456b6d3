# SPDX-License-Identifier: Apache-2.0
"""The metadata of a LeRobot data set: ``meta/info.json``, its splits, and names for parts of its columns.

GR00T data sets have ``meta/modality.json``:
{"state": {"left_arm": {"start": 0, "end": 7}, ...}, "action": {"left_arm": {"start": 0, "end": 7}, ...},
 "video": {"ego_view": {"original_key": "observation.images.ego_view"}},
 "annotation": {"human.action.task_description": {}}}
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from imaginaire import foreign_json
from imaginaire.errors import ConfigError, DataError, listed, near, raised_as

log = logging.getLogger(__name__)

VERSIONS = ("v2.0", "v2.1", "v3.0")
SPLITS = ("train", "val", "test", "full")
VAL_FRACTION = 0.1
# Parts of the action, in order, with their widths: what action-conditioned weights of a robot are trained with.
EMBODIMENTS: dict[str, dict[str, int]] = {
    "gr1": {"left_arm": 7, "left_hand": 6, "right_arm": 7, "right_hand": 6, "waist": 3}
}
STATE = "observation.state"
COUNTERS = {"timestamp": "float32", **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64")}
_COLUMNS = {"state": STATE, "action": "action"}
_SYNONYMS = {"val": ("val", "validation", "test", "eval"), "test": ("test", "eval", "val", "validation")}


@dataclass(frozen=True)
class Info:
    """The parts of ``info.json`` that reading needs."""

    root: Path
    version: str
    fps: float
    features: Mapping[str, Mapping[str, Any]]
    splits: Mapping[str, str]
    data_path: str
    video_path: str | None
    chunks_size: int
    total_episodes: int | None  # where it is recorded
    robot: str
    modality: "PartNames"

    @property
    def cameras(self) -> list[str]:
        """Keys of what is pictures, as videos or in the tables."""
        return [key for key, feature in self.features.items() if feature.get("dtype") in ("video", "image")]

    def is_video(self, camera: str) -> bool:
        return self.features[camera].get("dtype") == "video"

    def video_fps(self, camera: str) -> float:
        """Frames per second of a camera's files, which mostly is the rate of the data set."""
        feature = self.features[camera]
        for key in ("info", "video_info"):
            described = feature.get(key)
            if isinstance(described, Mapping) and described.get("video.fps"):
                return float(described["video.fps"])
        return self.fps


def read_info(root: Path) -> Info:
    """The data set at ``root``; the error for another folder names data sets below it."""
    path = root / "meta" / "info.json"
    if not path.is_file():
        where = sets_below(root) if root.is_dir() else " The folder does not exist."
        raise DataError(f"{root} is not a LeRobot data set: it has no meta/info.json.{where}")
    content = read_json(path)
    version = str(content.get("codebase_version", ""))
    if not version.startswith("v"):
        version = f"v{version}"
    if version not in VERSIONS:
        raise DataError(
            f"{path}: codebase_version is '{content.get('codebase_version')}'; {', '.join(VERSIONS)} can be read."
            " The lerobot package has scripts that convert older data sets."
        )
    features = content.get("features")
    if not isinstance(features, dict) or not all(isinstance(feature, dict) for feature in features.values()):
        raise DataError(f"{path}: 'features' is not a table of what the episodes hold.")
    fps = content.get("fps")
    if not isinstance(fps, int | float) or isinstance(fps, bool) or not fps > 0:
        raise DataError(f"{path}: fps is {fps!r}; it must be a positive number.")
    data_path = content.get("data_path")
    if not isinstance(data_path, str) or not data_path:
        raise DataError(f"{path}: 'data_path' is missing.")
    splits, total, chunk = content.get("splits"), content.get("total_episodes"), content.get("chunks_size") or 1000
    if not isinstance(chunk, int) or chunk < 1:
        raise DataError(f"{path}: chunks_size is {chunk!r}; it must be a whole number of 1 or more.")
    return Info(
        root=root,
        version=version,
        fps=float(fps),
        features=features,
        splits={str(k): str(v) for k, v in splits.items()} if isinstance(splits, dict) else {},
        data_path=data_path,
        video_path=str(content.get("video_path") or "") or None,
        chunks_size=chunk,
        total_episodes=total if isinstance(total, int) else None,
        robot=str(content.get("robot_type") or ""),
        modality=read_modality(root, features),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds."""
    with raised_as(DataError, f"{path} cannot be read", OSError, ValueError):
        return foreign_json.load_object(path)


def choose_episodes(
    splits: Mapping[str, str], num_episodes: int, split: str, val_fraction: float = VAL_FRACTION
) -> NDArray[numpy.int64]:
    """Places of the episodes of a split, ascending: ``full`` is all of them.

    Where the data set itself names several splits, these count (val and test stand in for one another). Most name only
    one: then ``val_fraction`` of the episodes, spread evenly over all, are both val and test, and the rest is train.
    """
    if split not in SPLITS:
        raise ConfigError(f"data_split is '{split}'.{near(str(split), SPLITS)}")
    if not 0 <= val_fraction < 1:
        raise ConfigError(f"val_fraction={val_fraction}; it is a share from 0 to below 1.")
    everything = numpy.arange(num_episodes)
    if split == "full":
        return everything
    if len(splits) > 1:
        names = _SYNONYMS.get(split, (split,))
        name = next((name for name in names if name in splits), None)
        if name is None:
            raise ConfigError(f"The data set has no split '{split}'; it has {', '.join(splits)}. Or take 'full'.")
        if name != split:
            log.info("the data set has no split '%s'; its '%s' is used", split, name)
        first, last = _range(splits[name])
        return everything[first:last]
    is_val = held_out(num_episodes, val_fraction)
    return everything[~is_val] if split == "train" else everything[is_val]


def held_out(count: int, fraction: float) -> NDArray[numpy.bool_]:
    """True for the held-out ones of ``count``: this share, evenly spread, at least one unless ``fraction`` is 0."""
    if fraction == 0 or count < 2:
        return numpy.zeros(count, dtype=bool)
    num = min(count - 1, max(1, round(count * fraction)))
    chosen = numpy.zeros(count, dtype=bool)
    chosen[((2 * numpy.arange(num) + 1) * count) // (2 * num)] = True
    return chosen


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return int(first or 0), int(last)
    except ValueError as error:
        raise DataError(f"meta/info.json: the split '{text}' is not of the form '0:50'.") from error


def sets_below(root: Path) -> str:
    """A sentence that names the data sets below a folder that is none; empty where there are none."""
    found = sorted({path.parent.parent for pattern in ("*", "*/*") for path in root.glob(f"{pattern}/meta/info.json")})
    names = listed([str(path) for path in found], 3)
    return f" LeRobot data sets below it, of which it takes one: {names}." if found else ""


# ---- modality.json ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """Numbers ``start`` ... ``end - 1`` of a column; all of them where ``end`` is None."""

    column: str
    start: int = 0
    end: int | None = None
    absolute: bool | None = None  # targets (True) or moves (False), where modality.json has it


@dataclass(frozen=True)
class PartNames:
    """The names that a data set gives to parts of its columns."""

    state: Mapping[str, Part]
    action: Mapping[str, Part]
    video: Mapping[str, str]
    annotation: Mapping[str, str]

    def is_absolute(self, column: str, place: int) -> bool | None:
        """True if a number of an action's column is a target, False if it is a move, None if that is unknown."""
        parts = [part for part in self.action.values() if part.column == column and part.absolute is not None]
        return next((part.absolute for part in parts if part.start <= place < (part.end or 0)), None)


def read_modality(root: Path, features: Mapping[str, Mapping[str, Any]]) -> PartNames:
    """The content of modality.json about these columns; empty without one."""
    path = root / "meta" / "modality.json"
    content = read_json(path) if path.is_file() else {}
    return PartNames(
        state=_parts(content, "state", path, features),
        action=_parts(content, "action", path, features),
        video={name: str(entry.get("original_key", name)) for name, entry in _entries(content, "video", path)},
        annotation={
            name: str(entry.get("original_key") or f"annotation.{name}")
            for name, entry in _entries(content, "annotation", path)
        },
    )


def _parts(
    content: Mapping[str, Any], kind: str, path: Path, features: Mapping[str, Mapping[str, Any]]
) -> dict[str, Part]:
    parts = {}
    for name, entry in _entries(content, kind, path):
        start, end = entry.get("start"), entry.get("end")
        if not (type(start) is type(end) is int and 0 <= start < end):
            raise DataError(f"{path}: {kind}.{name} goes from {start} to {end}; two ascending numbers are needed.")
        absolute, column = entry.get("absolute"), str(entry.get("original_key") or _COLUMNS[kind])
        shape = features.get(column, {}).get("shape")
        if isinstance(shape, list) and len(shape) == 1 and isinstance(shape[0], int) and end > shape[0]:
            raise DataError(
                f"{path}: {kind}.{name} goes from {start} to {end}, but '{column}' has {shape[0]} numbers"
                " (meta/info.json). Mend or remove the entry."
            )
        parts[name] = Part(column, start, end, absolute if isinstance(absolute, bool) else None)
    return parts


def _entries(content: Mapping[str, Any], kind: str, path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    entries = content.get(kind) or {}
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise DataError(f"{path}: '{kind}' is not a table of names.")
    return list(entries.items())
