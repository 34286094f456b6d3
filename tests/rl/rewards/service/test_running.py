# SPDX-License-Identifier: Apache-2.0
"""The whole service: what it takes over, what a signal does, who may share a port or a queue; and real services whose
processes are killed: nothing is lost, nothing counts twice, the others go on."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

from cosmos_predict2.rl.rewards.remote import NoAnswer, RemoteReward
from cosmos_predict2.rl.rewards.service import running
from cosmos_predict2.rl.rewards.service.queue import Status
from cosmos_predict2.rl.rewards.service.running import serve, sole_owner
from cosmos_predict2.rl.rewards.service.settings import RewardSettings, ServiceSettings, open_queue
from imaginaire.distributed import free_port
from imaginaire.errors import ConfigError
from imaginaire.listening import listening
from tests.programs import HANG_S, finished, warm_python
from tests.rl.rewards.doubles import HERE, ROOT, Served, body, clips_of, served


def settings_in(folder: Path) -> ServiceSettings:
    reward = RewardSettings(reward_type="mean", make=f"{HERE}:mean")
    return ServiceSettings(queue=str(folder / "queue.sqlite3"), rewards=[reward], port=0, token="secret")


def test_a_service_takes_over_its_queue_and_a_signal_drains_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, begun = settings_in(tmp_path), []
    before = open_queue(settings.queue, settings.limits())
    before.put("t", {"mean": "v"}, b"body", "d", 1)
    before.lease("mean", "of a service that was killed", 1, 900.0)

    class Supervised(running.Supervisor):
        def start(self) -> None:
            begun.append("start")

        def stop(self) -> None:
            begun.append("stop")

    def run(server: Any, sockets: Any) -> None:
        assert before.depth()["mean"].counts == {"queued": 1}
        config = server.config
        assert (config.proxy_headers, config.access_log) == (False, False)
        with pytest.raises(ConfigError, match="Another service has the queue"), sole_owner(settings.queue):
            pass
        with TestClient(config.app) as client:
            headers = {"Authorization": "Bearer secret"}
            assert client.post("/api/reward/enqueue", content=body("a"), headers=headers).status_code == 200
            server.handle_exit(signal.SIGTERM, None)
            assert server.should_exit and not server.force_exit
            assert client.post("/api/reward/enqueue", content=body("b"), headers=headers).status_code == 503
            server.handle_exit(signal.SIGTERM, None)
            assert server.force_exit
        assert begun == ["start"]
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "Supervisor", Supervised)
    monkeypatch.setattr(uvicorn.Server, "run", run)
    assert serve(settings) == 0
    assert begun == ["start", "stop"]
    with sole_owner(settings.queue):
        assert before.depth()["mean"].counts == {"queued": 2}
    before.close()
    with sole_owner("redis://host"), sole_owner("redis://host"):  # services on several machines share it
        pass


def test_a_port_has_one_listener() -> None:
    with listening("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot be listened on"), listening("127.0.0.1", port):
            pass
        with socket.create_connection(("127.0.0.1", port)):
            first.accept()[0].close()
    with listening("127.0.0.1", port):  # at once, though the kernel still remembers a connection of it
        pass
    with pytest.raises(ConfigError, match="no address of this machine"), listening("no.such.host.invalid", 0):
        pass


def test_a_trial_fails_where_one_reward_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_in(tmp_path)
    for name in ("second", "third"):
        settings.rewards.append(RewardSettings(reward_type=name, make=f"{HERE}:mean"))
    monkeypatch.setattr(running, "Supervisor", lambda *_: SimpleNamespace(start=lambda: None, stop=lambda: None))
    for failing, code in (("mean", 1), ("third", 1), ("", 0)):
        monkeypatch.setattr(running, "_tried", lambda supervisor, name, failing=failing: (name != failing, ""))
        assert running.try_rewards(settings) == code
    with listening("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="cannot be listened on"):
        settings.port = taken.getsockname()[1]
        running.try_rewards(settings)
    settings.port, settings.queue = 0, "redis://127.0.0.1:1/0"
    with pytest.raises(ConfigError, match="does not answer"):
        running.try_rewards(settings)


@pytest.mark.parametrize(
    ("status", "is_broken", "found"),
    [
        (Status("done", '{"valid": [true], "scores": {"x": [1.0]}}'), False, (True, '{"x": [1.0]}')),
        (Status("done", '{"valid": [false], "scores": {"x": [null]}}'), False, (False, '{"x": [null]}')),
        (Status("failed", None, "torn"), False, (False, "torn")),
        (Status("queued"), True, (False, "unfit")),
    ],
)
def test_what_a_trial_finds(status: Status, is_broken: bool, found: Any) -> None:
    looks = [Status("queued"), status]

    def look(ticket: str, name: str) -> Status:
        if not looks:
            raise AssertionError("asked again, though all is known")
        return looks.pop(0)

    queue = SimpleNamespace(put=lambda *_: True, look=look)
    broken = lambda name: is_broken and not looks  # noqa: E731
    supervisor: Any = SimpleNamespace(queue=queue, is_broken=broken, why_broken=lambda name: "unfit")
    assert running._tried(supervisor, "x") == found


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
        os.kill(service.worker_ids()[0], signal.SIGKILL)
        service.result(tickets[8])
        service.kill()
        service.start(is_ready=False)
        assert [patient_ticket(service, one) for one in bodies] == tickets  # a client that restarts asks the same
        for k, ticket in enumerate(tickets):
            assert service.result(ticket)["scores"]["mean"] == [float(k)]
        scored = Counter((tmp_path / "scored.txt").read_text().splitlines())
        assert len(scored) == 24
        assert sum(scored.values()) <= 24 + 2 * 4  # at most the two portions that were cut short
        with urllib.request.urlopen(service.url("/metrics"), timeout=HANG_S) as page:
            metrics = page.read().decode()
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
        words = ["-m", "scripts.reward_service", "--port", service.port, "--rewards", "smoothness"]
        second = finished(sys.executable, *words, cwd=ROOT)
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
                data = body(f"clip {k}", value=float(k), request_id=f"r{k}")
                tickets.append(patient_ticket((first, second)[k % 2], data))
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
