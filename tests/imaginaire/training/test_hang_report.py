# SPDX-License-Identifier: Apache-2.0
"""A rank that does not come is named, with where it is instead."""

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from examples.minimal.data import Waves
from imaginaire import distributed
from imaginaire.config.schema import TrainerConfig
from imaginaire.distributed import places
from imaginaire.distributed.places import EXIT_TIMEOUT, RankReport, Watchdog, lost_peer
from imaginaire.errors import ConfigError, DataError
from imaginaire.training.trainer import ImaginaireTrainer
from tests.multiprocess import RankError, run_distributed
from tests.programs import HANG_S
from tests.training import run_dir, saved, train

QUICK = ["trainer.run_validation=False", "dataloader_train.num_workers=0", "trainer.max_iter=50"]
HERE = "tests.imaginaire.training.test_hang_report"


def _seen(rank: int, text: str, since: float = 0.0, at: float = 100.0, host: str = "a") -> RankReport:
    return RankReport(rank, host, text, since, at)


def test_a_table_begins_with_those_who_differ() -> None:
    entries = [_seen(r, "iteration 7, backward", since=60 + r, host=f"node{r // 2}") for r in range(8)]
    entries[5] = _seen(5, "iteration 7, waiting for data", since=40)
    first, second = places.table(entries, now=100)
    assert first == "rank 5 (a): iteration 7, waiting for data, for 60 s"
    assert second == "ranks 0-4, 6-7 (node0, node1, node2 and 1 more): iteration 7, backward, for 40 s"


def test_a_table_says_who_does_not_answer() -> None:
    entries = [_seen(0, "backward"), _seen(1, "backward", at=30), None]
    lines = places.table(entries, now=100)
    assert lines[0] == "rank 2: never heard of"
    assert "rank 1 (a): backward" in lines[1] and lines[1].endswith("no answer, last heard of 70 s ago")
    assert "no answer" not in lines[2]
    assert ["no answer" in line for line in places.table(entries[:2], 100, answered={1})] == [True, False]


