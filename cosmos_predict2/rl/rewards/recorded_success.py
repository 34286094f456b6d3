# SPDX-License-Identifier: Apache-2.0
"""Pictures of recordings with success known: of a LeRobot data set that has a column for it."""

from pathlib import Path

import numpy
import torch

from cosmos_predict2.data.lerobot.info import held_out
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.rl.rewards.success_training import LabelledPictures
from imaginaire.errors import DataError, near
from imaginaire.progress import tracked

LEAST_HELD_OUT = 2  # episodes: one half calibrates, the other measures


def recorded_successes(
    folder: Path, column: str, camera: str | None, *, near: int, val_fraction: float
) -> tuple[list[LabelledPictures], list[LabelledPictures]]:
    """The episodes to learn from, and those that are held out; success is a number above 0.5 in ``column``.

    Of the other frames, those at most ``near`` before a success are near misses.
    """
    source = LeRobotSource.open(folder)
    if column not in source.info.features:
        raise DataError(f"{folder} has no column '{column}', which marks success.{_near(column, source)}")
    place = source.camera(camera)
    is_held_out = held_out(len(source), val_fraction)
    if is_held_out.sum() < LEAST_HELD_OUT:
        raise DataError(
            f"{folder}: {int(is_held_out.sum())} of {len(source)} episodes are held out, but {LEAST_HELD_OUT} are"
            " needed, to calibrate and to measure: give more episodes, or a larger --val_fraction."
        )
    parts: tuple[list[LabelledPictures], list[LabelledPictures]] = ([], [])
    for i in tracked(range(len(source)), "recordings", unit="episode"):
        success = torch.from_numpy(numpy.asarray(source.columns(i, [column])[column]).reshape(-1) > 0.5)
        pictures = source.frames(i, place, range(len(success))).permute(1, 2, 3, 0).contiguous()
        soon = torch.zeros_like(success)
        for step in range(1, near + 1):
            soon[:-step] |= success[step:]
        parts[bool(is_held_out[i])].append(LabelledPictures(pictures, success, soon & ~success))
    return parts


def _near(column: str, source: LeRobotSource) -> str:
    return near(column, list(source.info.features))
