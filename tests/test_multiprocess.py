# SPDX-License-Identifier: Apache-2.0
"""The helper that runs ranks: values come back, and failures are told by rank."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.multiprocess import RankError, run_distributed

pytestmark = pytest.mark.slow


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
        time.sleep(600)


def _die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def _leave_pid_and_sleep(folder: Path) -> None:
    (folder / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    time.sleep(600)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests.multiprocess import run_distributed\n"
        "from tests.test_multiprocess import _leave_pid_and_sleep\n"
        f"run_distributed(_leave_pid_and_sleep, world_size=2, args=(Path({str(tmp_path)!r}),))\n"
    )
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # its folder stays, as it has no moment to tidy up
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, env=environment) as parent:
        until(lambda: len([p for p in tmp_path.glob("*.pid") if p.read_text()]) == 2)
        ranks = [int(p.read_text()) for p in tmp_path.glob("*.pid")]
        parent.kill()
    until(lambda: not any(_runs(rank) for rank in ranks))


def until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail("it did not come about")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_values_come_back_in_rank_order() -> None:
    assert run_distributed(_sum_of_ranks, world_size=2, args=(10,)) == [(0, 21.0, 1), (1, 21.0, 1)]


def test_the_environment_is_left_as_it_was() -> None:
    before = dict(os.environ)
    assert run_distributed(_sum_of_ranks, world_size=1, args=(3,)) == [(0, 3.0, 1)]
    assert dict(os.environ) == before


def test_an_error_is_raised_again_with_rank_name_and_traceback() -> None:
    with pytest.raises(RankError, match="rank 1 of 2: ValueError: the second rank has had enough") as caught:
        run_distributed(_fail_on_rank_1, world_size=2)
    assert caught.value.rank == 1
    assert "in _fail_on_rank_1" in str(caught.value)


def test_a_hang_ends_with_the_rank_and_its_stack() -> None:
    run_distributed(os.getpid, world_size=2)  # the imports, which take long on a busy machine
    with pytest.raises(TimeoutError, match=r"rank 1 of 2 still ran after 8 s(?s:.*)in _hang_on_rank_1"):
        run_distributed(_hang_on_rank_1, world_size=2, timeout=8)


def test_a_killed_rank_is_named_by_its_signal() -> None:
    with pytest.raises(RankError, match="rank 0 of 2: ended by signal 9"):
        run_distributed(_die_on_rank_0, world_size=2)
