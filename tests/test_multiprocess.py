# SPDX-License-Identifier: Apache-2.0
"""The helper that runs ranks: values come back, and failures are told by rank."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.multiprocess import RankError, run_distributed
from tests.programs import HANG_S

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
        time.sleep(HANG_S)


def _die_on_rank_0() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(HANG_S)


def test_values_come_back_in_rank_order() -> None:
    assert run_distributed(_sum_of_ranks, world_size=2, args=(10,)) == [(0, 21.0, 1), (1, 21.0, 1)]


def test_an_error_is_raised_again_with_rank_name_and_traceback() -> None:
    with pytest.raises(RankError, match="rank 1 of 2: ValueError: the second rank has had enough") as caught:
        run_distributed(_fail_on_rank_1, world_size=2)
    assert caught.value.rank == 1
    assert "in _fail_on_rank_1" in str(caught.value)


def test_a_hang_ends_with_the_rank_and_its_stack() -> None:
    run_distributed(os.getpid, world_size=2)  # the imports, which take long on a busy machine
    with pytest.raises(TimeoutError, match=r"rank 1 of 2 still ran after 20 s(?s:.*)in _hang_on_rank_1"):
        run_distributed(_hang_on_rank_1, world_size=2, timeout=20)


def test_a_killed_rank_is_named_by_its_signal() -> None:
    with pytest.raises(RankError, match="rank 0 of 2: ended by signal 9"):
        run_distributed(_die_on_rank_0, world_size=2)
