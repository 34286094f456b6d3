# SPDX-License-Identifier: Apache-2.0
"""Small data sets in the layouts of public ones: DROID in three forms, AgiBot-World, SO-100.

Columns, shapes, names and paths are those that the programs write which are named below; pictures show a spot that the
first two joints move.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from tests.data import lerobot_files

LENGTH = 72
REST = slice(20, 32)  # frames at which nothing moves
SUCCEEDED = (True, False)  # by turns
ARM = [f"joint_{k}" for k in range(7)]
JOINTS = ["shoulder_pan", "shoulder_lift", "elbow_flex", "wrist_flex", "wrist_roll", "gripper"]
Columns = dict[str, numpy.ndarray]


@dataclass(frozen=True)
class Layout:
    robot: str
    fps: int
    cameras: tuple[str, ...]
    columns: Callable[["Motion"], Columns]
    names: Mapping[str, Any]
    size: tuple[int, int] = (36, 64)
    has_videos: bool = True  # else its pictures are in the tables


@dataclass(frozen=True)
class Motion:
    """An episode: joint positions [F, n] in radians, the target of each, which is the next position, and velocities,
    that rest for a while; a gripper's target [F, 1] from 0 (open) to 1."""

    state: numpy.ndarray
    position: numpy.ndarray
    velocity: numpy.ndarray
    gripper: numpy.ndarray
    number: int

    @property
    def held(self) -> numpy.ndarray:
        """The gripper's state [F, 1], which follows its target by a row."""
        return numpy.concatenate([self.gripper[:1], self.gripper[:-1]])


