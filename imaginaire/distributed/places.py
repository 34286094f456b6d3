# SPDX-License-Identifier: Apache-2.0
"""The current activity of every process of a run, a watchdog that ends one which hangs, and requests to stop.

Each process notes its place in words (`note`, `at`); its watchdog publishes them to the store of the process group. So
a process that waits can say where the others are, also one that died: its last words are still there.
"""

import faulthandler
import json
import logging
import math
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from imaginaire import distributed
from imaginaire.errors import listed
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

LEFT = "left"  # how the last words of a process begin
SILENCE_S = 20  # a process that published nothing for so long does not answer
_POLL_S = 0.05
_ALARM = "alarm"
_ALARM_HOLDS_S = 60  # many ranks notice the same hang


@dataclass(frozen=True, slots=True)
class Activity:
    """The activity of a process, and when it began."""

    text: str
    since: float


@dataclass(frozen=True, slots=True)
class RankReport:
    """The last words of a rank: its activity, since when, and when it wrote them."""

    rank: int
    host: str
    text: str
    since: float
    time: float


_here = Activity("start", time.time())


def here() -> Activity:
    return _here


def note(text: str) -> None:
    """This process is now at ``text``. Costs less than a microsecond: publishing is the watchdog's work."""
    global _here
    _here = Activity(text, time.time())


@contextmanager
def at(text: str) -> Iterator[None]:
    """The place while entered; published at once, as what is entered may never end."""
    global _here
    before = _here
    note(text)
    publish()
    try:
        yield
    finally:
        _here = before


@dataclass(frozen=True, slots=True)
class Alarm:
    """A rank asks all ranks to report their place; ``time`` identifies the alarm."""

    reason: str
    time: float


class Board:
    """The places of all ranks, in the store of the process group. Nothing here raises: a store may be gone."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._host = socket.gethostname()
        # A connection of its own: a thread that waits for the group's holds it.
        self._store = dist.distributed_c10d.PrefixStore("places", store.clone())
        self._store.set_timeout(timedelta(seconds=10))
        self.lost_since: float | None = None  # when the store first did not answer, by the monotonic clock

    def publish(self, activity: Activity) -> None:
        words = {"text": activity.text, "since": activity.since, "time": time.time()}
        self._set(str(self.rank), {"host": self._host, **words})

    def read(self) -> list[RankReport | None]:
        """The newest state of every rank, in rank order; None for one that never published."""
        values = [self._get(str(rank)) for rank in range(self.world_size)]
        return [None if words is None else RankReport(rank, **words) for rank, words in enumerate(values)]

    def raise_alarm(self, reason: str) -> None:
        """Have all ranks write where they are, unless they have just been asked."""
        now = time.time()
        if (newest := self._get(_ALARM)) is None or now - newest["time"] > _ALARM_HOLDS_S:
            self._set(_ALARM, {"reason": f"rank {self.rank}: {reason}", "time": now})

    def alarm(self) -> Alarm | None:
        value = self._get(_ALARM)
        return None if value is None else Alarm(**value)

    def answer(self, alarm: Alarm) -> None:
        self._set(f"answer{self.rank}", {"time": alarm.time})

    def answered(self, alarm: Alarm) -> set[int]:
        """The ranks that have written where they are, for this alarm or for one that another rank raised with it."""
        found = {rank: self._get(f"answer{rank}") for rank in range(self.world_size)}
        return {r for r, value in found.items() if value and abs(value["time"] - alarm.time) <= _ALARM_HOLDS_S}

    def exchange(self, name: str, text: str, timeout_s: float) -> list[str] | None:
        """The text of every rank under a name; None when a rank wrote none within the time."""
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        self._set(keys[self.rank], {"text": text})
        end = time.monotonic() + timeout_s
        texts: list[str] = []
        while len(texts) < len(keys):
            if (value := self._get(keys[len(texts)])) is not None:
                texts.append(value["text"])
            elif time.monotonic() > end or self.lost_since is not None:
                return None
            else:
                time.sleep(_POLL_S)
        return texts

    def _set(self, key: str, value: dict[str, Any]) -> None:
        try:
            self._store.set(key, json.dumps(value))
            self.lost_since = None
        except RuntimeError as error:
            self._note_loss(error)

    def _get(self, key: str) -> Any:
        if self.lost_since is not None:  # the next write finds out whether it is there again
            return None
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError as error:
            self._note_loss(error)
            return None

    def _note_loss(self, error: RuntimeError) -> None:
        log.debug("the store of the process group does not answer: %s", error)
        if self.lost_since is None:
            self.lost_since = time.monotonic()


_board: Board | None = None  # of this process's group; none for a single process or where no store can be shared


def open_board() -> None:
    """Called when the process group is there."""
    global _board
    store = dist.distributed_c10d._get_default_store()
    try:
        _board = Board(store, dist.get_rank(), dist.get_world_size())
        publish()
    except (AttributeError, RuntimeError, NotImplementedError) as error:  # an older torch, a store without a server
        log.debug("no board of places: %s", error)
        _board = None


def close_board() -> None:
    global _board
    _board = None


def publish() -> None:
    """Write this process's place to the board now."""
    if _board is not None:
        _board.publish(_here)


def exchange(name: str, text: str, timeout_s: float) -> list[str] | None:
    """The text of every rank under a name, in rank order; None when a rank wrote none within the time.

    It goes through the store and is no collective, so it is safe for a rank that comes from an error and cannot know
    what the others wait for. A name is used once.
    """
    if distributed.world_size() == 1:
        return [text]
    return None if _board is None else _board.exchange(name, text, timeout_s)


