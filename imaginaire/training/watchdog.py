# SPDX-License-Identifier: Apache-2.0
"""Events that reach a running loop from outside: it hangs, or it is asked to stop."""

import faulthandler
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from imaginaire import distributed
from imaginaire.distributed import places
from imaginaire.log import duration

log = logging.getLogger(__name__)

EXIT_TIMEOUT = 70  # no step was finished in trainer.timeout_period seconds
EXIT_INTERRUPTED = 75  # SIGTERM, SIGUSR1, SIGHUP or Ctrl-C: the checkpoint is written, start again to go on

_LONG = 4  # times the limit for what takes long by its nature: a start, a compilation, a save
_LONG_S = 7200.0  # at least
_STILL_AT_S = 15.0  # what is known to take long is reported after so many seconds, then twice as many, ...
_STORE_GONE_S = 5.0  # without a store for so long, this rank reports alone

_LOST_PEER = re.compile(
    r"onnection (closed|reset|refused)|[Tt]imed out|waited in vain|NCCL (error|communicator)|remote process exited"
)


class Watchdog:
    """Reports where each process of the run is when one makes no progress, and ends it when that lasts too long.

    A process that does not call `beat` again within ``timeout_s`` seconds (`long` work: four times as many, two hours
    at least) ends with EXIT_TIMEOUT: a hung collective cannot be interrupted from Python; torchrun then ends the other
    ranks. Before that, and when it is about to meet the time limit of collectives, all ranks write their place and the
    stacks of their threads to ``hang/rank_R.txt`` in the run folder, and the first that can logs a table of their
    places. Where the store that they meet in is gone, each reports alone. A limit of 10^8 seconds or more is none.
    """

    def __init__(self, timeout_s: float, run_dir: str) -> None:
        self._timeout_s = timeout_s
        self._folder = None if "://" in run_dir else os.path.join(run_dir, "hang")
        self._board = places.board()
        self._report_s = 0.9 * distributed.timeout_s() if self._board is not None else math.inf
        self._is_limited = timeout_s < min(threading.TIMEOUT_MAX, 10**8)
        self._limit_s = math.inf  # of what is done now
        self._deadline = math.inf
        self._report_at = math.inf
        self._began, self._still_at = 0.0, math.inf
        self._answered: float | None = None  # time of the newest alarm that this rank answered
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._tick = min(1.0, timeout_s / 4) if self._is_limited else 1.0
        if self._is_limited or self._board is not None:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    def beat(self, place: str, *, long: bool = False) -> None:
        """Progress was made; ``place`` is named should the next be too late. ``long``: it is known to take its time."""
        places.note(place)
        now = time.monotonic()
        if self._is_limited:
            self._limit_s = max(_LONG * self._timeout_s, _LONG_S) if long else self._timeout_s
            self._deadline = now + self._limit_s
        self._report_at = now + self._report_s
        self._began, self._still_at = now, now + _STILL_AT_S if long else math.inf

    def ask(self, reason: str) -> None:
        """Have all ranks report their place: a collective failed, so one of them is gone. Takes a few seconds."""
        board = self._board
        if board is None or self._thread is None or not self._thread.is_alive():
            return
        board.raise_alarm(reason)
        if board.lost_since is not None:
            self._report_alone(reason)
        else:
            self._closed.wait(4 * self._tick)  # the thread answers, and the others'

    def close(self) -> None:
        """Stop watching; the last words say how this process left."""
        self._deadline = self._report_at = self._still_at = math.inf
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            last_words = places.LEFT
            if (error := sys.exc_info()[1]) is not None:
                first_line = next(iter(str(error).splitlines()), "")
                last_words += f" after {type(error).__name__}: {first_line[:200]}"
            places.note(last_words)
            places.publish()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(self._tick):
            places.publish()
            now = time.monotonic()
            self._look(now, now - last - self._tick)
            last = now

    def _look(self, now: float, late_by: float) -> None:
        """``late_by``: how much later this thread ran than it meant to."""
        if late_by > 10:  # the whole process stood still: Ctrl-Z, a debugger
            self._deadline += late_by
            self._report_at += late_by
        if now >= self._still_at:
            log.info("%s, for %s so far", places.here().text, duration(now - self._began))
            self._still_at = now + (now - self._began)
        board = self._board
        if board is not None and (alarm := board.alarm()) and alarm.time != self._answered:
            self._answer(board, alarm)
        elif now > self._deadline:
            self._end()
        elif board is not None and board.lost_since is not None and now - board.lost_since > _STORE_GONE_S:
            self._report_alone("the store of the process group cannot be reached")
        elif board is not None and now > self._report_at:
            self._report_at = math.inf
            board.raise_alarm(
                f"no progress at: {places.here().text}; collectives are given up after {distributed.timeout_s():g} s"
            )

    def _answer(self, board: places.Board, alarm: places.Alarm) -> None:
        """Write where this rank is; the lowest that answers logs where all are."""
        self._answered = alarm.time
        places.publish()
        path = self._write(alarm.reason)
        board.answer(alarm)
        self._closed.wait(2 * self._tick)
        answered = board.answered(alarm)
        if distributed.rank() == min(answered, default=distributed.rank()):
            seen, now = board.read(), time.time()
            gone = "\n".join(["", *places.gone(seen, now, answered), ""]) if len(answered) < len(seen) else " "
            lines = "\n".join(f"  {line}" for line in places.table(seen, now, answered))
            stacks = "" if path is None else f"\nThe stacks of each rank are in {os.path.dirname(path)}."
            log.error("hang report (%s).%sWhere the ranks are:\n%s%s", alarm.reason, gone, lines, stacks)

    def _report_alone(self, reason: str) -> None:
        """Without the store this rank writes and logs its own place, once."""
        if self._board is None:
            return
        self._board = None
        places.close_board()
        path, activity = self._write(reason), places.here()
        stacks = "" if path is None else f"\nThe stacks of this rank are in {path}."
        log.error(
            f"hang report of rank {distributed.rank()} alone ({reason}).\nThe store of the process group (MASTER_ADDR="
            f"{os.environ.get('MASTER_ADDR', '?')}) does not answer: that machine, its launcher or the network is gone."
            f" This rank ({socket.gethostname()}): {activity.text}, for {time.time() - activity.since:.0f} s{stacks}"
        )

    def _write(self, reason: str) -> str | None:
        """The path of this rank's stacks; None where they went to stderr."""
        activity = places.here()
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(activity.since))
        text = f"{reason}\nplace: {activity.text}\nsince: {since} ({time.time() - activity.since:.0f} s)\n\n"
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
        limit = f"for {self._limit_s:g} s (trainer.timeout_period={self._timeout_s:g})"
        message = f"rank {distributed.rank()} made no progress at: {places.here().text}, {limit}."
        if (board := self._board) is not None:  # the other thread may give it up meanwhile
            board.raise_alarm(f"no progress {limit}")
            if (alarm := board.alarm()) and alarm.time != self._answered:
                self._answer(board, alarm)
            time.sleep(2 * self._tick)  # the others write, and rank 0 logs, before they end with this one
        elif (path := self._write(message)) is not None:
            message += f" The stacks of all threads are below and in {path}."
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        cure = "Where a step may take so long, raise trainer.timeout_period (999999999: no limit)."
        log.error("%s %s Exit code %d.", message, cure, EXIT_TIMEOUT)
        sys.stderr.flush()
        os._exit(EXIT_TIMEOUT)


def lost_peer(error: BaseException) -> bool:
    """True for an exception that means that another process did not come, or is gone."""
    return isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None


class StopRequests:
    """Notes SIGTERM, SIGUSR1, SIGHUP and Ctrl-C while entered; the loop asks `wanted` in each step. A second Ctrl-C is
    not waited for, and a hang-up that is ignored (``nohup``) stays so."""

    _SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)

    def __init__(self) -> None:
        self.wanted = False
        self.is_leaving = False  # on the way out already: what a signal asks for is under way
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopRequests":
        if threading.current_thread() is threading.main_thread():
            for number in self._SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        if self.is_leaving:
            return
        hint = " Ctrl-C again quits at once." if number == signal.SIGINT else ""
        log.warning("%s: saving after this step, then leaving.%s", signal.Signals(number).name, hint)
