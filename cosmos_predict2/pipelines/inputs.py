# SPDX-License-Identifier: Apache-2.0
"""The picture or clip that a generated video begins with."""

import logging
import os
from pathlib import Path

from torch import Tensor

from cosmos_predict2.data.video import media
from cosmos_predict2.data.video.clips import CROPS
from imaginaire.errors import ConfigError, DataError, near

log = logging.getLogger(__name__)


def check_input(path: str, num_frames: int, start: int | None = None) -> None:
    """Raise when the file cannot give ``num_frames`` frames, the last of a clip or those from ``start`` on.

    Of a clip only the header and a frame are read.
    """
    if start is not None and start < 0:
        raise ConfigError(f"start_frame_idx is {start}; it counts frames of the input from 0.")
    is_image = media.kind_of(path) == "image"
    if not os.path.isfile(path):
        raise DataError(f"There is no input file {path}.{_near_files(path)}")
    if is_image:
        if num_frames > 1:
            raise DataError(
                f"{path} is one picture, but --num_conditional_frames {num_frames} asks for {num_frames} frames."
                " Give a video, or --num_conditional_frames 1."
            )
        if start:
            raise DataError(f"{path} is one picture, but start_frame_idx {start} asks for a later frame. Leave it out.")
        media.read_image(path)
        return
    found = media.probe_video(path)
    if found.num_frames < num_frames:
        raise DataError(f"{path} has {found.num_frames} frames, but {num_frames} are needed to condition on.")
    if start is not None and start + num_frames > found.num_frames:
        raise DataError(
            f"{path} has {found.num_frames} frames, but {num_frames} from frame {start} on are asked for"
            f" (start_frame_idx): {found.num_frames - num_frames} at most."
        )


def read_input(
    path: str,
    num_frames: int,
    size: tuple[int, int],
    start: int | None = None,
    *,
    fps: float | None = None,
    crop: str = "center",
) -> Tensor:
    """uint8 [3, num_frames, height, width]: the picture, or the clip's frames from ``start`` on (None: its last ones),
    brought to size by ``crop``. A clip of another rate than ``fps`` is a warning where it gives several frames."""
    check_input(path, num_frames, start)
    if media.kind_of(path) == "image":
        return brought_to_size(media.read_image(path)[:, None], size, crop, "input")
    frames, rate = media.read_video(path, **({"last": num_frames} if start is None else {"first": start + num_frames}))
    _say_used(path, num_frames, start)
    if fps and num_frames > 1 and abs(rate / fps - 1) > 0.01:
        log.warning(
            "input: %s has %g frames per second, but the video %g: its %d frames show motion at %.2g times the speed."
            " Convert the clip to %g frames per second, or condition on one frame.",
            *(path, rate, fps, num_frames, fps / rate, fps),
        )
    return brought_to_size(frames[:, -num_frames:], size, crop, "input")


def brought_to_size(frames: Tensor, size: tuple[int, int], crop: str, what: str) -> Tensor:
    """Frames stretched to the size, or cut at the centre, as one of CROPS says; another shape is told."""
    (height, width), (to_height, to_width) = frames.shape[-2:], size
    if abs(height * to_width / (width * to_height) - 1) > 0.03:
        done = {"stretch": "stretched to", "center": "cropped at the centre to the shape of"}[crop]
        sizes = (height, width, done, to_height, to_width)
        log.info("%s: %dx%d (height x width) %s %dx%d (input_crop=%s)", what, *sizes, crop)
    return CROPS[crop](frames, size)


def _say_used(path: str, num_frames: int, start: int | None) -> None:
    """Log which frames of a clip a video begins with."""
    total = media.probe_video(path).num_frames
    first = total - num_frames if start is None else start
    which = f"frame {first}" if num_frames == 1 else f"frames {first} to {first + num_frames - 1}"
    hint = ", the end of it; start_frame_idx 0 begins with its first frame" if start is None else ""
    log.info("input: %s of the %d (from 0) of %s%s", which, total, path, hint)


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
