# SPDX-License-Identifier: Apache-2.0
"""Lines of the log beside progress bars."""

import io
import logging
import multiprocessing
import os
import signal
import threading
import time

from tqdm import tqdm

from imaginaire.log import _Terminal
from tests.programs import HANG_S


def _hold(held: "multiprocessing.connection.Connection") -> None:  # type: ignore[name-defined]
    with tqdm.get_lock():
        held.send(True)
        time.sleep(HANG_S)


def test_a_process_that_is_killed_while_it_draws_stops_no_other() -> None:
    terminal = _Terminal(io.StringIO())
    record = logging.makeLogRecord({"msg": "a line"})
    with tqdm(total=1, file=io.StringIO()):
        terminal.emit(record)
        here, there = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_hold, args=(there,))
        child.start()
        assert here.poll(HANG_S)
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        late = threading.Thread(target=terminal.emit, args=(record,), daemon=True)
        late.start()
        late.join(HANG_S)
        assert not late.is_alive()
    assert terminal.stream.getvalue().count("a line") == 2


def test_a_bar_that_failed_while_it_was_drawn_stops_no_line() -> None:
    terminal = _Terminal(io.StringIO())
    record = logging.makeLogRecord({"msg": "a line"})
    with tqdm(total=1, file=io.StringIO()):
        terminal.emit(record)
        with tqdm.get_lock():
            late = threading.Thread(target=terminal.emit, args=(record,), daemon=True)
            late.start()
            late.join(HANG_S)
            assert not late.is_alive()
    assert terminal.stream.getvalue().count("a line") == 2