def report(reached: str | None = None) -> str:
    """A table of all ranks; ``reached`` is the place where all should be. Empty without a board."""
    if _board is None:
        return ""
    publish()
    seen = _board.read()
    lines = table(seen, time.time())
    late = [rank for rank, entry in enumerate(seen) if entry is None or entry.text != reached]
    if reached is not None and late:
        lines.append(f"missing at {reached}: {ranks(late)}")
    return "\n".join(f"  {line}" for line in lines)


def table(seen: Sequence[RankReport | None], now: float, answered: Collection[int] | None = None) -> list[str]:
    """One line for the ranks of one place, the few that differ from most first: which, where, since when, and whether
    they still answer (without ``answered``: whether they have published of late)."""
    groups: dict[tuple[bool, str], list[RankReport]] = {}
    for entry in seen:
        if entry is not None:
            answers = now - entry.time < SILENCE_S if answered is None else entry.rank in answered
            groups.setdefault((answers, entry.text), []).append(entry)
    unheard = [rank for rank, entry in enumerate(seen) if entry is None]
    lines = [f"{ranks(unheard)}: never heard of"] if unheard else []
    for (answers, text), members in sorted(groups.items(), key=lambda item: (item[0][0], len(item[1]))):
        since = max(now - entry.since for entry in members)
        line = f"{ranks([entry.rank for entry in members])} ({_hosts(members)}): {text}, for {since:.0f} s"
        if not answers:
            line += f"; no answer, last heard of {now - max(entry.time for entry in members):.0f} s ago"
        lines.append(line)
    return lines


def gone(seen: Sequence[RankReport | None], now: float, answered: Collection[int]) -> list[str]:
    """A sentence on the ranks that did not answer: those that left after an error, and the silent ones."""
    left = [e for e in seen if e is not None and e.rank not in answered and e.text.startswith(LEFT)]
    lines = [f"{ranks([entry.rank])} ({entry.host}) {entry.text}. See its own log." for entry in left]
    silent = sorted(set(range(len(seen))) - set(answered) - {entry.rank for entry in left})
    if silent and answered:
        hosts = _hosts([entry for rank in silent if (entry := seen[rank]) is not None]) or "never heard of"
        lines.append(
            f"Most likely dead: {ranks(silent)} ({hosts}): killed from outside (out of memory? see dmesg), or the"
            " machine or its network is gone."
        )
    return lines


def ranks(numbers: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in numbers:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(numbers) > 1 else ''} {text}"


def _hosts(members: Sequence[RankReport]) -> str:
    return listed(sorted({entry.host for entry in members}), 3)


# --- events that reach a running loop from outside: it hangs, or it is asked to stop


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
        self._board = _board
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
        note(place)
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
            last_words = LEFT
            if (error := sys.exc_info()[1]) is not None:
                first_line = next(iter(str(error).splitlines()), "")
                last_words += f" after {type(error).__name__}: {first_line[:200]}"
            note(last_words)
            publish()

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(self._tick):
            publish()
            now = time.monotonic()
            self._look(now, now - last - self._tick)
            last = now

    def _look(self, now: float, late_by: float) -> None:
        """``late_by``: how much later this thread ran than it meant to."""
        if late_by > 10:  # the whole process stood still: Ctrl-Z, a debugger
            self._deadline += late_by
            self._report_at += late_by
        if now >= self._still_at:
            log.info("%s, for %s so far", here().text, duration(now - self._began))
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
                f"no progress at: {here().text}; collectives are given up after {distributed.timeout_s():g} s"
            )

    def _answer(self, board: Board, alarm: Alarm) -> None:
        """Write where this rank is; the lowest that answers logs where all are."""
        self._answered = alarm.time
        publish()
        path = self._write(alarm.reason)
        board.answer(alarm)
        self._closed.wait(2 * self._tick)
        answered = board.answered(alarm)
        if distributed.rank() == min(answered, default=distributed.rank()):
            seen, now = board.read(), time.time()
            lost = "\n".join(["", *gone(seen, now, answered), ""]) if len(answered) < len(seen) else " "
            lines = "\n".join(f"  {line}" for line in table(seen, now, answered))
            stacks = "" if path is None else f"\nThe stacks of each rank are in {os.path.dirname(path)}."
            log.error("hang report (%s).%sWhere the ranks are:\n%s%s", alarm.reason, lost, lines, stacks)

    def _report_alone(self, reason: str) -> None:
        """Without the store this rank writes and logs its own place, once."""
        if self._board is None:
            return
        self._board = None
        close_board()
        path, activity = self._write(reason), here()
        stacks = "" if path is None else f"\nThe stacks of this rank are in {path}."
        log.error(
            f"hang report of rank {distributed.rank()} alone ({reason}).\nThe store of the process group (MASTER_ADDR="
            f"{os.environ.get('MASTER_ADDR', '?')}) does not answer: that machine, its launcher or the network is gone."
            f" This rank ({socket.gethostname()}): {activity.text}, for {time.time() - activity.since:.0f} s{stacks}"
        )

    def _write(self, reason: str) -> str | None:
        """The path of this rank's stacks; None where they went to stderr."""
        activity = here()
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
        message = f"rank {distributed.rank()} made no progress at: {here().text}, {limit}."
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
