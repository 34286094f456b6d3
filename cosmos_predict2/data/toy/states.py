# SPDX-License-Identifier: Apache-2.0
"""Episodes of the toy world as states and actions on disk: a few kilobytes each, from which every frame can be drawn.

FOLDER/states-000000.npz    episodes 0, 1, ...: states [n, T + 1, 10], actions [n, T, d], captions and what else
FOLDER/states-000256.npz    is known of them; no pickles
"""

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy

from cosmos_predict2.toy_world.episodes import Episodes
from cosmos_predict2.toy_world.scene import STATE_SIZE
from imaginaire import foreign_json, storage
from imaginaire.errors import DataError

PATTERN = "states-*.npz"
_ROWS = ("states", "actions", "rewards", "success", "ever", "captions", "tasks", "drivers", "skill")
_SAME = ("size", "setting", "seed")  # in all files of a folder


def path_of(folder: Path, first: int) -> Path:
    """The file whose first episode has this number."""
    return folder / f"states-{first:06d}.npz"


def write_states(path: Path, episodes: Episodes, rows: slice, fps: float) -> None:
    """Write some of the episodes, complete or not at all."""
    arrays: dict[str, Any] = {name: numpy.asarray(getattr(episodes, name)[rows]) for name in _ROWS}
    about = {name: getattr(episodes, name) for name in _SAME}
    about |= {"first": episodes.first + (rows.start or 0), "fps": fps}
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_atomically(
        path, lambda file: numpy.savez_compressed(file, about=numpy.asarray(json.dumps(about)), **arrays)
    )


def read_states(folder: Path) -> tuple[Episodes, float]:
    """All episodes of a folder in order, and their frames per second."""
    paths = sorted(folder.glob(PATTERN)) if folder.is_dir() else []
    if not paths:
        raise DataError(
            f"{folder} holds no {PATTERN}; python -m scripts.make_toy_world --form states writes them to OUT/train."
        )
    parts = [_read(path) for path in paths]
    first = parts[0][1]
    for path, (_, about) in zip(paths, parts):
        if differing := [name for name in (*_SAME, "fps") if about[name] != first[name]]:
            name = differing[0]
            raise DataError(
                f"{path} has the {name} {about[name]}, but {paths[0]} {first[name]}: they are of two worlds."
            )
    if len({part["states"].shape[1] for part, _ in parts}) > 1:
        raise DataError(f"{folder} holds episodes of different lengths.")
    joined: dict[str, Any] = {name: numpy.concatenate([part[name] for part, _ in parts]) for name in _ROWS}
    for name in ("captions", "tasks", "drivers"):
        joined[name] = joined[name].tolist()
    return Episodes(**joined, **{name: first[name] for name in (*_SAME, "first")}), float(first["fps"])


def action_width(folder: Path) -> int:
    """Numbers of an action in a folder's episodes, by its first file."""
    path = next(iter(sorted(folder.glob(PATTERN))), path_of(folder, 0))
    return int(_read(path)[0]["actions"].shape[2])


def _read(path: Path) -> tuple[dict[str, numpy.ndarray], dict[str, Any]]:
    try:
        with numpy.load(path, allow_pickle=False) as content:
            arrays = {name: content[name] for name in _ROWS}
            about = foreign_json.loads(str(content["about"]))
            about = {name: about[name] for name in (*_SAME, "first", "fps")}
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is not a file of the toy world's states, or is damaged: {error}") from error
    if bad := [name for name, array in arrays.items() if array.dtype.kind == "f" and not numpy.isfinite(array).all()]:
        raise DataError(f"{path}: {bad[0]} hold NaN or infinite numbers. Write the data set again.")
    states, actions = arrays["states"], arrays["actions"]
    count = {len(array) for array in arrays.values()}
    if len(count) > 1 or states.ndim != 3 or states.shape[2] != STATE_SIZE or actions.shape[1] != states.shape[1] - 1:
        raise DataError(f"{path} has states {list(states.shape)} and actions {list(actions.shape)}, which do not fit.")
    return arrays, about
