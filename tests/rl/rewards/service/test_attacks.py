# SPDX-License-Identifier: Apache-2.0
"""A real service whose attackers send nothing, or almost nothing: an honest client gets its score all the while."""

import asyncio
import contextlib
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from cosmos_predict2.rl.rewards.service import connections
from cosmos_predict2.rl.rewards.service.connections import Access, Connections, GuardedProtocol, network_of
from cosmos_predict2.rl.rewards.service.metrics import Metrics
from tests.programs import HANG_S
from tests.rl.rewards.doubles import HERE, Served, body, served

TOKEN = {"Authorization": "Bearer secret"}
HALF_A_HEAD = b"POST /api/reward/enqueue HTTP/1.1\r\nHost: x\r\nX-Slow: "
HALF_A_BODY = b"POST /api/reward/enqueue HTTP/1.1\r\nHost: x\r\n%sContent-Length: 100000\r\n\r\nhalf"
NOT_READ = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.contextmanager
def attackers(service: Served, number: int, data: bytes, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """That many connections on which ``data`` was sent."""
    made = []
    try:
        for _ in range(number):
            made.append(socket.create_connection(("127.0.0.1", service.port), 60, source_address=(source, 0)))
            with contextlib.suppress(OSError):  # it may be closed already
                made[-1].sendall(data)
        yield made
    finally:
        for one in made:
            one.close()


def is_closed(one: socket.socket) -> bool:
    """Whether the service has ended this connection, whatever it said before."""
    one.setblocking(False)
    try:
        while one.recv(1 << 16):
            pass
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def await_closed(attack: list[socket.socket]) -> None:
    ends = time.monotonic() + HANG_S
    left = attack
    while left := [one for one in left if not is_closed(one)]:
        if time.monotonic() > ends:
            raise TimeoutError(f"{len(left)} of {len(attack)} connections are still held")
        time.sleep(0.2)


def an_honest_client_is_served(service: Served, prompt: str) -> None:
    assert service.get("/healthz").status == 200
    answer = service.enqueue(body(prompt, value=3.0), **TOKEN)
    end = time.monotonic() + HANG_S
    while answer.status == 429 and time.monotonic() < end:  # places are taken for as long as an upload may stall
        time.sleep(0.2)
        answer = service.enqueue(body(prompt, value=3.0), **TOKEN)
    assert answer.status == 200, answer
    assert service.result(answer.content["uuid"], **TOKEN)["scores"]["mean"] == [3.0]


@pytest.mark.slow
def test_nobody_shuts_out_an_honest_client_by_sending_nothing(tmp_path: Path) -> None:
    config = f'idle_s = 2.0\nmax_uploads = 4\n[[reward_args]]\nreward_type = "mean"\nmake = "{HERE}:mean"\n'
    with served(tmp_path, config=config, files=800, WFM_REWARD_TOKEN="secret") as service:  # 544 connections
        an_honest_client_is_served(service, "before")
        with attackers(service, 700, HALF_A_HEAD) as heads:
            an_honest_client_is_served(service, "beside half-sent heads")
            await_closed(heads)
        with attackers(service, 12, HALF_A_BODY % b"Authorization: Bearer secret\r\n") as bodies:
            an_honest_client_is_served(service, "beside stalled uploads")
            await_closed(bodies)
        with attackers(service, 300, HALF_A_BODY % b"") as refused, attackers(service, 300, b"") as silent:
            with attackers(service, 20, NOT_READ * 2000):
                an_honest_client_is_served(service, "beside the others")
                await_closed(refused + silent)
        with attackers(service, 30, HALF_A_HEAD) as dripping:
            stop = threading.Event()

            def drip() -> None:
                while not stop.wait(0.3):
                    for one in dripping:
                        with contextlib.suppress(OSError):
                            one.send(b"x")

            thread = threading.Thread(target=drip)
            thread.start()
            try:
                an_honest_client_is_served(service, "beside dripping heads")
                await_closed(dripping)
            finally:
                stop.set()
                thread.join()
        metrics = service.get("/metrics", **TOKEN).content["text"]
        assert 'reward_rejects_total{reason="slow_upload"}' in metrics


def test_unknown_connections_have_a_share_and_the_oldest_of_the_largest_crowd_goes() -> None:
    class One:
        def __init__(self, network: str) -> None:
            self.network, self.is_open = network, True

        def end(self) -> None:
            self.is_open = False

    guard = Connections(1.0, 64)
    crowd = [One("a") for _ in range(6)]
    for one in crowd:
        guard.add(one)  # type: ignore[arg-type]
    assert [one.is_open for one in crowd] == [False, False, True, True, True, True]
    others = [One(f"b{k}") for k in range(13)]
    for one in others:
        guard.add(one)  # type: ignore[arg-type]
    assert all(one.is_open for one in others) and not crowd[2].is_open
    guard.remove(crowd[3])  # type: ignore[arg-type]
    guard.add(One("c"))  # type: ignore[arg-type]
    assert crowd[4].is_open


def test_a_connection_is_known_by_the_token_and_not_by_a_look_at_the_health() -> None:
    known: list[str] = []

    async def passed(*_: Any) -> None: ...

    for path, token in (("/healthz", b"secret"), ("/readyz", b""), ("/metrics", b""), ("/v1/rewards", b"secret")):
        connection = SimpleNamespace(become_known=lambda path=path: known.append(path))
        headers = [(b"authorization", b"Bearer " + token)]
        scope = {"type": "http", "path": path, "headers": headers, "state": {"connection": connection}}
        asyncio.run(Access(passed, "secret", Metrics())(scope, passed, passed))
    assert known == ["/v1/rewards"]


class Transport(asyncio.Transport):
    """A connection whose client does nothing."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.1", 1)})
        self.is_open = True

    def write(self, data: Any) -> None: ...

    def close(self) -> None: ...

    def is_closing(self) -> bool:
        return not self.is_open

    def abort(self) -> None:
        self.is_open = False


def connected(app: Any, idle_s: float) -> tuple[Any, Transport]:
    """A connection that has just been made."""
    config = uvicorn.Config(app, log_config=None, lifespan="off", timeout_keep_alive=900)
    options: dict[str, Any] = dict(config=config, server_state=ServerState(), app_state={})
    protocol, transport = GuardedProtocol(**options, connections=Connections(idle_s)), Transport()
    protocol.connection_made(transport)
    return protocol, transport


@pytest.mark.parametrize("waits_for", ["a head", "the rest of a head", "the next head", "a reader"])
def test_each_wait_for_a_client_ends(waits_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "WRITE_S", 0.1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def wait() -> None:
        protocol, transport = connected(app, 900.0 if waits_for == "a reader" else 0.1)
        if waits_for == "the rest of a head":
            protocol.data_received(HALF_A_HEAD)
        if waits_for == "the next head":
            protocol.data_received(NOT_READ)
            while not protocol.cycle.response_complete:
                assert transport.is_open
                await asyncio.sleep(0.001)
            protocol.data_received(HALF_A_HEAD)
        if waits_for == "a reader":
            protocol.pause_writing()
            protocol.resume_writing()
            protocol.pause_writing()
        assert transport.is_open
        while transport.is_open:
            await asyncio.sleep(0.01)
        protocol.connection_lost(None)
        assert not protocol.guard._unknown

    asyncio.run(asyncio.wait_for(wait(), 900))


@pytest.mark.parametrize("waited_for", ["a head", "a reader"])
def test_a_wait_that_is_over_ends_no_connection(waited_for: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull may wait longer than a client may send nothing, and a slow reader pauses often."""
    monkeypatch.setattr(connections, "WRITE_S", 0.0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def wait() -> None:
        protocol, transport = connected(
            app, 0.0 if waited_for == "a head" else 900.0
        )  # 0: over at the loop's next turn
        protocol.data_received(NOT_READ)
        if waited_for == "a reader":
            protocol.pause_writing()
            protocol.resume_writing()
        for _ in range(10):
            await asyncio.sleep(0)
        assert transport.is_open
        protocol.connection_lost(None)

    asyncio.run(wait())


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("unix", "unix"),
    ],
)
def test_an_address_is_what_one_machine_has(host: str, network: str) -> None:
    assert network_of(host) == network


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "room"),
    [
        (1024, 100_000, 4352, 4096),
        (1024, 2048, 2048, 1792),
        (1024, resource.RLIM_INFINITY, 4352, 4096),
        (100_000, 100_000, None, 4096),
        (64, 64, 64, 16),
    ],
)
def test_connections_leave_room_for_files(
    soft: int, hard: int, raised: int | None, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append(limits))
    assert connections.room_for_connections() == room
    assert given == ([] if raised is None else [(raised, hard)])


def test_the_kernel_ends_connections_whose_peer_is_gone() -> None:
    with socket.socket() as listener:
        connections.keep_alive(listener)
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
