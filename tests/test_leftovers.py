# SPDX-License-Identifier: Apache-2.0
"""Rules of the tests themselves: nothing left in the temporary folder, no wall clock, no product code that runs in
tests alone; and values of ranks come back, and failures with their rank."""

import ast
import os
import re
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.leftovers import Leftovers
from tests.multiprocess import RankError, run_distributed
from tests.programs import HANG_S, warm_python

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
            plugin.remove()
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


# Named nowhere but where they are defined, in tests and in a caller's own program.
CALLED_FROM_OUTSIDE = {
    *("make_freezable", "PowerEMAConfig", "NVTXConfig", "reset_dtype"),  # published names
    *("create_video_guardrail_runner", "run_text_guardrail"),
    "ignore_aliases",  # PyYAML calls it
    *("redirect_request", "handle_exit"),  # urllib and uvicorn call them
    "load_bytes",  # torch calls it
}
DEFINED = re.compile(r"^\s*(?:def|class) (\w+)", re.MULTILINE)
HOOKS = ("on_", "visit_", "check_", "__")  # called by name, or because of it


def test_product_code_is_used_by_more_than_tests() -> None:
    """Goldens and tests are compared with code that runs. A name that is common escapes this."""
    folders = ("imaginaire", "cosmos_predict2", "scripts", "examples", "benchmarks")
    texts = {path: path.read_text() for folder in folders for path in Path(folder).rglob("*.py")}
    words = Counter(word for text in texts.values() for word in re.findall(r"\w+", text))
    words.update(word for path in Path("documentations").rglob("*.md") for word in re.findall(r"\w+", path.read_text()))
    once = {name for name, count in words.items() if count == 1 and not name.startswith(HOOKS)}
    found = {
        node.name
        for path, text in texts.items()
        if path.parts[0] in folders[:2] and once.intersection(DEFINED.findall(text))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name in once
        if not any("buildable" in ast.unparse(decorator) for decorator in node.decorator_list)  # called by their name
    }
    assert found == CALLED_FROM_OUTSIDE


def _sum_of_ranks(offset: int) -> tuple[int, float, int]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), torch.get_num_threads()


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank has had enough")
    dist.all_reduce(torch.zeros(1))


def _hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(HANG_S)


def _die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANG_S)


@pytest.mark.slow
def test_values_come_back_in_rank_order() -> None:
    assert run_distributed(_sum_of_ranks, world_size=2, args=(10,)) == [(0, 21.0, 1), (1, 21.0, 1)]


@pytest.mark.slow
def test_an_error_is_raised_again_with_rank_name_and_traceback() -> None:
    with pytest.raises(RankError, match="rank 1 of 2: ValueError: the second rank has had enough") as caught:
        run_distributed(_fail_on_rank_1, world_size=2)
    assert caught.value.rank == 1
    assert "in _fail_on_rank_1" in str(caught.value)


@pytest.mark.slow
def test_a_hang_ends_with_the_rank_and_its_stack() -> None:
    warm_python()  # the imports, which take long on a busy machine
    with pytest.raises(TimeoutError, match=r"rank 1 of 2 still ran after 10 s(?s:.*)in _hang_on_rank_1"):
        run_distributed(_hang_on_rank_1, world_size=2, timeout=10)


@pytest.mark.slow
def test_a_killed_rank_is_named_by_its_signal() -> None:
    with pytest.raises(RankError, match="rank 0 of 2: ended by signal 9"):
        run_distributed(_die_on_rank_0, world_size=2)
