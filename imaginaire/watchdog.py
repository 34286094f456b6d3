# SPDX-License-Identifier: Apache-2.0
"""What may happen to a running loop from outside: it hangs, or it is asked to stop."""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from imaginaire import distributed

log = logging.getLogger(__name__)

EXIT_TIMEOUT = 70  # no step was finished in trainer.timeout_period seconds
EXIT_INTERRUPTED = 75  # SIGTERM, SIGUSR1 or Ctrl-C: the checkpoint is written, start again to go on


class Watchdog:
    """Ends the process, after writing the stacks of all threads, when `beat` is not called for ``timeout_s`` seconds.

    A hung collective cannot be interrupted from Python, so the process exits; torchrun then ends the other ranks.
    """

    def __init__(self, timeout_s: float, run_dir: str) -> None:
        self._timeout_s = timeout_s
        self._stacks = None if "://" in run_dir else os.path.join(run_dir, f"stacks_rank{distributed.rank()}.txt")
        self._place = "start"
        self._deadline: float | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if timeout_s < threading.TIMEOUT_MAX and timeout_s < 10**8:  # the default of 999999999 s is "never"
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def beat(self, place: str) -> None:
        """Progress was made; ``place`` is named should the next be too late."""
        self._place = place
        self._deadline = time.monotonic() + self._timeout_s

    def pause(self) -> None:
        """What follows (a save, a validation) may take any time."""
        self._deadline = None

    def close(self) -> None:
        self._deadline = None
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(min(1.0, self._timeout_s / 4)):
            deadline = self._deadline
            if deadline is not None and time.monotonic() > deadline:
                self._end()

    def _end(self) -> None:
        # whatever hangs may hold the log or the file system, too
        last_resort = threading.Timer(20, os._exit, [EXIT_TIMEOUT])
        last_resort.daemon = True
        last_resort.start()
        where = f"rank {distributed.rank()} made no progress at: {self._place}"
        message = f"{where}, for {self._timeout_s:g} s (trainer.timeout_period)."
        if self._stacks is not None:
            with open(self._stacks, "w") as file:
                file.write(message + "\n")
                faulthandler.dump_traceback(file, all_threads=True)
            message += f" The stacks of all threads are below and in {self._stacks}."
        log.error("%s Exit code %d.", message, EXIT_TIMEOUT)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        sys.stderr.flush()
        os._exit(EXIT_TIMEOUT)


class StopRequests:
    """Notes SIGTERM, SIGUSR1 and Ctrl-C while entered; the loop asks `wanted` in each step. A second Ctrl-C is not
    waited for."""

    _SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            for number in self._SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        hint = " Ctrl-C again quits at once." if number == signal.SIGINT else ""
        log.warning("%s: saving after this step, then leaving.%s", signal.Signals(number).name, hint)
