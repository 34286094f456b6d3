# SPDX-License-Identifier: Apache-2.0
"""Reset states as others publish them: `.npy` files that hold an object array of dictionaries, one for each frame.

Such an array is a pickle, which is read as plain data here: no code of the file is run. An item has ``image`` (uint8
[H, W, 3]), ``instruction`` or ``task``, ``delta_action`` or ``abs_action``, and perhaps ``init_ee_pose``.
"""

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
from numpy.lib import format as npy
from numpy.typing import NDArray

from cosmos_predict2.rl.envs.starts import RecordedStart
from imaginaire.checkpoint import plain_arrays
from imaginaire.checkpoint.plain_pickle import Refused
from imaginaire.errors import DataError

KEYFRAME_MARK = "_kir"  # in the name of a file whose episode begins in the middle of a recording
NUM_LAST = 4  # pictures before the moment, and actions


def read_published(path: Path) -> RecordedStart:
    """The start that a file stands for: its first frame, or of a keyframe file the first and the last four."""
    try:
        items = _items(path.read_bytes())
    except (OSError, ValueError, TypeError, LookupError, RecursionError, Refused) as error:
        raise DataError(
            f"{path} is no published reset state (an array of dictionaries), or is damaged: {error}"
        ) from error
    is_keyframe = KEYFRAME_MARK in path.stem
    if is_keyframe and len(items) < NUM_LAST + 1:
        raise DataError(f"{path} has {len(items)} frames: a keyframe start needs the first one and {NUM_LAST} last.")
    chosen = [items[0], *items[-NUM_LAST:]] if is_keyframe else items[:1]
    pictures = [_picture(path, i, item) for i, item in enumerate(chosen)]
    if len({picture.shape for picture in pictures}) > 1:
        raise DataError(f"{path}: its pictures have different sizes, {sorted({p.shape for p in pictures})}.")
    actions = [_numbers(item, "delta_action", "abs_action") for item in chosen]
    first = actions[0]
    if is_keyframe and any(row is None or first is None or row.shape != first.shape for row in actions):
        raise DataError(f"{path}: each frame of a keyframe start needs delta_action or abs_action, all of one size.")
    between: NDArray[numpy.float32] | None
    if is_keyframe:
        between = numpy.stack([row for row in actions[1:] if row is not None])
    else:
        between = None if first is None else numpy.empty((0, first.size), dtype=numpy.float32)
    pose = _numbers(items[0], "init_ee_pose", "abs_action")
    context = {} if pose is None else {"init_ee_pose": pose}
    return RecordedStart(path.stem, _task(path, items[0]), numpy.stack(pictures), between, context)


def _picture(path: Path, number: int, item: Mapping[str, Any]) -> NDArray[numpy.uint8]:
    picture = item.get("image")
    if not isinstance(picture, numpy.ndarray) or picture.dtype != numpy.uint8 or picture.shape[2:] != (3,):
        found = f"{picture.dtype} {list(picture.shape)}" if isinstance(picture, numpy.ndarray) else repr(picture)[:40]
        raise DataError(f"{path}: image of frame {number} is {found}; uint8 [H, W, 3] is expected.")
    return picture


def _task(path: Path, item: Mapping[str, Any]) -> str:
    for key in ("instruction", "task"):
        value = item.get(key)
        if isinstance(value, numpy.ndarray) and value.ndim == 0:
            value = value.item()
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if isinstance(value, str):
            return value
    raise DataError(f"{path}: its frames have neither instruction nor task, which name what is to be done.")


def _numbers(item: Mapping[str, Any], *keys: str) -> NDArray[numpy.float32] | None:
    value = next((item[key] for key in keys if item.get(key) is not None), None)
    if value is None:
        return None
    array = numpy.asarray(value)
    return array.reshape(-1).astype(numpy.float32) if array.dtype.kind in "biuf" else None


# --- the file


def _items(content: bytes) -> list[Mapping[str, Any]]:
    """The dictionaries of a file, in order."""
    file = io.BytesIO(content)
    version = npy.read_magic(file)
    readers: dict[Any, Any] = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"version {version} of .npy is not known")
    shape, _, dtype = readers[version](file, max_header_size=10_000)
    if dtype.kind != "O":
        raise ValueError(f"its array is of {dtype}, not of objects")
    tree = plain_arrays.read(content[file.tell() :])
    items = tree if isinstance(tree, list) else [tree]
    if len(items) != math.prod(shape) or not items or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"its array of shape {list(shape)} does not hold dictionaries")
    return items
