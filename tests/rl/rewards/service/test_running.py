# SPDX-License-Identifier: Apache-2.0
"""The whole service in one process: what it takes over, what a signal does, and who may share a port or a queue."""

import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi.testclient import TestClient

from cosmos_predict2.rl.rewards.service import running
from cosmos_predict2.rl.rewards.service.open_queue import open_queue
from cosmos_predict2.rl.rewards.service.queue import Status
from cosmos_predict2.rl.rewards.service.running import listening, serve, sole_owner
from cosmos_predict2.rl.rewards.service.settings import RewardSettings, ServiceSettings
from imaginaire.errors import ConfigError
from tests.rl.rewards.doubles import HERE, body


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
