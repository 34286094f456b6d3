# SPDX-License-Identifier: Apache-2.0
"""The supervisor and real processes that speak as workers do: deaths that speak against jobs, or against a reward."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_predict2.rl.rewards.service.metrics import Metrics
from cosmos_predict2.rl.rewards.service.opening import open_queue
from cosmos_predict2.rl.rewards.service.settings import RewardSettings, ServiceSettings
from cosmos_predict2.rl.rewards.service.supervisor import BROKEN, Patience, Supervisor
from tests.programs import HANG_S

# Without torch, so that a start takes a moment: the lease, the turns and the events are those of a worker.
WORKER = """
import json, os, sys, threading, time
from cosmos_predict2.rl.rewards.service.opening import open_queue
from cosmos_predict2.rl.rewards.service.queue import Limits

told = json.loads(sys.stdin.readline())
threading.Thread(target=lambda: (sys.stdin.readline(), os._exit(0)), daemon=True).start()
queue = open_queue(told["queue"], Limits(**told["limits"]))
def report(**event): print(json.dumps(event), flush=True)
if told["reward"] == "torn": os._exit(1)
report(event="ready", needs_pixels=False)
suspect_first = False
while True:
    jobs = queue.lease(told["reward"], told["name"], 4, 30.0, suspect_first)
    if not jobs:
        time.sleep(0.01)
        continue
    suspect_first = not any(job.is_suspect for job in jobs)
    report(event="alive")
    if any(job.body == b"die" for job in jobs): os.kill(os.getpid(), 9)
    if any(job.body == b"hang" for job in jobs): time.sleep(1000)
    for job in jobs: queue.finish(job, told["name"], "{}", told["version"])
    report(event="scored", jobs=len(jobs), clips=len(jobs), failed=0, late=0, total_s=0, decode_s=0, score_s=0)
"""


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
    return Supervisor(settings, queue, Metrics(), patience)


def await_that(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + HANG_S
    while not holds():
        if time.monotonic() > ends:
            raise TimeoutError("it has not come about")
        time.sleep(0.02)


@pytest.mark.slow
def test_jobs_that_end_their_worker_fail_alone_and_speak_against_no_reward(tmp_path: Path) -> None:
    supervisor = supervised(tmp_path, "mine")
    bodies = [b"die"] * 3 + [b"good"] + [b"hang"] + [b"die"] * 4 + [b"good"] * 20
    for k, body in enumerate(bodies):
        supervisor.queue.put(f"t{k}", {"mine": "v"}, body, "d", 1)
    was_broken = []
    supervisor.start()
    try:

        def is_settled() -> bool:
            was_broken.append(supervisor.is_broken("mine"))
            waiting = [(f"t{k}", "mine") for k in range(len(bodies))]
            return len(supervisor.queue.settled(waiting)) == len(bodies)

        await_that(is_settled)
    finally:
        supervisor.stop()
    found = [supervisor.queue.look(f"t{k}", "mine") for k in range(len(bodies))]
    assert [one and one.state for one in found] == ["done" if body == b"good" else "failed" for body in bodies]
    assert "signal 9" in str(found[0]) and "within 1 s" in str(found[4])
    assert not any(was_broken)
    supervisor.queue.close()


@pytest.mark.slow
def test_a_reward_that_does_not_start_is_broken_and_what_it_was_given_waits(tmp_path: Path) -> None:
    supervisor = supervised(tmp_path, "torn", "mine")
    for name in ("torn", "mine"):
        supervisor.queue.put("t", {name: "v"}, b"good", "d", 1)
    supervisor.start()
    try:
        await_that(lambda: supervisor.is_broken("torn") and supervisor.queue.settled([("t", "mine")]) != [])
        assert supervisor.states() == {"torn": [BROKEN], "mine": ["ready"]}
        assert "code 1" in supervisor.why_broken("torn")
        status = supervisor.queue.look("t", "torn")
        assert status is not None and status.state == "queued"
    finally:
        supervisor.stop()
    supervisor.queue.close()


@pytest.mark.slow
def test_a_worker_that_starts_again_scores_in_the_version_of_what_is_there_by_then(tmp_path: Path) -> None:
    supervisor = supervised(tmp_path, "mine", timeout_s=900.0)

    def is_scored_anew() -> bool:
        """Of a request that is asked again: whether there is no result of the present version."""
        is_new = supervisor.queue.put("t", {"mine": supervisor.version("mine")}, b"good", "d", 1)
        await_that(lambda: supervisor.queue.settled([("t", "mine")]) != [])
        return is_new

    (tmp_path / "weights").write_text("old")
    supervisor.start()
    try:
        await_that(lambda: supervisor.is_ready("mine"))
        assert [is_scored_anew(), is_scored_anew()] == [True, False]
        (tmp_path / "weights").write_text("new")
        before = supervisor.slots[0].process
        supervisor.slots[0].kill()
        await_that(lambda: supervisor.is_ready("mine") and supervisor.slots[0].process not in (before, None))
        assert [is_scored_anew(), is_scored_anew()] == [True, False]
    finally:
        supervisor.stop()
    supervisor.queue.close()


@pytest.mark.slow
def test_a_stop_speaks_against_no_job_that_it_cuts_short(tmp_path: Path) -> None:
    supervisor = supervised(tmp_path, "mine", timeout_s=900.0)
    supervisor.queue.put("t", {"mine": "v"}, b"hang", "d", 1)
    supervisor.start()
    await_that(lambda: supervisor.queue.depth()["mine"].counts.get("running") == 1)
    supervisor.stop()
    (job,) = supervisor.queue.lease("mine", "next", 1, 30.0)
    assert not job.is_suspect
    supervisor.queue.close()
