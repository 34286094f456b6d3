# SPDX-License-Identifier: Apache-2.0
"""The supervisor and real processes that speak as workers do: deaths that speak against jobs, or against a reward."""

import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_predict2.rl.rewards.service import supervisor as supervisors
from cosmos_predict2.rl.rewards.service.settings import DecodeSettings, RewardSettings, ServiceSettings, open_queue
from cosmos_predict2.rl.rewards.service.supervisor import (
    BROKEN,
    READY,
    STARTING,
    STOPPED,
    WAITING,
    Patience,
    Supervisor,
)
from tests.programs import HANG_S

# Without torch, so that a start takes a moment: the lease, the turns and the events are those of a worker.
WORKER = """
import json, os, sys, threading, time
from cosmos_predict2.rl.rewards.service.queue import Limits
from cosmos_predict2.rl.rewards.service.sqlite_queue import SQLiteQueue

told = json.loads(sys.stdin.readline())
threading.Thread(target=lambda: (sys.stdin.readline(), os._exit(0)), daemon=True).start()
reward = told["settings"]["rewards"][0]["reward_type"]
queue = SQLiteQueue(told["settings"]["queue"], Limits())
def report(**event): print(json.dumps(event), flush=True)
if reward == "torn": os._exit(1)
report(event="ready")
while True:
    jobs = queue.lease(reward, told["name"], 4, 30.0)
    if not jobs:
        time.sleep(0.01)
        continue
    report(event="alive")
    if any(job.body == b"die" for job in jobs): os.kill(os.getpid(), 9)
    if any(job.body == b"hang" for job in jobs): time.sleep(1000)
    for job in jobs: queue.finish(job, told["name"], "{}", told["version"])
    report(event="scored", clips=len(jobs), done=len(jobs), failed=0, total_s=0, decode_s=0, score_s=0)
"""


class Process:
    """A worker's process as its supervisor sees it: it prints these lines and ends with a code."""

    def __init__(self, lines: Sequence[str] = (), code: int = 0) -> None:
        self.stdin, self.stdout, self.code = io.StringIO(), io.StringIO("".join(f"{line}\n" for line in lines)), code
        self.sent, self.kills = "", 0
        self.stdin.close = lambda: None  # type: ignore[method-assign]

    def kill(self) -> None:
        self.kills += 1

    def wait(self) -> int:
        return self.code


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    """A supervisor that is not started, of one reward on each of these devices."""
    made: list[Supervisor] = []

    def make(*devices: str, **patience: float) -> Supervisor:
        options: dict[str, Any] = dict(arguments={"k": 1}, model_path="m", dtype="float16", max_batch=3)
        reward = RewardSettings(reward_type="mine=no:thing", device=list(devices or ("cpu",)), timeout_s=7.0, **options)
        kept: dict[str, Any] = dict(lease_s=9.0, max_attempts=4, grace_s=0.05, decode=DecodeSettings(model_path="tiny"))
        settings = ServiceSettings(queue=str(tmp_path / "queue.sqlite3"), rewards=[reward], **kept)
        queue = open_queue(settings.queue, settings.limits())
        made.append(Supervisor(settings, queue, Patience(**patience)))
        return made[-1]

    yield make
    for supervisor in made:
        supervisor.queue.close()


SCORED = dict(event="scored", clips=1, done=1, failed=0, total_s=1, decode_s=0, score_s=1)


