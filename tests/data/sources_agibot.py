# SPDX-License-Identifier: Apache-2.0
"""A miniature of AgiBotWorld-Alpha: the folders, archives and descriptions of one task."""

import io
import json
import tarfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from cosmos_predict2.data.video.media import write_video

CAMERA = "head_center_fisheye_color"
CAMERAS = (CAMERA, "head_color", "hand_left_color")
EPISODES = ("648642", "685393")
FPS = 30


def episode_frames(num_frames: int, height: int = 16, width: int = 32, seed: int = 0) -> torch.Tensor:
    """uint8 [3, F, H, W]: flat frames whose grey is their number, so that a shift by one frame shows."""
    grey = (torch.arange(num_frames) * 37 + 11 * seed) % 200 + 20
    return grey.to(torch.uint8)[None, :, None, None].expand(3, -1, height, width).contiguous()


@cache
def video_bytes(num_frames: int, seed: int = 0, fps: float = FPS) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        write_video(path, episode_frames(num_frames, seed=seed), fps)
        return path.read_bytes()


def episode_files(
    episodes: tuple[str, ...] = EPISODES, cameras: tuple[str, ...] = CAMERAS, seconds: float = 2.0
) -> dict[str, bytes]:
    """The files of episodes by their path below ``observations/<task>``."""
    files: dict[str, bytes] = {}
    for i, episode in enumerate(episodes):
        for camera in cameras:
            files[f"{episode}/videos/{camera}.mp4"] = video_bytes(round(seconds * FPS), seed=i)
        files[f"{episode}/depth/head_depth_000000.png"] = b"depth" * 100
        files[f"{episode}/tactile/deep/er.bin"] = b"touch"
    return files


def task_info(episodes: tuple[str, ...] = EPISODES, label: str = "label_info") -> bytes:
    entries = [
        {
            "episode_id": int(episode),
            "task_id": 327,
            "task_name": "Pickup items in the supermarket",
            "init_scene_text": f"The robot of {episode} is in front of a shelf",
            label: {
                "action_config": [
                    {"start_frame": 0, "end_frame": 20, "action_text": "It takes a mushroom.", "skill": "Pick"},
                    {"start_frame": 20, "end_frame": 60, "action_text": "It places the mushroom", "skill": "Place"},
                ]
            },
        }
        for episode in episodes
    ]
    return json.dumps(entries).encode()


def archive(
    files: Mapping[str, bytes], *more: tarfile.TarInfo, mode: Any = "w", form: int = tarfile.USTAR_FORMAT
) -> bytes:
    """A tar of files that claim to be another user's programs, and of further members."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode, format=form) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o4777
            tar.addfile(member, io.BytesIO(data))
        for member in more:
            tar.addfile(member)
    return packed.getvalue()


def repository(task: str = "327") -> dict[str, bytes]:
    """The files of a repository: one archive for each episode, and the task's description."""
    files = {f"observations/{task}/{episode}-{episode}.tar": archive(episode_files((episode,))) for episode in EPISODES}
    other = {"observations/328/1-2.tar": b"of another task", "README.md": b"read"}
    return {**files, f"task_info/task_{task}.json": task_info(), **other}


def write_tree(folder: Path, files: dict[str, bytes] | None = None, info: bytes | None = None) -> Path:
    """``<folder>/agibot`` as an unpacked task; gives the data folder."""
    data_dir = folder / "agibot"
    for name, data in (episode_files() if files is None else files).items():
        path = data_dir / "observations" / "327" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (data_dir / "task_info").mkdir(parents=True, exist_ok=True)
    (data_dir / "task_info" / "task_327.json").write_bytes(task_info() if info is None else info)
    return data_dir
