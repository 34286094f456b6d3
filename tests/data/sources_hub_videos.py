# SPDX-License-Identifier: Apache-2.0
"""The GR00T GR1 and Cosmos NeMo assets repositories in their public layouts, with clips of a few frames."""

from pathlib import Path

import torch

from cosmos_predict2.data.video import media

GROOT, NEMO = "nvidia/GR1-100", "nvidia/Cosmos-NeMo-Assets"
PROMPTS = {"1": "Use the right hand to pick up the cup, then put it down.", "2": "Open the box.", "3": "Wave."}
NEMO_STEMS = ("video_0", "video_1", "video_2", "video_3")


def clip_bytes(folder: Path, number: int, num_frames: int = 9, size: tuple[int, int] = (32, 48)) -> bytes:
    """A small mp4 whose brightness grows, another for each number."""
    levels = (20 * number + 10 * torch.arange(num_frames)).clamp(0, 255).to(torch.uint8).view(1, -1, 1, 1)
    path = folder / f"clip_{number}.mp4"
    media.write_video(path, levels.expand(3, num_frames, *size).contiguous(), 16)
    return path.read_bytes()


def groot_files(folder: Path) -> dict[str, bytes]:
    """The files of the repository; ``folder`` is for scratch."""
    rows = "".join(f'{name}.mp4,"{prompt}"\n' for name, prompt in PROMPTS.items())
    clips = {f"gr1/{name}.mp4": clip_bytes(folder, int(name)) for name in PROMPTS}
    return {"README.md": b"# GR1", "metadata.csv": f"file_name,prompt\n{rows}".encode(), **clips}


def nemo_files(folder: Path) -> dict[str, bytes]:
    """The files of the repository; ``folder`` is for scratch."""
    clips = {f"nemo_diffusion_example_data/{name}.mp4": clip_bytes(folder, i, 12) for i, name in enumerate(NEMO_STEMS)}
    return {"README.md": b"# assets", "nemo_diffusion_example_data/readme.txt": b"four clips", **clips}
