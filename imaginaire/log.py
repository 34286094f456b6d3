# SPDX-License-Identifier: Apache-2.0
"""Standard logging: rank 0 logs, other ranks only their errors, and one file per run."""

import contextlib
import functools
import logging
import logging.handlers
import os
import sys
import threading
from pathlib import Path

log = logging.getLogger(__name__)

_BRIEF = "[%(asctime)s|%(levelname)s] %(message)s"
_FORMAT = "[%(asctime)s|%(levelname)s|%(location)s] %(message)s"
_ROTATE_BYTES = 100 * 2**20
_EARLY = 100  # records before the run folder is known
_DRAWN_S = 2.0  # much longer than any progress bar takes to be drawn


class _Formatter(logging.Formatter):
    """The line of this model family. On a terminal an info line goes without its place in the code."""

    def __init__(self, rank: int, with_place: bool) -> None:
        self._prefix = "" if rank == 0 else f"[RANK{rank}] "
        self._with_place = with_place
        super().__init__(self._prefix + _FORMAT, datefmt="%m-%d %H:%M:%S")
        self._brief = logging.Formatter(self._prefix + _BRIEF, datefmt="%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        if record.levelno == logging.INFO and not self._with_place:
            return self._brief.format(record)
        path = os.path.relpath(record.pathname) if record.pathname.startswith(os.getcwd()) else record.filename
        record.location = f"{path}:{record.lineno}:{record.funcName}"
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