def test_a_worker_is_started_again_later_each_time_until_its_reward_is_broken(
    alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = alone(first_wait_s=0.5, longest_wait_s=3.0, deaths=3, pause_s=60.0)
    (slot,) = supervisor.slots
    # why a process ended: with jobs, without, as one that is watched no more, unfit, and after a portion
    lives = [*["jobs"] * 4, "scored", "alone", "torn", "alone", "alone", "scored", "jobs", "unfit", "end"]
    seen: list[Any] = []

    def live() -> tuple[str, bool]:
        kind = lives.pop(0)
        if kind == "torn":
            raise OSError("gone")
        if kind == "scored":
            slot._take(SCORED)
        slot._died_with_jobs = kind == "jobs"
        return kind, kind == "unfit"

    def wait(seconds: float) -> None:
        seen.append((slot.reason, slot.state, seconds))

    monkeypatch.setattr(slot, "_live", live)
    is_over = lambda: lives == []  # noqa: E731
    supervisor.stopping = SimpleNamespace(is_set=is_over, wait=wait)  # type: ignore[assignment]
    slot._run()
    assert seen == [
        *(("jobs", WAITING, wait_s) for wait_s in (0.5, 1.0, 2.0, 3.0)),
        ("scored", WAITING, 0.5),
        ("alone", WAITING, 1.0),
        ("OSError: gone", BROKEN, 60.0),
        ("alone", BROKEN, 60.0),  # one more try
        ("alone", BROKEN, 60.0),
        *(("scored", WAITING, 0.5), ("jobs", WAITING, 1.0), ("unfit", BROKEN, 60.0)),
    ]
    assert slot.state == STOPPED


@pytest.mark.parametrize(("is_stopping", "code"), [(False, -9), (False, 3), (True, 0)])
def test_a_process_is_told_its_settings_and_what_it_says_is_taken(
    is_stopping: bool, code: int, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, calls, released = alone("cpu", "cuda:1"), [], []
    slot = supervisor.slots[1]
    scored = dict(event="scored", clips=20, done=4, failed=2, total_s=1, decode_s=2, score_s=3)
    events = [dict(event="ready"), dict(event="alive"), scored]
    process = Process(["no JSON", *map(json.dumps, events)], code)
    popen = lambda *words, **named: calls.append((words, named)) or process  # noqa: E731
    monkeypatch.setattr(supervisors.subprocess, "Popen", popen)
    release = lambda *words, **named: released.append((words, named)) or 2  # noqa: E731
    monkeypatch.setattr(supervisor.queue, "release", release)
    if is_stopping:
        supervisor.stopping.set()
    slot._busy_until, slot.reason = 1.0, "of the one before"
    reason, is_unfit = slot._live()
    assert (reason, is_unfit) == {
        -9: ("its process was ended by signal 9", False),
        3: ("its process ended with code 3", True),
        0: ("its process ended with code 0", False),
    }[code]
    sent = json.loads(process.stdin.getvalue())
    assert released == [(("mine", sent["name"], reason), dict(has_died=not is_stopping))] and slot._died_with_jobs
    assert process.kills == 1 + is_stopping
    assert calls[0][0][0] == [sys.executable, "-m", "cosmos_predict2.rl.rewards.service.worker"]
    assert calls[0][1]["env"]["PYTHONPATH"].startswith(f"{supervisors.ROOT}:") and calls[0][1]["start_new_session"]
    assert (slot.state, slot.reason, slot._busy_until) == (READY, "", None)
    told, (reward,) = sent["settings"], sent["settings"]["rewards"]
    assert sent["device"] == "cuda:1" and sent["version"] == slot.version and told["token"] == ""
    assert told["queue"] == supervisor.settings.queue and told["decode"]["model_path"] == "tiny"
    assert dict(lease_s=9.0, max_attempts=4).items() <= told.items()
    kept = dict(reward_type="mine", make="no:thing", arguments={"k": 1}, model_path="m", dtype="float16", max_batch=3)
    assert kept.items() <= reward.items()
    text = supervisor.metrics.text({})
    lines = [f'{name}_total{{reward="mine"}} {n}' for name, n in dict(clips=20, worker_starts=1, portions=1).items()]
    lines += [f'jobs_total{{outcome="{kind}",reward="mine"}} {n}' for kind, n in dict(done=4, failed=2).items()]
    spent = dict(total=1, decode=2, score=3)
    lines += [f'score_seconds_total{{part="{part}",reward="mine"}} {seconds}' for part, seconds in spent.items()]
    assert {f"reward_{line}" for line in lines} <= {*text.splitlines()}


def test_a_process_has_a_time_to_load_and_a_time_for_each_step(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (slot,) = alone(start_s=100.0).slots
    clock = [0.0]
    monkeypatch.setattr(supervisors, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    late = ["not ready within 100 s", "no clip decoded and no portion scored within 7 s"]
    for seconds, event, expected in [
        *((99, "", ""), (101, "", late[0]), (200, "ready", ""), (1000, "alive", ""), (1006, "alive", "")),
        *((1012, "", ""), (1014, "", late[1])),
    ]:
        clock[0] = seconds
        if event:
            slot._take(dict(event=event))
        assert slot._overdue(100.0) == expected
    slot._take(SCORED)
    assert slot._overdue(100.0) == ""


def test_a_stop_drains_who_works_and_ends_who_loads_or_takes_long(alone: Any) -> None:
    supervisor = alone("cpu", "cpu", "cpu")
    threads = [threading.Thread(target=lambda: None), threading.Thread(target=lambda: None)]
    for thread in threads:
        thread.start()
    is_ended = threading.Event()
    threads.append(threading.Thread(target=is_ended.wait))
    threads[2].start()
    for slot, thread, state in zip(supervisor.slots, threads, (READY, STARTING, READY), strict=True):
        slot.process, slot.thread, slot.state = Process(), thread, state  # type: ignore[assignment]
    processes: Any = [slot.process for slot in supervisor.slots]
    processes[2].kill = is_ended.set
    supervisor.stop()
    assert [one.stdin.getvalue() for one in processes] == ["drain\n", "", "drain\n"]
    assert [one.kills for one in processes] == [0, 1, 0] and is_ended.is_set() and supervisor.stopping.is_set()


def test_a_reward_of_several_workers_is_ready_by_one_and_broken_by_all(alone: Any) -> None:
    supervisor = alone("cpu", "cpu")
    first, second = supervisor.slots
    for states, is_ready, is_broken in (
        ((STARTING, READY), True, False),
        ((BROKEN, READY), True, False),
        ((BROKEN, WAITING), False, False),
        ((BROKEN, BROKEN), False, True),
    ):
        first.state, second.state = states
        assert (supervisor.is_ready("mine"), supervisor.is_broken("mine")) == (is_ready, is_broken)
        assert supervisor.states() == {"mine": [*states]}
    second.reason = "torn"
    assert supervisor.why_broken("mine") == "torn"


def supervised(folder: Path, *names: str, timeout_s: float = 1.0) -> Supervisor:
    (folder / "worker.py").write_text(WORKER)
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {folder / 'worker.py'}\n")
    python.chmod(0o755)
    options = dict(venv_python=str(python), timeout_s=timeout_s, model_path=str(folder / "weights"))
    rewards = [RewardSettings(reward_type=f"{name}=no:thing", **options) for name in names]
    settings = ServiceSettings(queue=str(folder / "queue.sqlite3"), rewards=rewards)
    queue = open_queue(settings.queue, settings.limits())
    patience = Patience(first_wait_s=0.01, longest_wait_s=0.05, deaths=3, pause_s=900.0)
    return Supervisor(settings, queue, patience)


@contextmanager
def started(supervisor: Supervisor) -> Iterator[None]:
    supervisor.start()
    try:
        yield
    finally:
        supervisor.stop()
        supervisor.queue.close()


def is_over(queue: Any, ticket: str) -> bool:
    return not queue.look(ticket, "mine").is_open


def await_that(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + HANG_S
    while not holds():
        if time.monotonic() > ends:
            raise TimeoutError("it has not come about")
        time.sleep(0.02)


@pytest.mark.slow
def test_jobs_that_end_their_worker_fail_alone_and_speak_against_no_reward(tmp_path: Path) -> None:
    """Beside a reward that does not start, which is broken, and what it was given waits."""
    supervisor = supervised(tmp_path, "mine", "torn")
    queue, was_broken = supervisor.queue, []
    bodies = [b"die"] * 3 + [b"good"] + [b"hang"] + [b"die"] * 4 + [b"good"] * 20
    for k, body in enumerate(bodies):
        queue.put(f"t{k}", {"mine": "v"}, body, "d", 1)
    queue.put("t", {"torn": "v"}, b"good", "d", 1)

    def is_settled() -> bool:
        was_broken.append(supervisor.is_broken("mine"))
        return all(is_over(queue, f"t{k}") for k in range(len(bodies)))

    with started(supervisor):
        await_that(is_settled)
        await_that(lambda: supervisor.is_broken("torn") and supervisor.is_ready("mine"))
        assert supervisor.states() == {"mine": [READY], "torn": [BROKEN]}
        assert "code 1" in supervisor.why_broken("torn") and not any(was_broken)
        found = [queue.look(f"t{k}", "mine") for k in range(len(bodies))]
        status = queue.look("t", "torn")
    assert [one and one.state for one in found] == ["done" if body == b"good" else "failed" for body in bodies]
    assert "signal 9" in str(found[0]) and "within 1 s" in str(found[4])
    assert status is not None and status.state == "queued"


@pytest.mark.slow
def test_a_worker_that_starts_again_scores_in_the_version_of_what_is_there_by_then(tmp_path: Path) -> None:
    """And a stop speaks against no job that it cuts short."""
    supervisor = supervised(tmp_path, "mine", timeout_s=900.0)
    queue = supervisor.queue

    def is_scored_anew() -> bool:
        """Ask a request again; True where there is no result of the present version."""
        is_new = queue.put("t", {"mine": supervisor.version("mine")}, b"good", "d", 1)
        await_that(lambda: is_over(queue, "t"))
        return is_new

    (tmp_path / "weights").write_text("old")
    with started(supervisor):
        await_that(lambda: supervisor.is_ready("mine"))
        assert [is_scored_anew(), is_scored_anew()] == [True, False]
        (tmp_path / "weights").write_text("new")
        before = supervisor.slots[0].process
        supervisor.slots[0].kill()
        await_that(lambda: supervisor.is_ready("mine") and supervisor.slots[0].process not in (before, None))
        assert [is_scored_anew(), is_scored_anew()] == [True, False]
        queue.put("u", {"mine": "v"}, b"hang", "d", 1)
        await_that(lambda: queue.depth()["mine"].counts.get("running") == 1)
        supervisor.stop()
        (job,) = queue.lease("mine", "next", 1, 30.0)
        queue.release("mine", "next", "signal 9", has_died=True)
        assert queue.look(job.ticket, "mine").state == "queued"  # of two deaths it would fail
