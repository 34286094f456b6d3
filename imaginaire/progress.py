# SPDX-License-Identifier: Apache-2.0
"""The progress of long work, and the time that it will still take."""

import contextlib
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

from imaginaire.log import renew_bar_lock, use_own_lock

log = logging.getLogger(__name__)

Item = TypeVar("Item")

FIRST_LINE_S = 15.0  # what is over sooner has no line in a log
LINES_S = 30.0  # between lines, and at least a twentieth of the time so far (of bars in a log: 30 s always)


class Progress:
    """``with Progress("embeddings", 400, unit="file") as progress: ... progress.update()``

    A bar on a terminal. Elsewhere (a pipe, the log of a batch job) a line now and then: ``embeddings: 120 of 400, 30 %,
    2 min left``, or with ``as_bar`` the bar. ``total`` is None where it is unknown, ``done`` what was done before;
    ``is_shown=False`` shows nothing, ``lines=False`` no lines.
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        unit: str = "it",
        done: int = 0,
        leave: bool = True,
        is_shown: bool = True,
        lines: bool = True,
        as_bar: bool = False,
    ) -> None:
        self.what = what
        self.unit = unit
        self.as_bar = as_bar
        self.total = total
        self.done = self._done_before = done
        self._in_bytes = unit == "B"
        self._lines = lines and is_shown
        self._start = time.monotonic()
        self._next_line = self._start + FIRST_LINE_S
        self._bar: Any = None
        if is_shown and sys.stderr.isatty():
            from tqdm import tqdm

            use_own_lock()
            self._lines = False
            with _drawing():
                self._bar = tqdm(
                    desc=what,
                    total=total,
                    initial=done,
                    unit=unit,
                    unit_scale=self._in_bytes,
                    leave=leave,
                    dynamic_ncols=True,
                )

    def update(self, count: int = 1) -> None:
        self.set(self.done + count)

    def set(self, done: int) -> None:
        """Set the amount that is done now, with what was done before."""
        step, self.done = done - self.done, done
        if self._bar is not None:
            try:
                self._bar.update(step)
            except OSError:  # the terminal was closed
                renew_bar_lock()
                self._bar.disable = True  # or it is closed, which writes, when it is collected
                self._bar = None
        elif self._lines and (now := time.monotonic()) >= self._next_line:
            elapsed_s = now - self._start
            self._next_line = now + (LINES_S if self.as_bar else max(LINES_S, elapsed_s / 20))
            log.info("%s", self.bar(elapsed_s) if self.as_bar else f"{self.what}: {self.line(elapsed_s)}")

    def bar(self, elapsed_s: float) -> str:
        """``Generating Rollout Epochs:   6%|▋         | 1/16 [08:56<2:14:09, 536.61s/it]``."""
        from tqdm import tqdm

        return tqdm.format_meter(
            self.done,
            self.total or 0,
            elapsed_s,
            prefix=self.what,
            unit=self.unit,
            unit_scale=self._in_bytes,
            initial=self._done_before,
        )

    def line(self, elapsed_s: float) -> str:
        """``120 of 400, 30 %, 2 min left``."""
        done, total = (f"{n / 1e6:.1f} MB" if self._in_bytes else str(n) for n in (self.done, self.total or 0))
        if not self.total:
            return f"{done} so far"
        new = self.done - self._done_before
        left = f", {duration(elapsed_s / new * (self.total - self.done))} left" if new > 0 else ""
        return f"{done} of {total}, {percent(self.done, self.total)}{left}"

    def close(self) -> None:
        if self._bar is not None:
            bar, self._bar = self._bar, None
            with _drawing():
                bar.close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


@contextlib.contextmanager
def _drawing() -> Iterator[None]:
    """A bar that cannot be drawn, as the terminal was closed, stops neither the work nor the bars of other threads."""
    try:
        yield
    except OSError:
        renew_bar_lock()


def tracked(items: Sequence[Item], what: str, **options: Any) -> Iterator[Item]:
    """The items, with the progress through them; ``options`` are those of `Progress`."""
    with Progress(what, len(items), **options) as progress:
        for item in items:
            yield item
            progress.update()


class Pace:
    """The time that a run still takes, by the wall: with its validations, saves and samples, and without its first
    step, which compiles."""

    def __init__(self, total: int | None) -> None:
        self.total = total
        self._first: tuple[int, float] | None = None  # finished steps, and when the first of this process ended
        self._last = (0, 0.0)

    def step(self, iteration: int) -> None:
        """Note that this many steps are finished."""
        self._last = (iteration, time.monotonic())
        if self._first is None:
            self._first = self._last

    def left_s(self) -> float | None:
        """Seconds until the last step; None while there is nothing to judge by."""
        if self.total is None or self._first is None or self._last[0] <= self._first[0]:
            return None
        steps, seconds = self._last[0] - self._first[0], self._last[1] - self._first[1]
        return seconds / steps * max(0, self.total - self._last[0])


def percent(done: int, total: int) -> str:
    """``6 %``; 100 only when all is done."""
    return f"{math.floor(100 * done / total)} %"


def duration(seconds: float) -> str:
    """``45 s``, ``9 min``, ``3 h 20 min``, ``2 days 4 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(minutes / 60)
    return f"{hours // 24} days {hours % 24} h"
