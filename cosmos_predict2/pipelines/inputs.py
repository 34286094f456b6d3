# SPDX-License-Identifier: Apache-2.0
"""The picture or clip that a generated video begins with."""

import os
from pathlib import Path

from torch import Tensor

from cosmos_predict2.data import media
from imaginaire.errors import DataError, near


def check_input(path: str, num_frames: int) -> None:
    """Raise when the file cannot give ``num_frames`` frames; of a clip only the header and a frame are read."""
    is_image = media.kind_of(path) == "image"
    if not os.path.isfile(path):
        raise DataError(f"There is no input file {path}.{_near_files(path)}")
    if is_image:
        if num_frames > 1:
            raise DataError(
                f"{path} is one picture, but --num_conditional_frames {num_frames} asks for {num_frames} frames."
                " Give a video, or --num_conditional_frames 1."
            )
        media.read_image(path)
        return
    found = media.probe_video(path)
    if found.num_frames < num_frames:
        raise DataError(f"{path} has {found.num_frames} frames, but {num_frames} are needed to condition on.")


def read_input(path: str, num_frames: int, size: tuple[int, int]) -> Tensor:
    """uint8 [3, num_frames, height, width]: the picture or the clip's last frames, scaled and cropped to cover."""
    check_input(path, num_frames)
    if media.kind_of(path) == "image":
        frames = media.read_image(path)[:, None]
    else:
        frames, _ = media.read_video(path, last=num_frames)
    return media.resize_and_crop(frames, size)


def _near_files(path: str) -> str:
    """Names beside it that are like it, or where the same name lies a folder deeper."""
    folder = Path(path).parent
    if not folder.is_dir():
        existing = next((parent for parent in folder.parents if parent.is_dir()), Path("."))
        return f" The folder {folder} does not exist; {existing} does."
    deeper = sorted(str(found) for found in folder.glob(f"*/{Path(path).name}"))
    if deeper:
        return f" There is {deeper[0]}."
    names = [entry.name for entry in os.scandir(folder) if entry.is_file()]
    hint = near(Path(path).name, names)
    return hint if "Did you mean" in hint else ""
