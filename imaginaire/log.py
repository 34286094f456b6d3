# SPDX-License-Identifier: Apache-2.0
"""Standard logging: rank 0 logs, other ranks only their errors, and one file per run; and the progress of long work."""

import contextlib
import functools
import logging
import logging.handlers
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_FORMAT = "[%(asctime)s|%(levelname)s%(location)s] %(message)s"
_ROTATE_BYTES = 100 * 2**20
_EARLY = 100  # records before the run folder is known
_DRAWN_S = 2.0  # much longer than any progress bar takes to be drawn

Item = TypeVar("Item")

FIRST_LINE_S = 15.0  # what is over sooner has no line in a log
LINES_S = 30.0  # between lines, and at least a twentieth of the time so far (of bars in a log: 30 s always)


class _Formatter(logging.Formatter):
    """The line of this model family. On a terminal an info line goes without its place in the code."""

    def __init__(self, rank: int, with_place: bool) -> None:
        self._with_place = with_place
        super().__init__(("" if rank == 0 else f"[RANK{rank}] ") + _FORMAT, datefmt="%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.location = ""
        if record.levelno != logging.INFO or self._with_place:
            path = os.path.relpath(record.pathname) if record.pathname.startswith(os.getcwd()) else record.filename
            record.location = f"|{path}:{record.lineno}:{record.funcName}"
        return super().format(record)


class _SideChannel(logging.Handler):
    """A handler whose disk may be full, or its terminal closed: one warning, which other handlers may still show."""

    _has_failed = False

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what is not written yet
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # a wrong call of the log: reported as logging does
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            name = getattr(self, "baseFilename", "the terminal")
            log.warning("the log cannot be written to %s; training goes on without it (reported once): %s", name, error)


@functools.cache
def use_own_lock() -> None:
    """Give the progress bars a lock of each process: tqdm shares its own with forked ones, which may be killed."""
    renew_bar_lock()
    os.register_at_fork(after_in_child=renew_bar_lock)


def renew_bar_lock() -> None:
    """Give the progress bars a new lock, after one could not be drawn: tqdm never releases the lock it then holds."""
    sys.modules["tqdm"].tqdm.set_lock(threading.RLock())


class _Terminal(_SideChannel, logging.StreamHandler):  # type: ignore[type-arg]  # a subscript needs Python 3.11
    """Standard error; a progress bar that is drawn there is moved down."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if tqdm is None or not getattr(tqdm, "_instances", None):
            super().emit(record)
            return
        use_own_lock()
        lock = tqdm.get_lock()
        if not lock.acquire(timeout=_DRAWN_S):  # held for good by a thread whose bar could not be drawn
            renew_bar_lock()
            lock = tqdm.get_lock()
            lock.acquire()
        try:
            with tqdm.external_write_mode(file=self.stream, nolock=True):
                super().emit(record)
        except OSError:
            self.handleError(record)
        finally:
            lock.release()


class _LogFile(_SideChannel, logging.handlers.RotatingFileHandler):
    """The log of a run; begun anew where somebody removed it."""

    def emit(self, record: logging.LogRecord) -> None:
        if self.stream is not None and not os.path.exists(self.baseFilename):
            self.stream.close()
            self.stream = None  # type: ignore[assignment]  # opened by the record
        super().emit(record)


class _Early(logging.Handler):
    """Keeps the first records of a program, for the log of its run."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.records) < _EARLY:
            self.records.append(record)


def setup(run_dir: str | None = None, rank: int = 0) -> None:
    """Send records to stderr and, once there is a local run folder, to ``stdout.log`` in it.

    May be called again when the run folder becomes known: its log begins with the records since the call without.
    ``IMAGINAIRE_LOG_LEVEL``, else ``LOGURU_LEVEL`` (the guides' name), else INFO is the level of rank 0.
    """
    root = logging.getLogger()
    early: list[logging.LogRecord] = []
    for handler in [h for h in root.handlers if getattr(h, "of_imaginaire", False)]:
        root.removeHandler(handler)
        handler.close()
        early += getattr(handler, "records", ())
    handlers: list[logging.Handler] = [_Terminal(sys.stderr)]
    if run_dir is not None and "://" not in run_dir:
        with contextlib.suppress(OSError):  # the file then fails, with a warning
            Path(run_dir).mkdir(parents=True, exist_ok=True)
        name = "stdout.log" if rank == 0 else f"stdout_rank{rank}.log"
        path = os.path.join(run_dir, name)
        handlers.append(_LogFile(path, maxBytes=_ROTATE_BYTES, backupCount=3, delay=True))
    elif run_dir is None:
        handlers.append(_Early())
    level = (os.environ.get("IMAGINAIRE_LOG_LEVEL") or os.environ.get("LOGURU_LEVEL") or "INFO").upper()
    if rank != 0:
        level = "ERROR"
    elif not isinstance(logging.getLevelName(level), int):  # an unknown word
        level = "INFO"
    for handler in handlers:
        handler.of_imaginaire = True  # type: ignore[attr-defined]
        handler.setFormatter(_Formatter(rank, with_place=not isinstance(handler, _Terminal)))
        root.addHandler(handler)
        if isinstance(handler, _LogFile):
            for record in early:
                handler.handle(record)
    root.setLevel(level)
    logging.getLogger("httpx").setLevel("WARNING")  # a line for every request to the hub
    logging.captureWarnings(True)
    for noisy in ("botocore", "aiobotocore", "s3fs", "fsspec", "urllib3", "asyncio", "matplotlib", "torch"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


# --- the progress of long work, and the time that it will still take


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
                shown: dict[str, Any] = {"desc": what, "total": total, "initial": done, "leave": leave}
                self._bar = tqdm(**shown, unit=unit, unit_scale=self._in_bytes, dynamic_ncols=True)

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

        of_all: dict[str, Any] = {"prefix": self.what, "unit": self.unit, "unit_scale": self._in_bytes}
        return tqdm.format_meter(self.done, self.total or 0, elapsed_s, initial=self._done_before, **of_all)

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