def test_the_dead_are_told_from_those_that_left() -> None:
    entries = [_seen(rank, "backward") for rank in range(4)]
    entries[2] = _seen(2, "left after OSError: no disk")
    dead, left = "rank 1 (a): killed from outside", "rank 2 (a) left after OSError: no disk"
    found = places.gone(entries, 100, answered={0, 3})
    assert [line for line in found if left in line] and [line for line in found if dead in line] and len(found) == 2
    assert places.gone(entries, 100, answered=range(4)) == []


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dist.TCPStore]]:
    """A group of two, of which this process is rank 1; whoever empties the list ends the server of its store."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    monkeypatch.setattr(places, "_board", places.Board(client, rank=1, world_size=2))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "the-first-machine")
    servers = [server]
    del server
    yield servers
    servers.clear()


def test_without_the_store_a_rank_reports_alone(
    two_ranks: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = Watchdog(1, str(tmp_path))  # a short limit: it looks four times a second
    watchdog.beat("iteration 7, backward", long=True)
    two_ranks.clear()
    watchdog.ask("Connection reset by peer")
    watchdog.ask("and again")
    watchdog.close()
    (report,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert report.startswith("hang report of rank 1 alone (Connection reset by peer)")
    assert "the-first-machine" in report and "iteration 7, backward" in report
    assert "Connection reset" in (tmp_path / "hang" / "rank_1.txt").read_text()


def test_ranks_meet_in_the_store_without_a_collective(two_ranks: list[Any]) -> None:
    other = places.Board(dist.TCPStore("127.0.0.1", two_ranks[0].port, None, False), rank=0, world_size=2)
    mine = places._board
    assert mine is not None
    assert mine.exchange("first", "here", timeout_s=0) is None
    assert other.exchange("first", "there", timeout_s=60) == ["there", "here"]
    two_ranks.clear()
    assert mine.exchange("second", "here", timeout_s=60) is None


def test_alarms_that_ranks_raise_at_one_moment_are_one(two_ranks: list[Any]) -> None:
    other = places.Board(dist.TCPStore("127.0.0.1", two_ranks[0].port, None, False), rank=0, world_size=2)
    mine = places._board
    assert mine is not None
    alarm = places.Alarm("rank 1: no progress", 100.0)
    mine.answer(alarm)
    other.answer(places.Alarm("rank 0: no progress", 100.01))
    assert 0 in other.answered(alarm)  # a store waits for what the same one asks behind what it sets
    assert mine.answered(alarm) == {0, 1}
    assert mine.answered(places.Alarm("of a later hang", 200.0)) == set()


def test_what_takes_long_has_a_longer_limit_and_a_stopped_process_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    monkeypatch.setattr(Watchdog, "_end", lambda self: ends.append(places.here().text))
    limit = TrainerConfig().timeout_period
    assert limit == 1800
    watchdog = Watchdog(limit, str(tmp_path))
    watchdog.close()  # its thread: this test looks itself
    start = time.monotonic()
    watchdog.beat("saving", long=True)
    watchdog._look(start + 3 * limit, late_by=0)
    assert ends == []
    watchdog._look(start + 5 * limit, late_by=0)
    watchdog.beat("a step")
    watchdog._look(start + 2 * limit, late_by=2 * limit)
    assert ends == ["saving"]
    watchdog._look(start + 4 * limit, late_by=0)
    assert ends == ["saving", "a step"]


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


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", "1", "MASTER_ADDR expected.*Start with torchrun"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "soon", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC='soon'"),
    ],
)
def test_what_forms_no_group_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        distributed.init()


# --- several processes


class Unread(Waves):
    """The second rank does not get its fifth sample: it sleeps, fails, or is killed as where memory runs out."""

    def __init__(self, how: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.how, self.calls = how, 0

    def __getitem__(self, index: int) -> Any:
        if distributed.rank() == 1 and self.calls == 4:
            if self.how == "sleeps":
                time.sleep(HANG_S)
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the disk is gone")
        self.calls += 1
        return super().__getitem__(index)


def _late_at_a_barrier() -> str:
    store = dist.distributed_c10d._get_default_store()
    if distributed.rank() == 1:
        places.note("reading a large file")
        places.publish()
        store.set("published", "")
        store.wait(["waited in vain"])
        distributed.barrier("all have read")  # meets what the other still waits for
        return ""
    store.wait(["published"])
    try:
        distributed.barrier("all have read", timeout_s=1)
    except RuntimeError as error:
        return str(error)
    finally:
        store.set("waited in vain", "")
    return "no error"


def _end_as_torchrun_does(root: Path) -> str:
    """The error of a rank that loses another, and gets torchrun's signal at once."""
    ask = Watchdog.ask

    def signalled(self: Watchdog, reason: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        ask(self, reason)

    with mock.patch.object(Watchdog, "ask", signalled):
        try:
            _train(root, "dies", "trainer.timeout_period=20")
        except RuntimeError as error:
            return str(error)
    return "no error"


def _train(root: Path, how: str, *overrides: str) -> int:
    data_set = [f"dataloader_train.dataset._target_={HERE}.Unread", f"+dataloader_train.dataset.how={how}"]
    return train(root, [*QUICK, *data_set, *overrides])


_validate = ImaginaireTrainer.validate


def _validate_unless_at_the_start(self: Any, *args: Any) -> None:
    if self.iteration:
        _validate(self, *args)


class FailsInValidation(Waves):
    def __getitem__(self, index: int) -> Any:
        if distributed.rank() == 1:
            raise OSError("the validation data is gone")
        return super().__getitem__(index)


def _late_then_failing(root: Path) -> tuple[str, str]:
    late = _late_at_a_barrier()
    data = [f"dataloader_val.dataset._target_={HERE}.FailsInValidation", "trainer.run_validation=True"]
    # not at the start, where nothing is trained yet
    skipped = mock.patch.object(ImaginaireTrainer, "validate", _validate_unless_at_the_start)
    with skipped, pytest.raises((OSError, DataError), match=r"data is gone|Rank 1 cannot read the validation data"):
        train(root / "validation", [*QUICK, *data])
    try:
        _train(root, "fails")
    except (OSError, RuntimeError) as error:
        return late, f"{type(error).__name__}: {error}"
    return late, "no error"


@pytest.mark.slow
def test_a_late_rank_and_a_failed_one_are_named_by_the_others(tmp_path: Path) -> None:
    (late, _), (_, failed) = run_distributed(_late_then_failing, 2, args=(tmp_path,))
    assert "rank 0 waited in vain at the barrier 'all have read' (limit: 1 s)" in late
    assert "  rank 1 (" in late and "reading a large file" in late
    assert late.endswith("missing at barrier 'all have read': rank 1")
    assert saved(tmp_path / "validation")["trainer"]["iteration"] == 4, "what was trained before the validation failed"
    assert failed == "OSError: the disk is gone"
    log = (run_dir(tmp_path) / "stdout.log").read_text()
    assert "left after OSError: the disk is gone" in log[log.index("hang report (rank 0") :], log
    assert (run_dir(tmp_path) / "hang" / "rank_0.txt").exists()


@pytest.mark.slow
def test_a_killed_rank_is_singled_out_although_torchrun_ends_the_others(tmp_path: Path) -> None:
    error, _ = run_distributed(_end_as_torchrun_does, 2, args=(tmp_path,), lost={1})
    assert "onnection" in error
    log = (run_dir(tmp_path) / "stdout.log").read_text()
    report = log[log.index("hang report (rank 0: ") :].splitlines()
    assert report[1].startswith("Most likely dead: rank 1 (")
    assert "no answer" in report[3] and "rank 1 (" in report[3] and "no answer" not in report[4]
    assert "saving after this step" not in log


@pytest.mark.slow
def test_a_hang_report_says_which_rank_waits_where(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=f"exit code {EXIT_TIMEOUT}"):
        run_distributed(_train, 2, args=(tmp_path, "sleeps", "trainer.timeout_period=5"))
    folder = run_dir(tmp_path)
    log = (folder / "stdout.log").read_text()
    report = log[log.index("hang report (rank") :].splitlines()
    assert "no progress for 5 s (trainer.timeout_period=5)" in report[0]
    assert any(line.startswith("  rank 1 (") and "iteration 2, waiting for data, for " in line for line in report[1:3])
    assert any(line.startswith("  rank 0 (") and "iteration 2, backward, for" in line for line in report[1:3])
    assert "no answer" not in log and report[3].endswith(f"{folder / 'hang'}.")
    waiting, sleeping = ((folder / "hang" / f"rank_{rank}.txt").read_text() for rank in range(2))
    assert "in __getitem__" in sleeping and "place: iteration 2, waiting for data" in sleeping
    assert "in __getitem__" not in waiting and "place: iteration 2, backward" in waiting