def motion(number: int, width: int, fps: int, length: int = LENGTH) -> Motion:
    draws = numpy.random.default_rng(number)
    frames = numpy.arange(length)[:, None]
    drift, velocity = draws.normal(0, 0.5, (length, width)), numpy.zeros((length, width))
    for k in range(1, length):  # a hand that trembles
        velocity[k] = 0.8 * velocity[k - 1] + drift[k]
    velocity *= fps / 15
    velocity[REST] = 0
    position = draws.uniform(-0.3, 0.3, width) + numpy.cumsum(velocity, axis=0) / fps
    state = position - velocity / fps
    gripper = (frames > length // 2).astype(float)
    return Motion(state, position, velocity, gripper, number)


def lerobot_droid(m: Motion) -> Columns:
    """examples/port_datasets/port_droid.py, without its texts."""
    length, one = len(m.position), numpy.ones((len(m.position), 1))
    pose = m.position[:, :6]
    is_last = numpy.arange(length) == length - 1
    return {
        "is_first": numpy.arange(length) == 0,
        "is_last": is_last,
        "is_terminal": is_last,
        "observation.state.gripper_position": m.held,
        "observation.state.cartesian_position": m.state[:, :6],
        "observation.state.joint_position": m.state,
        "observation.state": numpy.concatenate([m.state, m.held], axis=1),
        "action.gripper_position": m.gripper,
        "action.gripper_velocity": 0 * one,
        "action.cartesian_position": pose,
        "action.cartesian_velocity": m.velocity[:, :6],
        "action.joint_position": m.position,
        "action.joint_velocity": m.velocity,
        "action.original": numpy.concatenate([pose, m.gripper], axis=1),
        "action": numpy.concatenate([m.position, m.gripper], axis=1),
        "discount": one,
        "reward": 0 * one,
        "is_episode_successful": numpy.full(length, SUCCEEDED[m.number % 2]),
    }


def cosmos3_droid(m: Motion) -> Columns:
    """nvidia/Cosmos3-DROID."""
    return {
        "observation.state.cartesian_position": m.state[:, :6],
        "observation.state.joint_positions": m.state,
        "observation.state.gripper_position": m.held,
        "action.joint_position": m.position,
        "action.gripper_position": m.gripper,
    }


def openpi_droid(m: Motion) -> Columns:
    """openpi, examples/droid/convert_droid_data_to_lerobot.py."""
    actions = numpy.concatenate([m.velocity, m.gripper], axis=1)
    return {"joint_position": m.state, "gripper_position": m.held, "actions": actions}


def agibot(m: Motion) -> Columns:
    """any4lerobot, agibot2lerobot; the robot has two arms of seven joints. A state's gripper is 0 to 120, a command's 0
    to 1, but a state where no command was sent."""

    def parts(rows: numpy.ndarray) -> Columns:
        return {"joint.position": rows, "head.position": rows[:, :2], "waist.position": rows[:, 2:4]}

    held, commands = 120 * m.held.repeat(2, axis=1), m.gripper.repeat(2, axis=1)
    commands[-10:] = held[-10:]
    states = {**parts(m.state), "effector.position": held, "robot.position": m.state[:, :3]}
    actions = {**parts(m.position), "effector.position": commands, "robot.velocity": m.velocity[:, :2]}
    kinds = {"observation.states.": states, "actions.": actions}
    return {f"{kind}{name}": values for kind, columns in kinds.items() for name, values in columns.items()}


def so100(unit: float) -> Callable[[Motion], Columns]:
    """lerobot-record; ``unit`` is the value of a radian. The gripper is 0 (closed) to 100."""

    def columns(m: Motion) -> Columns:
        target = numpy.concatenate([unit * m.position, 100 * (1 - m.gripper)], axis=1)
        return {"action": target, "observation.state": numpy.concatenate([unit * m.state, 100 * (1 - m.held)], axis=1)}

    return columns


_SO = {name: [f"{joint}.pos" for joint in JOINTS] for name in ("action", "observation.state")}
_IMAGES = "observation.images."
LAYOUTS = {
    "droid_lerobot": Layout(
        "Franka",
        15,
        tuple(f"{_IMAGES}{name}" for name in ("wrist_left", "exterior_1_left", "exterior_2_left")),
        lerobot_droid,
        {name: {"axes": [*ARM, "gripper"]} for name in ("action", "observation.state")},
    ),
    "droid_cosmos3": Layout(
        "droid",
        15,
        tuple(f"observation.image.{name}_left" for name in ("wrist_image", "exterior_image_1", "exterior_image_2")),
        cosmos3_droid,
        {},
    ),
    "droid_openpi": Layout(
        "panda",
        15,
        ("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left"),
        openpi_droid,
        {},
        has_videos=False,
    ),
    "agibot_world": Layout(
        "a2d", 30, tuple(f"{_IMAGES}{name}" for name in ("head", "hand_left", "hand_right")), agibot, {}, (48, 64)
    ),
    "so100_degrees": Layout("so100", 30, (f"{_IMAGES}front",), so100(180 / numpy.pi), _SO, (48, 64)),
    "so100_m100": Layout("so100_follower", 30, (f"{_IMAGES}front", f"{_IMAGES}wrist"), so100(20.0), _SO, (48, 64)),
}
WIDTHS = {"agibot_world": 14, "so100_degrees": 5, "so100_m100": 5}
TASKS = ("pick up the cube", "open the drawer")


def write_robot(folder: Path, name: str, version: str = "v2.1", *, episodes: int = 6, length: int = LENGTH) -> Path:
    """A data set of this layout; every second episode failed where it says so."""
    layout = LAYOUTS[name]
    motions = [motion(i, WIDTHS.get(name, 7), layout.fps, length) for i in range(episodes)]
    tables, films = [], []
    for m in motions:
        columns = {
            key: values if values.dtype == bool else values.astype(numpy.float32)
            for key, values in layout.columns(m).items()
        }
        tables.append({key: values[:, 0] if values.shape[1:] == (1,) else values for key, values in columns.items()})
        films.append({camera: pictures(m, layout.size, k) for k, camera in enumerate(layout.cameras)})
    features = {**_features(layout, tables[0]), **lerobot_files.COUNTERS}
    if not layout.has_videos:
        for table, film in zip(tables, films, strict=True):
            table |= {camera: lerobot_files.png(film.pop(camera)) for camera in layout.cameras}
    tasks = [TASKS[i % len(TASKS)] for i in range(episodes)]
    made = lerobot_files.Recordings(layout.robot, layout.fps, tasks, tables, films, features, layout.fps)
    if version.startswith("v2"):
        lerobot_files.write_v2(folder, version, made)
    else:
        lerobot_files.write_v3(folder, made, episodes)
    return folder


def _features(layout: Layout, table: Columns) -> dict[str, Any]:
    found: dict[str, Any] = {
        key: {"dtype": str(values.dtype), "shape": list(values.shape[1:]) or [1], "names": layout.names.get(key)}
        for key, values in table.items()
    }
    film = {
        "dtype": "video" if layout.has_videos else "image",
        "shape": [*layout.size, 3],
        "names": ["height", "width", "channels"],
        "info": {"video.fps": layout.fps, "video.codec": "av1"},
    }
    return found | dict.fromkeys(layout.cameras, film)


def pictures(m: Motion, size: tuple[int, int], camera: int) -> numpy.ndarray:
    """uint8 [F, H, W, 3]: a round spot on stripes that move with it, on another ground for each camera; its colour is
    another when the gripper is closed."""
    y, x = numpy.mgrid[: size[0], : size[1]] / size[0]
    video = numpy.empty((len(m.state), *size, 3))
    for k, (down, right) in enumerate(m.state[:, :2]):
        spot = numpy.exp(-(((y - 0.5 - down / 2) ** 2 + (x - 0.8 - right / 2) ** 2) / 0.02))[..., None]
        stripes = 40 * numpy.sin(12 * (x - right) + 9 * (y - down))[..., None]
        colour = numpy.array([230, 40, 40] if m.held[k] > 0.5 else [40, 230, 40])
        video[k] = (1 - spot) * (90 + 25 * camera + stripes) + spot * colour
    return video.round().astype(numpy.uint8)
