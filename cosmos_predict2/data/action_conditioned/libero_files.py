# SPDX-License-Identifier: Apache-2.0
"""Demonstrations of the LIBERO benchmark as it publishes them, in HDF5 files.

    ROOT/<suite>/<task>_demo.hdf5
        data/demo_<k>/actions                  [T, 7] in [-1, 1]: moves, turns, gripper (-1 opens, 1 closes)
        data/demo_<k>/obs/<camera>             uint8 [T, H, W, 3], upside down
        data/demo_<k>/obs/{ee_pos, ee_ori, gripper_states}    [T, 3] metres, [T, 3] axis-angle, [T, 2] finger positions

actions[t] leads from obs[t] to obs[t + 1]. The pictures are turned by 180 degrees against those that policies see.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from cosmos_predict2.actions.rotations import Floats, axis_angle_to_matrix, matrix_to_euler
from imaginaire.errors import DataError, missing_package, near

SUFFIX = "_demo.hdf5"
FPS = 20.0  # of the simulation's control loop
OPEN_FINGERS = 0.08  # metres between the fingers of the open gripper

_SCENE = re.compile(r"^[A-Z_]+_SCENE\d+_")  # names of the long suites begin with where it happens


@dataclass(frozen=True, slots=True)
class Demo:
    """One demonstration: where it is, and how long."""

    suite: str
    file: Path
    name: str  # demo_<k>
    length: int

    @property
    def task(self) -> str:
        return self.file.name.removesuffix(SUFFIX)

    @property
    def caption(self) -> str:
        return caption(self.task)

    @property
    def number(self) -> int:
        return int(self.name.rpartition("_")[2])


def caption(task: str) -> str:
    """The sentence that a task's name spells."""
    return _SCENE.sub("", task).replace("_", " ")


def find_suites(root: Path, suites: Sequence[str] | None = None) -> list[Path]:
    """The folders with task files below ``root``: those named, or all there are."""
    if not root.is_dir():
        raise DataError(f"The LIBERO folder {root} does not exist.")
    present = sorted(path.name for path in root.iterdir() if path.is_dir() and any(path.glob(f"*{SUFFIX}")))
    if suites is not None:
        for suite in suites:
            if suite not in present:
                raise DataError(f"{root} has no suite '{suite}' with *{SUFFIX} files.{near(suite, present)}")
        return [root / suite for suite in suites]
    if not present:
        raise DataError(f"{root} has no folder with *{SUFFIX} files; the suites of LIBERO lie in one each.")
    return [root / suite for suite in present]


def list_demos(file: Path) -> list[Demo]:
    """The demonstrations of a task's file, by number."""
    with opened(file) as content:
        groups = content.get("data")
        names = [name for name in groups if re.fullmatch(r"demo_\d+", name)] if hasattr(groups, "keys") else []
        if not names:
            raise DataError(f"{file} has no data/demo_<k>; it has {', '.join(content) or 'nothing'}.")
        names.sort(key=lambda name: int(name.rpartition("_")[2]))
        lengths = [len(_table(groups[name], "actions", file, name)) for name in names]
    return [Demo(file.parent.name, file, name, length) for name, length in zip(names, lengths)]


def read_actions(demo: Demo) -> Floats:
    """[T, d] as recorded."""
    with opened(demo.file) as content:
        group = content["data"][demo.name]
        actions = numpy.asarray(_table(group, "actions", demo.file, demo.name), dtype=numpy.float64)
    if actions.ndim != 2 or not numpy.isfinite(actions).all():
        raise DataError(
            f"{demo.file}: {demo.name}/actions, {list(actions.shape)}, is not rows [T, d] of finite numbers."
        )
    return actions


