# SPDX-License-Identifier: Apache-2.0
"""A real service whose processes are killed: nothing is lost, nothing counts twice, the others go on."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from cosmos_predict2.rl.rewards.remote import NoAnswer, RemoteReward
from imaginaire.distributed import free_port
from tests.programs import HANG_S, warm_python
from tests.rl.rewards.doubles import HERE, ROOT, Served, body, clips_of, served

CONFIG = """
lease_s = 3.0
[[reward_args]]
reward_type = "mean"
make = "{here}:Noted"
arguments = {{path = "{folder}/scored", pause_s = {pause}}}
max_batch = 4
timeout_s = {timeout}
venv_python = "{python}"
"""


def config(folder: Path, pause: float, timeout: float = 60.0) -> str:
    return CONFIG.format(here=HERE, folder=folder, pause=pause, timeout=timeout, python=warm_python())


def kill_a_worker(service: Served) -> None:
    for process_id in service.worker_ids()[:1]:
        os.kill(process_id, signal.SIGKILL)


def patient_ticket(service: Served, data: bytes) -> str:
    """The ticket of a request that is posted until the service is there."""
    ends = time.monotonic() + HANG_S
    while True:
        if time.monotonic() > ends:
            raise TimeoutError(service.log())
        try:
            answer = service.enqueue(data)
            if answer.status == 200:
                return str(answer.content["uuid"])
            assert answer.status in (429, 503), answer
        except NoAnswer:
            pass
        time.sleep(0.1)


@pytest.mark.slow
def test_kills_of_worker_and_server_in_mid_batch_lose_nothing(tmp_path: Path) -> None:
    with served(tmp_path, config=config(tmp_path, 0.1)) as service:
        bodies = [body(f"clip {k}", value=float(k), request_id=f"r{k}") for k in range(24)]
        tickets = [patient_ticket(service, one) for one in bodies]
        service.result(tickets[0])
        kill_a_worker(service)
        service.result(tickets[8])
        service.kill()
        service.start(is_ready=False)
        assert [patient_ticket(service, one) for one in bodies] == tickets  # a client that restarts asks the same
        for k, ticket in enumerate(tickets):
            assert service.result(ticket)["scores"]["mean"] == [float(k)]
        scored = Counter((tmp_path / "scored.txt").read_text().splitlines())
        assert len(scored) == 24
        assert sum(scored.values()) <= 24 + 2 * 4  # at most the two portions that were cut short
        metrics = service.get("/metrics").content["text"]
        assert 'reward_jobs{reward="mean",state="done"} 24' in metrics
        assert service.stop() == 0 and "did not finish in time" not in service.log()  # its worker is drained


@pytest.mark.long
def test_a_stop_keeps_what_waits_and_the_next_start_finishes_it(tmp_path: Path) -> None:
    with served(tmp_path, config=config(tmp_path, 0.2)) as service:
        tickets = [patient_ticket(service, body(f"{k}", value=float(k))) for k in range(20)]
        assert service.stop() == 0
        service.start()
        assert [service.result(ticket)["scores"]["mean"] for ticket in tickets] == [[float(k)] for k in range(20)]
        scored = Counter((tmp_path / "scored.txt").read_text().splitlines())
        assert set(scored.values()) == {1}  # what ran was finished
        second = subprocess.run(
            [sys.executable, "-m", "scripts.reward_service", "--port", str(service.port), "--rewards", "smoothness"],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        assert second.returncode == 2
        assert str(service.port) in second.stderr
        url = service.url("/api/reward/")
        reward = RemoteReward("mean", enqueue_url=f"{url}enqueue", fetch_url=f"{url}pull")
        scores = reward.fetch(reward.submit(clips_of("a", "b", value=2.5), {}, "id"), HANG_S)
        assert scores.value_B.tolist() == [2.5, 2.5] and scores.is_valid_B.all()


@pytest.mark.long
def test_redis_restarts_and_a_second_host(tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server is installed: apt-get install redis-server")
    port = free_port()
    words = ["redis-server", "--port", str(port), "--dir", str(tmp_path), "--appendonly", "yes", "--save", ""]
    words += ["--appendfsync", "always", "--bind", "127.0.0.1"]

    def start() -> "subprocess.Popen[bytes]":
        return subprocess.Popen(words, stdout=subprocess.DEVNULL)

    redis = start()
    time.sleep(1)
    arguments = ["--queue", f"redis://127.0.0.1:{port}/0"]
    (tmp_path / "second").mkdir()
    with served(tmp_path, *arguments, config=config(tmp_path, 0.05)) as first:
        with served(tmp_path / "second", *arguments, config=config(tmp_path, 0.05)) as second:
            tickets = []
            for k in range(60):
                tickets.append(
                    patient_ticket((first, second)[k % 2], body(f"clip {k}", value=float(k), request_id=f"r{k}"))
                )
                if k % 20 == 10:
                    redis.kill()
                    redis.wait()
                    redis = start()
            second.kill()
            found = [first.result(ticket) for ticket in tickets]
            assert [one["scores"]["mean"] for one in found] == [[float(k)] for k in range(60)]
            second.start()
    redis.terminate()
    redis.wait()
