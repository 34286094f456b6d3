# SPDX-License-Identifier: Apache-2.0
"""The Cosmos NeMo assets repository in its public layout, with clips of a few frames."""

from pathlib import Path

from tests.data.sources_groot import clip_bytes

NAME = "nvidia/Cosmos-NeMo-Assets"
STEMS = ("video_0", "video_1", "video_2", "video_3")


def nemo_files(folder: Path) -> dict[str, bytes]:
    """The files of the repository; ``folder`` is for scratch."""
    clips = {f"nemo_diffusion_example_data/{name}.mp4": clip_bytes(folder, i, 12) for i, name in enumerate(STEMS)}
    return {"README.md": b"# assets", "nemo_diffusion_example_data/readme.txt": b"four clips", **clips}
