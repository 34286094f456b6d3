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
        raise DataError(f"There is no input file {path}.{_near_files(Path(path))}")
    if is_image:
        if num_frames > 1 or start:
            raise DataError(
                f"{path} is one picture, but --num_conditional_frames {num_frames} or --start_frame_idx {start} need a"
                " video. Give one, or --num_conditional_frames 1."
            )
        media.read_image(path)
        return
    found = media.probe_video(path)
    if (start or 0) + num_frames > found.num_frames:
        raise DataError(
            f"{path} has {found.num_frames} frames, but {num_frames} from frame {start or 0} on are needed"
            " (--num_conditional_frames, --start_frame_idx)."
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
    total = media.probe_video(path).num_frames
    first = total - num_frames if start is None else start
    log.info("input: frames %d to %d of the %d (from 0) of %s", first, first + num_frames - 1, total, path)
    frames, rate = media.read_video(path, **({"last": num_frames} if start is None else {"first": start + num_frames}))
    if fps and num_frames > 1 and abs(rate / fps - 1) > 0.01:
        log.warning(
            "input: %s has %g frames per second, but the video %g: its frames show motion at another speed. Convert the"
            " clip, or condition on one frame.",
            *(path, rate, fps),
        )
    return brought_to_size(frames[:, -num_frames:], size, crop, "input")


def brought_to_size(frames: Tensor, size: tuple[int, int], crop: str, what: str) -> Tensor:
    """Frames stretched to the size, or cut at the centre, as one of CROPS says; the log has a change of their shape."""
    (height, width), (to_height, to_width) = frames.shape[-2:], size
    if abs(height * to_width / (width * to_height) - 1) > 0.03:
        sizes = (height, width, to_height, to_width)
        log.info("%s: %dx%d (height x width) is brought to %dx%d by input_crop=%s", what, *sizes, crop)
    return CROPS[crop](frames, size)


def _near_files(path: Path) -> str:
    """The same name a folder deeper, where guides leave a folder out, or names beside it that are like it."""
    if deeper := sorted(path.parent.glob(f"*/{path.name}")):
        return f" There is {deeper[0]}."
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = near(path.name, names)
    return hint if "Did you mean" in hint else ""
