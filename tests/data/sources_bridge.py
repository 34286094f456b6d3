# SPDX-License-Identifier: Apache-2.0
"""A miniature Bridge data set in its public layout, and the archive it comes in."""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy
import torch

from cosmos_predict2.data.video.media import write_video

FOLDER_IN_ARCHIVE = "opensource_robotdata/bridge"


def frame_value(episode: int, frame: int) -> int:
    """The grey of a frame: it identifies the frame, also after compression."""
    return 10 + 40 * (episode % 3) + 4 * frame


def bridge_tree(
    folder: Path,
    *,
    episodes: dict[str, int] | None = None,
    num_frames: int = 20,
    size: tuple[int, int] = (32, 48),
    annotation: str = "annotation",
    cameras: int = 1,
) -> Path:
    """``episodes``: how many for each split. Frames are grey, each of its own brightness."""
    number = 0
    for split, count in (episodes or {"train": 2, "val": 1, "test": 1}).items():
        for _ in range(count):
            name = f"{number}"
            videos = []
            for camera in range(cameras):
                video = folder / "videos" / split / name / ("rgb.mp4" if camera == 0 else f"rgb_{camera}.mp4")
                greys = torch.tensor([frame_value(number, k) + 20 * camera for k in range(num_frames)])
                frames = greys.to(torch.uint8)[None, :, None, None].expand(3, num_frames, *size)
                write_video(video, frames.contiguous(), 5.0)
                videos.append({"video_path": video.relative_to(folder).as_posix()})
            content = recording(number, num_frames) | {"videos": videos, "episode_id": name}
            path = folder / annotation / split / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content))
            number += 1
    return folder


def recording(seed: int, num_frames: int) -> dict[str, Any]:
    """A random walk of the gripper, with what else the public files have."""
    generator = numpy.random.default_rng(seed)
    states = numpy.cumsum(generator.normal(0, 0.02, (num_frames, 6)), axis=0) + [0.3, 0, 0.2, 0, 0, 1.0]
    gripper = generator.uniform(0, 1, num_frames)
    return {
        "task": "robot_trajectory_prediction",
        "texts": [f"put the spoon on the towel, take {seed}"],
        "state": states.tolist(),
        "continuous_gripper_state": gripper.tolist(),
        "action": numpy.diff(numpy.concatenate([states, gripper[:, None]], axis=1), axis=0).tolist(),
    }


def bridge_archive(path: Path, tree: Path) -> Path:
    """The tree as the public archive has it."""
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tree, arcname=FOLDER_IN_ARCHIVE)
    return path
