# SPDX-License-Identifier: Apache-2.0
"""Lines of the log beside progress bars."""

import io
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from tqdm import tqdm

from imaginaire import log
from imaginaire.log import _Terminal
from tests.programs import HANG_S

RECORD = logging.makeLogRecord({"msg": "a line"})


def _hold(held: "multiprocessing.connection.Connection") -> None:  # type: ignore[name-defined]
    with tqdm.get_lock():
        held.send(True)
        time.sleep(HANG_S)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Terminal]:
    """The log's terminal beside a bar, with a first line; it does not wait long for a bar to be drawn."""
    monkeypatch.setattr(log, "_DRAWN_S", 0.1)
    terminal = _Terminal(io.StringIO())
    with tqdm(total=1, file=io.StringIO()):
        terminal.emit(RECORD)
        yield terminal


def emits_a_second_line(terminal: _Terminal) -> bool:
    late = threading.Thread(target=terminal.emit, args=(RECORD,), daemon=True)
    late.start()
    late.join(HANG_S)
    return bool(terminal.stream.getvalue().count("a line") == 2)


def test_a_process_that_is_killed_while_it_draws_stops_no_other(terminal: _Terminal) -> None:
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_hold, args=(there,))
    child.start()
    assert here.poll(HANG_S)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    assert emits_a_second_line(terminal)


def test_a_bar_that_failed_while_it_was_drawn_stops_no_line(terminal: _Terminal) -> None:
    with tqdm.get_lock():
        assert emits_a_second_line(terminal)
