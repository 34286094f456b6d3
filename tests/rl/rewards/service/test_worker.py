# SPDX-License-Identifier: Apache-2.0
"""The worker: which jobs it takes together, that it keeps their leases, and what it writes and reports of them."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.service import sqlite_queue
from cosmos_predict2.rl.rewards.service import worker as workers
from cosmos_predict2.rl.rewards.service.queue import Job, Limits
from cosmos_predict2.rl.rewards.service.settings import DecodeSettings, RewardSettings, ServiceSettings, open_queue
from tests.programs import HANG_S, warm_python
from tests.rl.rewards.doubles import ROOT, body, mean
from tests.rl.rewards.service.here import Here

LONGEST_S = 60.0  # of what a process does at once


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Here]:
    here = Here(tmp_path)
    yield here
    here.close()


class Steps:
    """``draining``, set after so many waits."""

    def __init__(self, number: int) -> None:
        self.number, self.waits = number, []  # type: tuple[int, list[float]]

    def is_set(self) -> bool:
        return len(self.waits) >= self.number

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)


def leases(script: list[Any]) -> Any:
    """Leases by a script of jobs and errors, and then one that no worker outlives."""

    def lease(*_: Any) -> list[Job]:
        found = script.pop(0) if script else SystemExit()
        if isinstance(found, BaseException):
            raise found
        return list(found)

    return lease


def test_looks_at_an_empty_queue_become_rarer_and_an_outage_is_waited_out(made: Here) -> None:
    job = Job("t", "mean", 1, body("a"))
    lease = leases([[], [], [job], *[[]] * 5, OSError("gone"), [job], OSError("gone"), [job], []])
    held: list[list[Job]] = []
    made.worker.reward.max_batch = 2
    made.worker.queue = SimpleNamespace(lease=lease, finish=lambda *_: True)  # type: ignore[assignment]
    steps = Steps(10)
    made.worker.draining = steps  # type: ignore[assignment]
    made.worker._held = [job]
    made.worker.report = lambda event: held.append(made.worker._held)  # type: ignore[assignment]
    made.worker.run()
    assert steps.waits == pytest.approx([0.01, 0.02, 0.01, 0.02, 0.04, 0.08, 0.1, workers.OUTAGE_WAIT_S, 1.0, 0.01])
    assert held[-2:] == [[job], []]  # while it is scored, and then


def test_results_and_reasons_are_written_and_reported(made: Here) -> None:
    """The portion has a failure, a lease that another worker has, and a result that cannot be written."""
    queue, worker = made.queue, made.worker
    for k in range(5):
        queue.put(f"t{k}", {"mean": "v1"}, b"body", "d", 2)
    worker.version, worker.reward.max_batch = "v1", 5
    good = {"valid": [True, False], "duration": "0.50", "decoded_duration": "0.25", "scores": {"mean": [1.0, None]}}
    results: list[Any] = [good, ArithmeticError("torn"), good, good, {**good, "scores": float("nan")}]
    worker.scorer = SimpleNamespace(needs_pixels=True, score=lambda bodies: results)  # type: ignore[assignment]
    worker._held = jobs = queue.lease("mean", "w", 5, 900.0)
    queue.fail(jobs[2], "w", "another has it")
    worker._score(jobs)
    assert worker._held == []
    facts = dict(clips=8, done=4, failed=1, decode_s=1.0, score_s=2.0)
    assert made.reports == [{"event": "alive"}, dict(event="scored", total_s=made.reports[1]["total_s"], **facts)]
    worker.scorer.needs_pixels = False
    done, failed = queue.look("t0", "mean"), queue.look("t1", "mean")
    assert done is not None and json.loads(str(done.result)) == good
    assert failed is not None and failed.error == "ArithmeticError: torn"
    assert not queue.put("t0", {"mean": "v1"}, b"body", "d", 2) and queue.put("t0", {"mean": "v2"}, b"body", "d", 2)
    (job,) = queue.lease("mean", "w", 1, 900.0)
    results[:] = [good]
    worker._score([job])
    assert made.reports[-1]["decode_s"] == 0.0


def test_leases_are_kept_after_a_renewal_that_failed(made: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def renew(jobs: Sequence[Job], worker: str, seconds: float) -> None:
        asked.append((jobs, worker, seconds))
        if len(asked) < 2:
            raise OSError("gone")
        raise SystemExit  # of the test's own

    monkeypatch.setattr(workers, "time", SimpleNamespace(sleep=lambda _: None))
    made.worker.queue = SimpleNamespace(renew=renew)  # type: ignore[assignment]
    made.worker._held = jobs = [Job("t", "mean", 1, b"")]
    with pytest.raises(SystemExit):
        made.worker._keep_leases()
    assert asked == [(jobs, "w", 30.0)] * 2


class Told:
    """A reward that keeps what it was made with, and speaks to standard output."""

    needs_pixels = True

    def __init__(self, scale: float, dtype: str, device: str, model_path: str) -> None:
        self.told = scale, dtype, device, model_path
        print("a library's words")

    def __call__(self, clips: Clips, context: Any) -> Any:
        if clips.prompts == ["sleep"]:
            time.sleep(HANG_S)
        print("more of them")
        assert clips.video_B_C_F_H_W is not None
        return clips.video_B_C_F_H_W.float().mean(dim=(1, 2, 3, 4))


def told(folder: Path, make: str = f"{__name__}:Told") -> dict[str, Any]:
    words = dict(arguments={"scale": 2.0}, dtype="float16", model_path="a/b", max_batch=3)
    reward = RewardSettings(reward_type="mean", make=make, **words)  # type: ignore[arg-type]
    settings = ServiceSettings(queue=str(folder / "q"), decode=DecodeSettings(model_path="tiny"), max_attempts=7)
    found = json.loads(workers.message(settings, reward, name="w", version="v1", device="cpu"))
    assert isinstance(found, dict)
    return found


def test_a_worker_is_made_as_it_was_told(tmp_path: Path) -> None:
    reports: list[Any] = []
    worker = workers.build_worker(told(tmp_path), reports.append)
    assert worker.scorer.function.told == (2.0, "float16", "cpu", "a/b")  # type: ignore[union-attr]
    assert (worker.scorer.name, worker.scorer.max_clips, worker.queue.limits.max_attempts) == ("mean", 3, 7)
    (found,) = worker.scorer.score([body("a")])
    assert isinstance(found, dict) and reports == [{"event": "alive"}] * 2  # where it decodes and scores
    worker.queue.close()


@pytest.mark.slow
def test_the_process_of_a_worker_speaks_to_its_server_and_ends_with_it(tmp_path: Path) -> None:
    queue = open_queue(str(tmp_path / "q"), Limits())
    queue.put("t", {"mean": "v1"}, body("a"), "d", 1)
    command = [warm_python(), "-m", workers.__name__]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    worker, unfit = (subprocess.Popen(command, **pipes) for _ in range(2))  # type: ignore[call-overload]
    for process, path in ((worker, f"{__name__}:Told"), (unfit, "no.such:thing")):
        process.stdin.write(json.dumps(told(tmp_path, path)) + "\n")
        process.stdin.flush()
    event = json.loads(unfit.stdout.readline())
    assert event["event"] == "unfit" and "no.such" in event["reason"]
    assert unfit.wait(LONGEST_S) == workers.UNFIT
    events = [json.loads(worker.stdout.readline()) for _ in range(5)]
    assert events[0] == {"event": "ready"}
    assert [one["event"] for one in events[1:]] == [*["alive"] * 3, "scored"]
    queue.put("u", {"mean": "v1"}, body("sleep"), "d", 1)
    while json.loads(worker.stdout.readline())["event"] != "alive":
        pass
    assert worker.communicate(timeout=LONGEST_S) and worker.returncode == 1  # the server's end of the pipe is closed
    unfit.stdin.close()
    unfit.stdout.close()
    queue.close()


def test_a_portion_keeps_its_leases_however_long_it_takes(made: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a lease is always left over for a worker that is held up."""
    clock, stolen, is_asked, is_over = [0.0], list[Any](), threading.Event(), threading.Event()
    lease_s, others = made.worker.lease_s, threading.enumerate()  # which may keep leases, too

    def nap(seconds: float) -> None:
        if threading.current_thread() in others:
            return time.sleep(seconds)
        is_asked.wait()
        if clock[0] >= 3 * lease_s:
            is_over.set()
            return time.sleep(seconds)
        clock[0] += seconds + lease_s / 2
        stolen.extend(made.queue.lease("mean", "other", 1, lease_s))
        clock[0] -= lease_s / 2

    def slow(clips: Clips, context: Any) -> Any:
        is_asked.set()
        is_over.wait(LONGEST_S)
        return mean(clips, context)

    monkeypatch.setattr(workers, "time", SimpleNamespace(sleep=nap, monotonic=time.monotonic))
    monkeypatch.setattr(sqlite_queue, "now", lambda: clock[0])
    made.worker.scorer.function = slow
    made.queue.put("t", {"mean": "v"}, body("a"), "d", 1)
    made.work()
    assert is_over.wait(LONGEST_S)
    assert not stolen
