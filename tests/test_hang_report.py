# SPDX-License-Identifier: Apache-2.0
"""A rank that does not come is named, with where it is instead."""

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.minimal.data import Waves
from imaginaire import distributed, places
from imaginaire.errors import ConfigError
from imaginaire.places import Place, Seen
from imaginaire.watchdog import EXIT_TIMEOUT, lost_peer
from tests.multiprocess import RankError, run_distributed
from tests.training import run_dir, train

QUICK = ["trainer.run_validation=False", "dataloader_train.num_workers=0", "trainer.max_iter=50"]
HERE = "tests.test_hang_report"


def _seen(rank: int, text: str, since: float = 0.0, at: float = 100.0, host: str = "a") -> Seen:
    return Seen(rank, host, Place(text, since), at)


def test_a_table_begins_with_those_who_differ() -> None:
    entries = [_seen(r, "iteration 7, backward", since=60 + r, host=f"node{r // 2}") for r in range(8)]
    entries[5] = _seen(5, "iteration 7, waiting for data", since=40)
    first, second = places.table(entries, now=100)
    assert first == "rank 5 (a): iteration 7, waiting for data, for 60 s"
    assert second == "ranks 0-4, 6-7 (node0, node1, node2 and 1 more): iteration 7, backward, for 33 to 40 s"


def test_a_table_says_who_does_not_answer() -> None:
    entries = [_seen(0, "backward"), _seen(1, "backward", at=30), None]
    lines = places.table(entries, now=100)
    assert lines[0] == "rank 2: never heard of"
    assert "rank 1 (a): backward" in lines[1] and lines[1].endswith("no answer, last heard of 70 s ago")
    assert "no answer" not in lines[2]
    assert ["no answer" in line for line in places.table(entries[:2], 100, answered={1})] == [True, False]


def test_places_nest() -> None:
    places.note("outside")
    outside = places.here()
    with pytest.raises(ValueError):
        with places.at("barrier 'x'"):
            assert places.here().text == "barrier 'x'"
            raise ValueError
    assert places.here() is outside


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[../gloo/transport/tcp/pair.cc:554] Connection closed by peer [127.0.0.1]:52613", True),
        ("Timed out waiting 1800000ms for recv operation to complete", True),
        ("rank 0 waited in vain at the barrier 'x'", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_the_loss_of_a_peer_is_told_from_other_errors(text: str, expected: bool) -> None:
    assert lost_peer(RuntimeError(text)) is expected
    assert not lost_peer(ValueError(text))


def test_a_port_in_use_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(ConfigError, match=rf"Port {port} .* in use \(MASTER_PORT.*Take another, \d+ is free"):
            distributed.init()


def test_a_missing_rendezvous_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR expected.*Start with torchrun"):
        distributed.init()


def test_a_wrong_time_limit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "soon")
    with pytest.raises(ConfigError, match="TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC='soon'"):
        distributed.init()


def test_free_ports_are_free() -> None:
    with socket.socket() as server:
        server.bind(("", distributed.free_port()))


# --- several processes


class SleepsInData(Waves):
    """The second rank never gets its fifth sample."""

    def __getitem__(self, index: int) -> Any:
        if distributed.rank() == 1 and self.calls == 4:
            time.sleep(120)
        self.calls += 1
        return super().__getitem__(index)

    calls = 0


class FailsInData(SleepsInData):
    def __getitem__(self, index: int) -> Any:
        if distributed.rank() == 1 and self.calls == 4:
            raise OSError("the disk is gone")
        self.calls += 1
        return Waves.__getitem__(self, index)


def _late_at_a_barrier() -> str:
    if distributed.rank() == 1:
        places.note("reading a large file")
        places.publish()
        time.sleep(3)
        distributed.barrier("all have read")  # meets what the other still waits for
        return ""
    try:
        distributed.barrier("all have read", timeout_s=1)
    except RuntimeError as error:
        return str(error)
    return "no error"


def _train(root: Path, data_set: str, *overrides: str) -> int:
    torch.set_num_threads(1)
    return train(root, [*QUICK, f"dataloader_train.dataset._target_={HERE}.{data_set}", *overrides])


def _late_then_failing(root: Path) -> tuple[str, str]:
    late = _late_at_a_barrier()
    try:
        _train(root, "FailsInData")
    except (OSError, RuntimeError) as error:
        return late, f"{type(error).__name__}: {error}"
    return late, "no error"


@pytest.mark.slow
def test_a_late_rank_and_a_failed_one_are_named_by_the_others(tmp_path: Path) -> None:
    (late, _), (_, failed) = run_distributed(_late_then_failing, 2, args=(tmp_path,), timeout=240)
    assert "rank 0 waited in vain at the barrier 'all have read' (limit: 1 s)" in late
    assert "  rank 1 (" in late and "reading a large file" in late
    assert late.endswith("missing at barrier 'all have read': rank 1")
    assert failed == "OSError: the disk is gone"
    log = (run_dir(tmp_path) / "stdout.log").read_text()
    assert "left after OSError: the disk is gone" in log[log.index("hang report (rank 0") :], log
    assert (run_dir(tmp_path) / "hang" / "rank_0.txt").exists()


@pytest.mark.slow
def test_a_hang_report_says_which_rank_waits_where(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=f"exit code {EXIT_TIMEOUT}"):
        run_distributed(_train, 2, args=(tmp_path, "SleepsInData", "trainer.timeout_period=3"), timeout=240)
    folder = run_dir(tmp_path)
    log = (folder / "stdout.log").read_text()
    report = log[log.index("hang report (rank") :].splitlines()
    assert "no progress for 3 s (trainer.timeout_period)" in report[0]
    assert any(line.startswith("  rank 1 (") and "iteration 2, waiting for data, for " in line for line in report[1:3])
    assert any(line.startswith("  rank 0 (") and "iteration 2, backward, for" in line for line in report[1:3])
    assert "no answer" not in log and report[3].endswith(f"{folder / 'hang'}.")
    waiting, sleeping = ((folder / "hang" / f"rank_{rank}.txt").read_text() for rank in range(2))
    assert "in __getitem__" in sleeping and "place: iteration 2, waiting for data" in sleeping
    assert "in __getitem__" not in waiting and "place: iteration 2, backward" in waiting
