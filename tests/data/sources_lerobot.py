# SPDX-License-Identifier: Apache-2.0
"""Three small recordings whose every number and picture follows from a formula, in all versions of the LeRobot format.

The formulas need NumPy alone: they are also imported by what writes the fixtures with the lerobot package.
"""

import json
from pathlib import Path
from typing import Any

import numpy

FPS = 10
LENGTHS = (7, 5, 9)
TASKS = ("push the puck", "open the drawer", "push the puck")
FRONT = "observation.images.front"  # a video
WRIST = "observation.images.wrist"  # pictures in the tables
FEATURES: dict[str, dict[str, Any]] = {
    "observation.state": {"dtype": "float32", "shape": (4,), "names": ["x", "y", "z", "grip"]},
    "action": {"dtype": "float32", "shape": (3,), "names": ["dx", "dy", "grip"]},
    FRONT: {"dtype": "video", "shape": (64, 64, 3), "names": ["height", "width", "channels"]},
    WRIST: {"dtype": "image", "shape": (16, 24, 3), "names": ["height", "width", "channels"]},
}


def grey(episode: int, frame: int) -> int:
    """The brightness of a frame of the front camera: it identifies the frame, also after compression."""
    return 20 + 10 * (sum(LENGTHS[:episode]) + frame)


def front(episode: int) -> numpy.ndarray:
    """uint8 [F, 64, 64, 3]."""
    greys = [grey(episode, frame) for frame in range(LENGTHS[episode])]
    return numpy.broadcast_to(numpy.array(greys, numpy.uint8)[:, None, None, None], (len(greys), 64, 64, 3)).copy()


def wrist(episode: int) -> numpy.ndarray:
    """uint8 [F, 16, 24, 3]: pictures that are kept without loss."""
    generator = numpy.random.default_rng(episode)
    return generator.integers(0, 256, (LENGTHS[episode], 16, 24, 3), dtype=numpy.uint8)


def state(episode: int) -> numpy.ndarray:
    """float32 [F, 4]."""
    frames = numpy.arange(LENGTHS[episode])[:, None]
    return (0.1 * frames + numpy.arange(4) + 10 * episode).astype(numpy.float32)


def action(episode: int) -> numpy.ndarray:
    """float32 [F, 3]."""
    frames = numpy.arange(LENGTHS[episode])[:, None]
    return (numpy.sin(frames + numpy.arange(3)) / (1 + episode)).astype(numpy.float32)


MODALITY = {
    "state": {"position": {"start": 0, "end": 3}, "grip": {"start": 3, "end": 4}},
    "action": {"move": {"start": 0, "end": 2}, "grip": {"start": 2, "end": 3}},
    "video": {"ego_view": {"original_key": FRONT}},
    "annotation": {"human.validity": {}, "human.action.task_description": {"original_key": "task_index"}},
}


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))


def change_json(path: Path, **changes: Any) -> None:
    write_json(path, {**json.loads(path.read_text()), **changes})


# ---- the same recordings, written here -------------------------------------------------------------------------------


def write_v2(folder: Path, version: str = "v2.1", *, modality: bool = False, front_fps: int = FPS) -> Path:
    """A table and a video per episode; the front camera is also there as a video of another rate."""
    from tests.data import lerobot_files

    lerobot_files.write_v2(folder, version, _recordings(front_fps))
    if modality:
        write_json(folder / "meta" / "modality.json", MODALITY)
    return folder


def write_v3(folder: Path, *, episodes_per_file: int = 2) -> Path:
    """Tables of one row group and videos that are encoded in one piece, with several episodes in each."""
    from tests.data import lerobot_files

    lerobot_files.write_v3(folder, _recordings(), episodes_per_file)
    return folder


def _recordings(front_fps: int = FPS) -> Any:
    from tests.data.lerobot_files import COUNTERS, Recordings

    def film(episode: int) -> numpy.ndarray:
        return front(episode)[:: FPS // front_fps] if front_fps < FPS else front(episode).repeat(front_fps // FPS, 0)

    one = {"dtype": "int64", "shape": [1], "names": None}
    features: dict[str, Any] = {**FEATURES, **COUNTERS, "annotation.human.validity": one}
    features[FRONT] = {**FEATURES[FRONT], "info": {"video.fps": front_fps, "video.codec": "h264"}}
    episodes = range(len(LENGTHS))
    tables, films = [_columns(i) for i in episodes], [{FRONT: film(i)} for i in episodes]
    return Recordings("toy", FPS, TASKS, tables, films, features, front_fps)


def _columns(episode: int) -> dict[str, Any]:
    from tests.data.lerobot_files import png

    return {
        "observation.state": state(episode),
        "action": action(episode),
        WRIST: png(wrist(episode)),
        "annotation.human.validity": numpy.full(LENGTHS[episode], 1),
    }


def table(episode: int) -> dict[str, Any]:
    """The columns of an episode's table."""
    return {**_columns(episode), **_recordings().counters(episode)}
