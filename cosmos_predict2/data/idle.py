# SPDX-License-Identifier: Apache-2.0
"""Frames of a recording at which nothing moves, so that training windows begin elsewhere; episodes stay."""

from dataclasses import dataclass

import numpy
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class IdleRule:
    """The rule of openpi for DROID (``compute_droid_nonidle_ranges.py``), with its values.

    A frame is idle where no command differs from that of the frame before by ``below`` or more. ``idle_run`` idle
    frames in a row are left out. What remains between them is kept if it has ``moving_run`` frames, without its last
    ``cut``: a window that begins there would mostly show the rest that follows.
    """

    below: float = 1e-3
    idle_run: int = 7
    moving_run: int = 16
    cut: int = 10

    def starts(self, commands: NDArray[numpy.floating]) -> NDArray[numpy.bool_]:
        """[F], true for the frames that a window may begin with, of commands [F, d]."""
        is_idle = numpy.zeros(len(commands), dtype=bool)
        is_idle[1:] = (numpy.abs(numpy.diff(commands, axis=0)) < self.below).all(axis=1)
        is_moving = numpy.ones(len(commands), dtype=bool)
        for first, end in _runs(is_idle):
            is_moving[first:end] = end - first < self.idle_run
        may_begin = numpy.zeros(len(commands), dtype=bool)
        for first, end in _runs(is_moving):
            may_begin[first : max(first, end - self.cut)] = end - first >= self.moving_run
        return may_begin


def _runs(flags: NDArray[numpy.bool_]) -> list[tuple[int, int]]:
    """(first, end) of each run of true values; ``end`` is the first place behind it."""
    edges = numpy.flatnonzero(numpy.diff(flags, prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))
