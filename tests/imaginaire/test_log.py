# SPDX-License-Identifier: Apache-2.0
"""The progress of long work as a user sees it, on a terminal and in a log, and lines of the log beside its bars."""

import io
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from imaginaire import log as logs
from imaginaire.distributed.places import Watchdog
from imaginaire.log import Pace, Progress, _Terminal, duration, tracked
from imaginaire.training.callbacks.trackers import Metrics
from tests.programs import HANG_S


class Clock:
    """A clock that stands still until it is told how much time passes."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The text that is written to a terminal from now on."""
    stderr = io.StringIO()
    stderr.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stderr)
    return stderr


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (89, "89 s"), (540, "9 min"), (12_000, "3 h 20 min"), (187_300, "2 days 4 h")]
)
def test_durations_are_said_as_people_say_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_time_left_counts_validations_and_leaves_out_the_first_step(clock: Clock) -> None:
    pace = Pace(total=100)
    clock.now += 600  # the first step compiles
    pace.step(1)
    assert pace.left_s() is None
    for iteration in range(2, 12):
        clock.now += 2
        if iteration == 6:
            clock.now += 30  # a validation
        pace.step(iteration)
    assert pace.left_s() == pytest.approx((10 * 2 + 30) / 10 * 89)
    pace.step(100)
    assert pace.left_s() == 0
    assert Pace(total=None).left_s() is None


def test_the_log_of_a_run_does_not_count_what_was_before_its_first_step(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = SimpleNamespace(project="p", group="g", name="n", wandb_mode=None)
    metrics = Metrics(str(tmp_path), job, is_writer=True, max_iter=110)
    metrics.open(10)
    with caplog.at_level(logging.INFO):
        metrics.flush(10)  # after a validation
        for iteration, seconds in ((11, 600), (12, 2)):
            clock.now += seconds
            metrics.log({"train/loss": 1.0, "train/s_per_iter": 2.0}, iteration)
            metrics.flush(iteration)
    metrics.close()
    assert "iter 12/110" in caplog.messages[-1] and "2 s/iter, 3 min left" in caplog.messages[-1]


def test_in_a_log_there_is_a_line_now_and_then(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for _ in tracked(range(400), "embeddings", done=0):
            clock.now += 1
        with Progress("few", 10) as few:
            few.update(10)
        with Progress("no end") as endless:
            clock.now += 20
            endless.update(7)
    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == ["embeddings: 15 of 400, 3 %, 6 min left", "embeddings: 45 of 400, 11 %, 6 min left"]
    assert 10 < len(said) < 16 and said[-1] == "no end: 7 so far"


def test_the_bar_of_a_rollout_is_a_line_each_minute_in_a_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """As the published guide shows it, for hours."""
    with caplog.at_level(logging.INFO), Progress("Generating Rollout Epochs", 16, as_bar=True) as bar:
        for second in range(10, 2 * 3600, 10):
            clock.now += 10
            bar.set(int(second / 536.61))
    said = caplog.messages
    assert len(said) >= 2 * 60 - 1
    first = next(line for line in said if "1/16" in line)
    assert "1/16" not in said[0] and "0/16" in said[0]
    times = r"\[0[89]:\d\d<2:[12]\d:\d\d, 5\d\d\.\d\ds/it\]"
    assert re.fullmatch(rf"Generating Rollout Epochs:   6%\|▋\s*\| 1/16 {times}", first)


def test_what_was_done_before_is_no_measure_of_speed(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Progress("file.bin", 10**9, unit="B", done=9 * 10**8) as bar:
        clock.now += 100
        bar.set(910_000_000)
    assert [record.getMessage() for record in caplog.records] == ["file.bin: 910.0 MB of 1000.0 MB, 91 %, 15 min left"]


def test_on_a_terminal_there_is_a_bar_and_no_line(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    screen = terminal(monkeypatch)
    with caplog.at_level(logging.INFO):
        for _ in tracked(range(3), "embeddings", unit="file"):
            clock.now += 100
    assert "embeddings: 100%" in screen.getvalue() and "3/3" in screen.getvalue()
    assert caplog.records == []
    shown = screen.getvalue()
    with Progress("hidden", 3, is_shown=False) as hidden:
        hidden.update(3)
    assert screen.getvalue() == shown


@pytest.mark.parametrize("closes_at", ["start", "update", "end"])
def test_a_terminal_that_is_closed_ends_the_bar_only(monkeypatch: pytest.MonkeyPatch, closes_at: str) -> None:
    screen, now = terminal(monkeypatch), "start"

    def write(text: str) -> int:
        if now == closes_at:
            raise BrokenPipeError(32, "Broken pipe")
        return len(text)

    monkeypatch.setattr(screen, "write", write)
    with Progress("training", 10**6) as bar:
        now = "update"
        if bar._bar is not None:
            bar._bar.mininterval = 0
        bar.update(1)
        bar.update(1)
        now = "end"
    assert bar.done == 2 and bar._bar is None
    with ThreadPoolExecutor(1) as other:  # whose bars and lines wait for the same lock
        assert other.submit(_is_free, tqdm.get_lock()).result()


def _is_free(lock: Any) -> bool:
    found: bool = lock.acquire(timeout=HANG_S)
    if found:
        lock.release()
    return found


def test_a_start_that_takes_long_says_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watchdog = Watchdog(1800, str(tmp_path))
    watchdog.close()  # its thread: this test looks itself
    with caplog.at_level(logging.INFO):
        watchdog.beat("building the model", long=True)
        for late in (10, 16, 20, 31, 50, 65):
            watchdog._look(watchdog._began + late, late_by=0)
        watchdog.beat("iteration 2, backward")
        watchdog._look(watchdog._began + 100, late_by=0)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["building the model, for 16 s so far", "building the model, for 50 s so far"]


RECORD = logging.makeLogRecord({"msg": "a line"})


def _hold(held: "multiprocessing.connection.Connection") -> None:  # type: ignore[name-defined]
    with tqdm.get_lock():
        held.send(True)
        time.sleep(HANG_S)


@pytest.fixture
def log_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Terminal]:
    """The log's terminal beside a bar, with a first line; it does not wait long for a bar to be drawn."""
    monkeypatch.setattr(logs, "_DRAWN_S", 0.1)
    terminal = _Terminal(io.StringIO())
    with tqdm(total=1, file=io.StringIO()):
        terminal.emit(RECORD)
        yield terminal


def emits_a_second_line(terminal: _Terminal) -> bool:
    late = threading.Thread(target=terminal.emit, args=(RECORD,), daemon=True)
    late.start()
    late.join(HANG_S)
    return bool(terminal.stream.getvalue().count("a line") == 2)


def test_a_process_that_is_killed_while_it_draws_stops_no_other(log_terminal: _Terminal) -> None:
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_hold, args=(there,))
    child.start()
    assert here.poll(HANG_S)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    assert emits_a_second_line(log_terminal)


def test_a_bar_that_failed_while_it_was_drawn_stops_no_line(log_terminal: _Terminal) -> None:
    with tqdm.get_lock():
        assert emits_a_second_line(log_terminal)