def read_pictures(demo: Demo, camera: str, frames: slice, *, rotate: bool) -> numpy.ndarray:
    """uint8 [F, H, W, 3]; ``rotate`` turns them by 180 degrees, as policies see them."""
    with opened(demo.file) as content:
        pictures = _table(content["data"][demo.name], f"obs/{camera}", demo.file, demo.name)
        if pictures.ndim != 4 or pictures.shape[-1] != 3 or pictures.dtype != numpy.uint8:
            raise DataError(
                f"{demo.file}: {demo.name}/obs/{camera} is {pictures.dtype} {list(pictures.shape)}; pictures are uint8"
                " [T, H, W, 3]."
            )
        if len(pictures) != demo.length:
            raise DataError(
                f"{demo.file}: {demo.name} has {demo.length} actions, but {len(pictures)} pictures of {camera}."
            )
        found = pictures[frames]
    return found[:, ::-1, ::-1] if rotate else found


def read_poses(demo: Demo) -> tuple[Floats, Floats]:
    """The gripper's poses [T, 6] (x, y, z, roll, pitch, yaw), and how far it is closed [T], 0 to 1."""
    with opened(demo.file) as content:
        group = content["data"][demo.name]
        position, turn, fingers = (
            numpy.asarray(_table(group, f"obs/{key}", demo.file, demo.name), dtype=numpy.float64)
            for key in ("ee_pos", "ee_ori", "gripper_states")
        )
    if not (position.shape == turn.shape == (demo.length, 3) and fingers.shape == (demo.length, 2)):
        raise DataError(
            f"{demo.file}: {demo.name} has ee_pos {list(position.shape)}, ee_ori {list(turn.shape)} and gripper_states"
            f" {list(fingers.shape)}; for {demo.length} actions they are [T, 3], [T, 3] and [T, 2]."
        )
    if not all(numpy.isfinite(table).all() for table in (position, turn, fingers)):
        raise DataError(f"{demo.file}: {demo.name} has ee_pos, ee_ori or gripper_states that are not finite.")
    angles = matrix_to_euler(axis_angle_to_matrix(turn))
    closed = 1 - numpy.abs(fingers[:, 0] - fingers[:, 1]) / OPEN_FINGERS
    return numpy.concatenate([position, angles], axis=1), numpy.clip(closed, 0.0, 1.0)


def is_success(demo: Demo) -> bool:
    """True if a reward was given, at its end or before: in every demonstration, but not in every try of a policy."""
    with opened(demo.file) as content:
        rewards = numpy.asarray(_table(content["data"][demo.name], "rewards", demo.file, demo.name))
    return bool((rewards > 0).any())


def read_proprio(demo: Demo) -> Floats:
    """[T, 8] as policies see the robot: position, axis-angle turn, positions of the two fingers."""
    with opened(demo.file) as content:
        group = content["data"][demo.name]
        columns = [
            numpy.asarray(_table(group, f"obs/{key}", demo.file, demo.name), dtype=numpy.float64)
            for key in ("ee_pos", "ee_ori", "gripper_states")
        ]
    return numpy.concatenate(columns, axis=1)


def is_validation(number: int, val_every: int) -> bool:
    """True if a task's demonstration of this number is for validation: the last of every ``val_every``; none for 0."""
    return val_every > 0 and number % val_every == val_every - 1


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The HDF5 file, open for reading. Opened anew each time: a forked worker must not share a handle."""
    try:
        import h5py
    except ImportError as error:
        raise missing_package("h5py", "data") from error
    try:
        with h5py.File(file, "r", locking=False) as content:
            yield content
    except (OSError, KeyError, RuntimeError) as error:
        raise DataError(f"{file} is not an HDF5 file that can be read: {error}") from error


def _table(group: Any, key: str, file: Path, name: str) -> Any:
    if key not in group:
        folder, _, last = key.rpartition("/")
        parent = group[folder] if folder and folder in group else group
        names = list(parent) if hasattr(parent, "keys") else []
        raise DataError(f"{file}: {name} has no '{key}'.{near(last, names)}")
    table = group[key]
    if not getattr(table, "shape", None) or table.dtype.kind not in "biuf":
        raise DataError(f"{file}: {name}/{key} is no array of numbers.")
    return table
