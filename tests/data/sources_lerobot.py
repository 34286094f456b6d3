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
    from cosmos_predict2.data.lerobot.writer import write_lines, write_table

    for episode in range(len(LENGTHS)):
        write_table(folder / f"data/chunk-000/episode_{episode:06d}.parquet", table(folder, episode))
        pictures = front(episode)
        is_slower = front_fps < FPS
        video = pictures[:: FPS // front_fps] if is_slower else numpy.repeat(pictures, front_fps // FPS, axis=0)
        write_front(folder / f"videos/chunk-000/{FRONT}/episode_{episode:06d}.mp4", video, front_fps)
    write_info(
        folder,
        version,
        data_path="data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        video_path="videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
        front_fps=front_fps,
    )
    meta = folder / "meta"
    write_lines(meta / "tasks.jsonl", [{"task_index": k, "task": task} for k, task in enumerate(distinct_tasks())])
    write_lines(
        meta / "episodes.jsonl",
        [{"episode_index": k, "tasks": [TASKS[k]], "length": length} for k, length in enumerate(LENGTHS)],
    )
    if version == "v2.0":
        write_json(meta / "stats.json", {})
    else:
        write_lines(meta / "episodes_stats.jsonl", [{"episode_index": k, "stats": {}} for k in range(len(LENGTHS))])
    if modality:
        write_json(meta / "modality.json", MODALITY)
    return folder


def write_v3(folder: Path, *, episodes_per_file: int = 2) -> Path:
    """Tables of one row group and videos that are encoded in one piece, with several episodes in each."""
    from cosmos_predict2.data.lerobot.writer import write_table

    index: dict[str, list[Any]] = {}
    for file, first in enumerate(range(0, len(LENGTHS), episodes_per_file)):
        group = range(first, min(first + episodes_per_file, len(LENGTHS)))
        tables = [table(folder, episode) for episode in group]
        columns = {
            name: [value for part in tables for value in part[name]]
            if isinstance(tables[0][name], list)
            else numpy.concatenate([part[name] for part in tables])
            for name in tables[0]
        }
        write_table(folder / f"data/chunk-000/file-{file:03d}.parquet", columns)
        video = numpy.concatenate([front(episode) for episode in group])
        write_front(folder / f"videos/{FRONT}/chunk-000/file-{file:03d}.mp4", video, FPS)
        seconds = 0.0
        for episode in group:
            before = sum(LENGTHS[:episode])
            row: dict[str, Any] = {
                "episode_index": episode,
                "tasks": [TASKS[episode]],
                "length": LENGTHS[episode],
                "dataset_from_index": before,
                "dataset_to_index": before + LENGTHS[episode],
                f"videos/{FRONT}/from_timestamp": seconds,
                f"videos/{FRONT}/to_timestamp": seconds + LENGTHS[episode] / FPS,
            }
            for what in ("data", f"videos/{FRONT}"):
                row |= {f"{what}/chunk_index": 0, f"{what}/file_index": file}
            seconds += LENGTHS[episode] / FPS
            for name, value in row.items():
                index.setdefault(name, []).append(value)
    write_table(folder / "meta/episodes/chunk-000/file-000.parquet", index)
    tasks = distinct_tasks()
    write_table(folder / "meta/tasks.parquet", {"task_index": list(range(len(tasks))), "__index_level_0__": tasks})
    write_info(
        folder,
        "v3.0",
        data_path="data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        video_path="videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    )
    return folder


def distinct_tasks() -> list[str]:
    return list(dict.fromkeys(TASKS))


def table(folder: Path, episode: int) -> dict[str, Any]:
    """The columns of an episode's table."""
    import io

    from PIL import Image

    length = LENGTHS[episode]
    pictures = []
    for k, picture in enumerate(wrist(episode)):
        content = io.BytesIO()
        Image.fromarray(picture).save(content, "PNG")
        pictures.append({"bytes": content.getvalue(), "path": f"frame-{k:06d}.png"})
    frames = numpy.arange(length)
    return {
        "observation.state": state(episode),
        "action": action(episode),
        WRIST: pictures,
        "timestamp": (frames / FPS).astype(numpy.float32),
        "frame_index": frames,
        "episode_index": numpy.full(length, episode),
        "index": frames + sum(LENGTHS[:episode]),
        "task_index": numpy.full(length, distinct_tasks().index(TASKS[episode])),
        "annotation.human.validity": numpy.full(length, 1),
    }


def write_front(path: Path, frames: numpy.ndarray, fps: int) -> None:
    import torch

    from cosmos_predict2.data.video.media import write_video

    write_video(path, torch.from_numpy(frames).permute(3, 0, 1, 2), fps)


def write_info(folder: Path, version: str, *, front_fps: int = FPS, **paths: str) -> None:
    counters = {
        "timestamp": "float32",
        **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), "int64"),
    }
    features = {key: {**feature, "shape": list(feature["shape"])} for key, feature in FEATURES.items()}
    features[FRONT]["info"] = {"video.fps": front_fps, "video.codec": "h264"}
    features |= {name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in counters.items()}
    features["annotation.human.validity"] = {"dtype": "int64", "shape": [1], "names": None}
    write_json(
        folder / "meta" / "info.json",
        {
            "codebase_version": version,
            "robot_type": "toy",
            "total_episodes": len(LENGTHS),
            "total_frames": sum(LENGTHS),
            "chunks_size": 1000,
            "fps": FPS,
            "splits": {"train": f"0:{len(LENGTHS)}"},
            "features": features,
            **paths,
        },
    )
