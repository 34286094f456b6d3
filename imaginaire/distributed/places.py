# SPDX-License-Identifier: Apache-2.0
"""The current activity of every process of a run, as far as any of them can know it.

Each process notes its place in words (`note`, `at`); its watchdog publishes them to the store of the process group. So
a process that waits can say where the others are, also one that died: its last words are still there.
"""

import json
import logging
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from imaginaire.errors import listed

log = logging.getLogger(__name__)

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


_board: Board | None = None


def board() -> Board | None:
    """The board of this process's group; None for a single process and where the store cannot be shared."""
    return _board


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
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
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
