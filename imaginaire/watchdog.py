# SPDX-License-Identifier: Apache-2.0
"""What may happen to a running loop from outside: it hangs, or it is asked to stop."""

import faulthandler
import logging
import math
import os
import re
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from imaginaire import distributed, places

log = logging.getLogger(__name__)

EXIT_TIMEOUT = 70  # no step was finished in trainer.timeout_period seconds
EXIT_INTERRUPTED = 75  # SIGTERM, SIGUSR1 or Ctrl-C: the checkpoint is written, start again to go on

_LOST_PEER = re.compile(
    r"onnection (closed|reset|refused)|[Tt]imed out|waited in vain|NCCL (error|communicator)|remote process exited"
)


class Watchdog:
    """Says where each process of the run is when one of them makes no progress, and ends it when that lasts too long.

    A process that calls neither `beat` nor `pause` for ``timeout_s`` seconds after a `beat` ends with EXIT_TIMEOUT: a
    hung collective cannot be interrupted from Python; torchrun then ends the other ranks. Before that, and when it is
    about to meet the time limit of collectives (after a `pause`, too), all ranks write their place and the stacks of
    their threads to ``hang/rank_R.txt`` in the run folder, and the first that can logs a table of their places.
    """

    def __init__(self, timeout_s: float, run_dir: str) -> None:
        self._timeout_s = timeout_s
        self._folder = None if "://" in run_dir else os.path.join(run_dir, "hang")
        self._board = places.board()
        self._report_s = 0.9 * distributed.timeout_s() if self._board is not None else math.inf
        self._deadline: float | None = None
        self._report_at = math.inf
        self._answered: float | None = None  # the newest alarm that this rank knows
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        is_limited = timeout_s < threading.TIMEOUT_MAX and timeout_s < 10**8  # the default of 999999999 s is "never"
        self._tick = min(1.0, timeout_s / 4) if is_limited else 1.0
        if is_limited or self._board is not None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def beat(self, place: str) -> None:
        """Progress was made; ``place`` is named should the next be too late."""
        places.note(place)
        now = time.monotonic()
        self._deadline = now + self._timeout_s
        self._report_at = now + self._report_s

    def pause(self, place: str) -> None:
        """What follows (a save, a start) may take any time, as far as ``timeout_s`` is concerned."""
        places.note(place)
        self._deadline = None
        self._report_at = time.monotonic() + self._report_s

    def ask(self, reason: str) -> None:
        """Have all ranks say where they are: a collective failed, so one of them is gone. Takes a few seconds."""
        if self._board is None or self._thread is None or not self._thread.is_alive():
            return
        self._board.raise_alarm(reason)
        self._closed.wait(4 * self._tick)  # the thread answers, and the others'

    def close(self) -> None:
        """Stop watching; the last words say how this process left."""
        self._deadline, self._report_at = None, math.inf
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            places.note(_farewell(sys.exc_info()[1]))
            places.publish()

    def _watch(self) -> None:
        while not self._closed.wait(self._tick):
            places.publish()
            now = time.monotonic()
            if self._board is not None and (alarm := self._board.alarm()) and alarm.time != self._answered:
                self._answer(self._board, alarm)
            elif (deadline := self._deadline) is not None and now > deadline:
                self._end()
            elif now > self._report_at:
                self._report_at = math.inf
                assert self._board is not None
                limit = distributed.timeout_s()
                self._board.raise_alarm(f"{self._where()}; collectives are given up after {limit:g} s")

    def _where(self) -> str:
        place = places.here()
        return f"no progress at: {place.text}, for {time.time() - place.since:.0f} s"

    def _answer(self, board: places.Board, alarm: places.Alarm) -> None:
        """Write where this rank is; the lowest that answers logs where all are."""
        self._answered = alarm.time
        places.publish()
        path = self._write(alarm.reason)
        board.answer(alarm)
        self._closed.wait(2 * self._tick)
        answered = board.answered(alarm)
        if distributed.rank() == min(answered, default=distributed.rank()):
            lines = "\n".join(f"  {line}" for line in places.table(board.read(), time.time(), answered))
            stacks = "" if path is None else f"\nThe stacks of each rank are in {os.path.dirname(path)}."
            log.error("hang report (%s). Where the ranks are:\n%s%s", alarm.reason, lines, stacks)

    def _write(self, reason: str) -> str | None:
        """The path of this rank's stacks; None where they went to stderr."""
        place = places.here()
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(place.since))
        text = f"{reason}\nplace: {place.text}\nsince: {since} ({time.time() - place.since:.0f} s)\n\n"
        try:
            if self._folder is not None:
                os.makedirs(self._folder, exist_ok=True)
                path = os.path.join(self._folder, f"rank_{distributed.rank()}.txt")
                with open(path, "w") as file:
                    file.write(text)
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
                return path
        except OSError as error:
            log.error("the stacks cannot be written to %s: %s", self._folder, error)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        return None

    def _end(self) -> None:
        # whatever hangs may hold the log or the file system, too
        last_resort = threading.Timer(20, os._exit, [EXIT_TIMEOUT])
        last_resort.daemon = True
        last_resort.start()
        where = f"rank {distributed.rank()} made no progress at: {places.here().text}"
        message = f"{where}, for {self._timeout_s:g} s (trainer.timeout_period)."
        if self._board is not None:
            self._board.raise_alarm(f"no progress for {self._timeout_s:g} s (trainer.timeout_period)")
            if (alarm := self._board.alarm()) and alarm.time != self._answered:
                self._answer(self._board, alarm)
            time.sleep(2 * self._tick)  # the others write, and rank 0 tells, before they are ended with this one
        elif (path := self._write(message)) is not None:
            message += f" The stacks of all threads are below and in {path}."
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        log.error("%s Exit code %d.", message, EXIT_TIMEOUT)
        sys.stderr.flush()
        os._exit(EXIT_TIMEOUT)


def lost_peer(error: BaseException) -> bool:
    """Whether an exception says that another process did not come, or is gone."""
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


def _farewell(error: BaseException | None) -> str:
    if error is None:
        return "left"
    first = next(iter(str(error).splitlines()), "")
    return f"left after {type(error).__name__}: {first[:200]}"


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
