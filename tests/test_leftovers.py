# SPDX-License-Identifier: Apache-2.0
"""What the tests themselves are held to: nothing left in the temporary folder, and no clock on a wall."""

import ast
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from tests.leftovers import Leftovers

CLOCKS = {"time", "monotonic", "perf_counter", "monotonic_ns", "perf_counter_ns"}  # of the module `time`


def test_a_run_that_leaves_something_in_the_temporary_folder_fails() -> None:
    with mock.patch.dict(os.environ), mock.patch.object(tempfile, "tempdir", tempfile.tempdir):
        for prefix, expected in (("pymp-", pytest.ExitCode.OK), ("left-", pytest.ExitCode.TESTS_FAILED)):
            usual, session = tempfile.gettempdir(), mock.Mock(exitstatus=pytest.ExitCode.OK)
            plugin = Leftovers()
            left = Path(tempfile.mkdtemp(prefix=prefix))
            assert left.parent.parent == Path(usual)
            plugin.pytest_sessionfinish(session)
            assert session.exitstatus == expected
            plugin.pytest_unconfigure()
            assert tempfile.gettempdir() == usual and not left.exists()


def _clocks(node: ast.AST) -> list[str]:
    calls = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
    return [
        call.attr
        for call in calls
        if isinstance(call, ast.Attribute) and call.attr in CLOCKS and getattr(call.value, "id", "") == "time"
    ]


def test_no_test_asserts_wall_clock_time() -> None:
    """A machine may be busy: count the work, or take `time.process_time`."""
    texts = {path: text for path in Path("tests").rglob("*.py") if "time." in (text := path.read_text())}
    asserts = [(path, node) for path, text in texts.items() for node in ast.walk(ast.parse(text))]
    found = [f"{path}:{node.lineno}" for path, node in asserts if isinstance(node, ast.Assert) and _clocks(node)]
    assert found == []
