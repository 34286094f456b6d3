# SPDX-License-Identifier: Apache-2.0
"""The endpoints, in this process: what each answers to good, early and late requests, and every refusal: how it is
answered and counted, and that it holds nothing afterwards."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from cosmos_predict2.rl.rewards.service import server as servers
from cosmos_predict2.rl.rewards.service.queue import QueueUnusable
from cosmos_predict2.rl.rewards.service.server import create_app
from cosmos_predict2.rl.rewards.service.supervisor import BROKEN, READY, STARTING
from tests.rl.rewards.doubles import body, in_threads
from tests.rl.rewards.service.here import Here

BINARY = {"Content-Type": "application/octet-stream"}


@pytest.fixture
def here(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Here, TestClient]]:
    made = Here(tmp_path, **getattr(request, "param", {}))
    with TestClient(create_app(made.service), raise_server_exceptions=False) as client:
        yield made, client
    made.close()


def enqueue(client: TestClient, data: bytes, **headers: str) -> Any:
    return client.post("/api/reward/enqueue", content=data, headers={**BINARY, **headers})


def pull(client: TestClient, ticket: str, reward: str | None = "mean", **fields: str) -> Any:
    form = {"uuid": ticket, **({} if reward is None else {"type": reward}), **fields}
    return client.post("/api/reward/pull", data=form)


def test_a_request_is_scored_and_stays_readable(here: tuple[Here, TestClient]) -> None:
    made, client = here
    answer = enqueue(client, body("a", "b", value=3.0))
    assert answer.status_code == 200
    ticket = answer.json()["uuid"]
    early = pull(client, ticket)
    assert early.status_code == 400 and early.json()["message"] == f"Not found scores for {ticket}"
    assert pull(client, ticket, wait="0.05").status_code == 202
    threading.Timer(0.2, made.work).start()
    found = pull(client, ticket, wait="30")  # answered when the job is done
    assert found.status_code == 200
    assert found.json()["scores"] == {"mean": [3.0, 3.0], "double": [6.0, 6.0]}
    assert found.json()["valid"] == [True, True]
    assert set(found.json()) >= {"input_info", "duration", "decoded_duration", "type"}
    assert pull(client, ticket).json() == found.json()
    as_json = client.post("/api/reward/pull", json={"uuid": ticket, "type": "mean"})
    assert as_json.json() == found.json()
    assert client.post("/api/reward/ping", data={"info_data": "x"}).json() == {"message": "Ping request received"}


def test_what_failed_is_asked_anew_and_what_another_version_scored_too(here: tuple[Here, TestClient]) -> None:
    made, client = here
    made.work()
    failing, good = body("raise", request_id="f"), body("a", request_id="g")
    for k in range(2):
        for one in (failing, good):
            ticket = enqueue(client, one).json()["uuid"]
            pull(client, ticket, wait="30")
        assert f'reward_requests_total{{kind="new"}} {2 + k}' in client.get("/metrics").text
    made.supervisor.slots[0].version = "a mended judge"
    enqueue(client, good)
    assert 'reward_requests_total{kind="new"} 4' in client.get("/metrics").text


@pytest.mark.parametrize("here", [dict(token="secret")], indirect=True)
def test_nothing_but_health_is_open_without_the_token(here: tuple[Here, TestClient]) -> None:
    client = here[1]
    paths = [("POST", f"/api/reward/{name}") for name in ("enqueue", "pull", "ping")]
    paths += [("GET", path) for path in ("/metrics", "/v1/rewards", "/nothing")]
    wrong = ["Bearer wrong", "secret", "Basic secret", "Bearer secret2", "Bearer secre", "Bearer", ""]
    wrong += ["Bearer secret Bearer secret"]
    for headers in ({}, *({"Authorization": value} for value in wrong)):
        for method, path in paths:
            answer = client.request(method, path, content=body("a"), headers=headers)
            assert answer.status_code == 401 and "secret" not in answer.text
            assert answer.headers["www-authenticate"] == 'Bearer realm="rewards"'
    for path in ("/health", "/healthz", "/readyz"):
        assert client.get(path).status_code == 200
    for path in ("/healthz/", "/healthzz", "/healthz/../metrics", "//readyz"):
        assert client.get(path, follow_redirects=False).status_code == 401
    for value in ("Bearer secret", "bearer secret", "BEARER  secret "):
        assert client.get("/nothing/1", headers={"Authorization": value}).status_code == 404
    right = {"Authorization": "Bearer secret"}
    assert enqueue(client, body("a"), **right).status_code == 200
    text = client.get("/metrics", headers=right).text
    assert f'reward_rejects_total{{reason="token"}} {9 * 6 + 4}' in text


def test_a_pull_says_that_its_reward_is_broken_and_is_answered_when_the_service_stops(
    here: tuple[Here, TestClient],
) -> None:
    made, client = here
    ticket = enqueue(client, body("a")).json()["uuid"]
    made.supervisor.slots[0].state, made.supervisor.slots[0].reason = BROKEN, "the weights are torn"
    waits = pull(client, ticket, wait="0")
    assert waits.status_code == 202 and "torn" in waits.json()["message"]
    made.supervisor.slots[0].state = READY
    threading.Timer(0.1, lambda: setattr(made.service, "is_draining", True)).start()
    assert pull(client, ticket, wait="30").status_code == 202
    assert client.get("/healthz").status_code == 200


@pytest.mark.parametrize("here", [dict(names=("mean", "other"), max_jobs=3)], indirect=True)
def test_each_reward_has_facts_of_its_own(here: tuple[Here, TestClient]) -> None:
    made, client = here
    assert client.get("/readyz").json() == {"ready": True, "faults": []}
    for other in made.supervisor.slots[1:]:
        other.state, other.reason, other.version = BROKEN, "torn", "v2"
    both = body("a", request_id="id").replace(b'{"mean": 1.0}', b'{"mean": 1.0, "other": 1.0}')
    tickets = [enqueue(client, data).json()["uuid"] for data in (both, body("b"))]
    for name in ("mean", "other"):
        (job, *_) = made.queue.lease(name, "w", 1, 900.0)
        assert job.ticket == tickets[0] and made.queue.finish(job, "w", "{}", made.supervisor.version(name))
    enqueue(client, both)
    assert 'reward_requests_total{kind="repeated"} 1' in client.get("/metrics").text  # each is of its present version
    (job,) = made.queue.lease("mean", "w", 1, 900.0)
    assert client.get("/readyz").json()["faults"] == ["other is not ready"]
    made.queue.put("t", {"other": "v2", "mean": "v"}, b"body", "d", 1)
    assert client.get("/readyz").json()["faults"] == ["other is not ready", "the queue is full (3 jobs)"]
    assert client.get("/v1/rewards").json()["rewards"] == [
        dict(name="mean", workers=[READY], timeout_s=120.0, waiting=2, fault=""),
        dict(name="other", workers=[BROKEN] * 2, timeout_s=121.0, waiting=1, fault="torn"),
    ]
    made.supervisor.slots[2].state = READY
    assert client.get("/readyz").json()["faults"] == ["the queue is full (3 jobs)"]
    lines = client.get("/metrics").text.splitlines()
    for reward, state in (("mean", READY), ("other", READY), ("other", BROKEN)):
        assert f'reward_workers{{reward="{reward}",state="{state}"}} 1' in lines
    assert 'reward_jobs{reward="mean",state="running"} 1' in lines
    assert 'reward_jobs{reward="other",state="queued"} 1' in lines
    assert any(line.startswith('reward_oldest_job_seconds{reward="mean"} ') for line in lines)
    made.supervisor.slots[0].state = STARTING
    made.service.is_draining = True
    assert client.get("/readyz").json()["faults"][:2] == ["mean is not ready", "the service is stopping"]


def test_a_request_is_known_by_all_of_its_body_and_told_its_replica(
    here: tuple[Here, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = here[1]
    long = "a" * 100_000
    made = here[0]
    first, again = (enqueue(client, body(long, value=1.0, request_id="id")).json() for _ in range(2))
    assert first == again and set(first) == {"uuid"} and made.queue.depth()["mean"].counts == {"queued": 1}
    assert enqueue(client, body(long, value=2.0, request_id="id")).status_code == 409
    monkeypatch.setenv("LEPTON_REPLICA_ID", "r7")
    assert enqueue(client, body("b")).json()["replica_id"] == "r7"
    assert len({enqueue(client, body("b")).json()["uuid"] for _ in range(2)}) == 2  # without an id of their own


@pytest.mark.parametrize(("options", "pause_s"), [({}, 30.0), (dict(result_ttl_s=10.0), 5.0)])
def test_old_results_are_purged_for_as_long_as_the_service_runs(
    options: Any, pause_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, slept = Here(tmp_path, **options), []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    def purge() -> int:
        raise OSError("gone")

    monkeypatch.setattr(servers, "asyncio", SimpleNamespace(sleep=sleep, to_thread=asyncio.to_thread))
    monkeypatch.setattr(made.queue, "purge", purge)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(made.service.keep_house())
    assert slept == [pause_s] * 3
    made.close()


def test_all_who_wait_for_a_job_are_woken_and_an_outage_of_the_queue_is_waited_out(
    here: tuple[Here, TestClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, client = here
    tickets = [enqueue(client, body("a", request_id=name)).json()["uuid"] for name in ("t", "t", "u")]
    settled, looks = made.service._settled, []

    def gone_at_first(waiting: Any) -> Any:
        looks.append(len(waiting))
        if len(looks) == 1:
            raise OSError("gone")
        return settled(waiting)

    monkeypatch.setattr(made.service, "_settled", gone_at_first)
    threading.Timer(0.2, made.work).start()
    found = in_threads(3, lambda k: pull(client, tickets[k], wait="30"))
    assert [one.status_code for one in found] == [200] * 3
    assert not made.service._waiting and 2 in looks


def test_logs_name_no_prompt(here: tuple[Here, TestClient], caplog: pytest.LogCaptureFixture) -> None:
    made, client = here
    with caplog.at_level(logging.DEBUG):
        ticket = enqueue(client, body("a private prompt")).json()["uuid"]
        made.work()
        pull(client, ticket, wait="30")
    assert "private" not in caplog.text


RIGHT = ("authorization", "Bearer secret")
JSON = ("content-type", "application/json")
STALL, GONE = "stall", "gone"  # instead of a chunk: nothing for a while, and a client that closed the connection
LONGEST_S = 60.0  # of an answer that comes at once
LARGE = [b"x" * 400] * 8  # more than a body may have, in chunks


@dataclass
class Answered:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    content: Any = None


async def asked(app: Any, path: str, chunks: Any, headers: Any = ()) -> Answered:
    """The answer to a POST whose body comes in chunks."""
    left, found, text = list(chunks), Answered(), b""

    async def receive() -> Any:
        if not left:
            return {"type": "http.request", "body": b"", "more_body": False}
        chunk = left.pop(0)
        if chunk == STALL:
            await asyncio.sleep(900)
        if chunk == GONE:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": chunk, "more_body": True}

    async def send(message: Any) -> None:
        nonlocal text
        if message["type"] == "http.response.start":
            found.status = message["status"]
            found.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            text += message.get("body", b"")

    raw = [(name.encode(), value.encode()) for name, value in (RIGHT, *headers)]
    scope = dict(type="http", method="POST", path=path, raw_path=path.encode(), query_string=b"", headers=raw)
    await app({**scope, "http_version": "1.1", "scheme": "http", "root_path": "", "state": {}}, receive, send)
    found.content = json.loads(text)
    return found


def held(made: Here) -> Any:
    """Jobs and bytes."""
    db = made.queue._db  # type: ignore[attr-defined]
    kept = [db.execute(f"SELECT * FROM {name}").fetchall() for name in ("jobs", "requests", "bodies")]
    return kept


def drains(made: Here) -> None:
    made.service.is_draining = True


def breaks(made: Here) -> None:
    made.supervisor.slots[0].state, made.supervisor.slots[0].reason = BROKEN, "torn"


def fills(made: Here) -> None:
    for k in range(2):
        made.queue.put(f"t{k}", {"mean": "v"}, b"body", "d", 1)


def uses_the_id(made: Here) -> None:
    made.service._accept(body("b", request_id="id"))


def cannot_put(made: Here) -> None:
    def put(*_: Any) -> bool:
        raise QueueUnusable("torn")

    made.queue.put = put  # type: ignore[method-assign]


def settles(state: str) -> Callable[[Here], None]:
    def settle(made: Here) -> None:
        made.queue.put("t", {"mean": "v"}, b"body", "d", 3)
        (job,) = made.queue.lease("mean", "w", 1, 900.0)
        if state != "running":
            made.queue.fail(job, "w", "torn")

    return settle


def nothing(made: Here) -> None: ...


ENQUEUE, PULL, PING = (f"/api/reward/{name}" for name in ("enqueue", "pull", "ping"))
AGAIN, CLOSE = {"retry-after": "2"}, {"connection": "close"}
# name: what was before, the request, the answer's status, its label in the metrics, and its headers
REFUSALS: dict[str, tuple[Callable[[Here], None], dict[str, Any], int, str, dict[str, str]]] = {
    "stopping": (drains, dict(path=ENQUEUE, chunks=[body("a")]), 503, "draining", AGAIN),
    "malformed": (nothing, dict(path=ENQUEUE, chunks=[b"{}"]), 400, "malformed", {}),
    "one unknown of two": (
        nothing,
        dict(path=ENQUEUE, chunks=[body("a").replace(b'{"mean": 1.0}', b'{"mean": 1.0, "x": 1}')]),
        400,
        "unknown_reward",
        {},
    ),
    "out of order": (breaks, dict(path=ENQUEUE, chunks=[body("a")]), 503, "broken_reward", AGAIN),
    "full": (fills, dict(path=ENQUEUE, chunks=[body("a")]), 429, "queue_full", AGAIN),
    "another body": (uses_the_id, dict(path=ENQUEUE, chunks=[body("a", request_id="id")]), 409, "other_body", {}),
    "long in fact": (nothing, dict(path=ENQUEUE, chunks=[*LARGE, STALL]), 413, "too_long", CLOSE),
    "a client that goes": (nothing, dict(path=ENQUEUE, chunks=[b"x", GONE]), 400, "disconnected", {}),
    "no queue": (cannot_put, dict(path=ENQUEUE, chunks=[body("a")]), 503, "queue_unusable", AGAIN),
    "a pull without a ticket": (nothing, dict(path=PULL, chunks=[b"type=mean"]), 400, "malformed", {}),
    **{
        f"a pull of half a letter as {name}": (
            nothing,
            dict(path=PULL, chunks=[rb'{"uuid": "t", "%s": "\ud800"}' % name.encode()], headers=[JSON]),
            400,
            "malformed",
            {},
        )
        for name in ("uuid", "type")
    },
    **{
        f"a wait of {wait}": (nothing, dict(path=PULL, chunks=[f"uuid=t&wait={wait}".encode()]), 400, "malformed", {})
        for wait in ("inf", "nan", "-1", "soon")
    },
    "a push, as published": (nothing, dict(path="/api/reward/push", chunks=[b"uuid=1&scores={}"]), 404, "", {}),
    "a long form": (nothing, dict(path=PULL, chunks=[b"uuid=" + b"t" * 99_999]), 413, "too_long", CLOSE),
    "a long ping": (nothing, dict(path=PING, chunks=[b"x" * 99_999]), 413, "too_long", CLOSE),
    "an unknown ticket": (nothing, dict(path=PULL, chunks=[b"uuid=t&type=mean"]), 404, "", {}),
    "a reward that nobody named": (fills, dict(path=PULL, chunks=[b"uuid=t0"]), 404, "", {}),
    "not ready, as published": (fills, dict(path=PULL, chunks=[b"uuid=t0&type=mean"]), 400, "", {}),
    "not ready": (fills, dict(path=PULL, chunks=[b"uuid=t0&type=mean&wait=0.01"]), 202, "", {}),
    "at work": (settles("running"), dict(path=PULL, chunks=[b"uuid=t&type=mean&wait=900"]), 202, "", {}),
    "failed": (settles("failed"), dict(path=PULL, chunks=[b"uuid=t&type=mean"]), 200, "", {}),
    "no token": (nothing, dict(path=ENQUEUE, chunks=[STALL], headers=[RIGHT]), 401, "token", CLOSE),  # twice
}  # fmt: skip


def answer(made: Here, **request: Any) -> Answered:
    return asyncio.run(asyncio.wait_for(asked(create_app(made.service), **request), LONGEST_S))


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_counted_and_holds_nothing(name: str, tmp_path: Path) -> None:
    before, request, status, reason, headers = REFUSALS[name]
    made = Here(tmp_path, token="secret", max_jobs=2, max_body_mb=0.0025, max_wait_s=0.05)
    before(made)
    was = held(made)
    found = answer(made, **request)
    assert found.status == status, found
    counted = made.supervisor.metrics._counters["reward_rejects_total"].items()
    assert {dict(labels)["reason"]: number for labels, number in counted} == ({reason: 1} if reason else {})
    kept = {name: value for name, value in found.headers.items() if name in ("retry-after", "connection")}
    assert kept == headers
    assert held(made) == was
    if name == "failed":
        assert found.content["valid"] == [False] * 3 and found.content["error"] == "torn"
    else:
        assert found.content.get("message") or found.content["detail"]
    made.close()


@pytest.mark.parametrize(("size", "status"), [(2500, 200), (2501, 413)])
def test_a_body_may_be_as_long_as_it_is_allowed(size: int, status: int, tmp_path: Path) -> None:
    made = Here(tmp_path, token="secret", max_body_mb=0.0025)
    data = body("a" * (size - len(body(""))))
    found = answer(made, path=ENQUEUE, chunks=[data[k : k + 100] for k in range(0, size, 100)])
    assert len(data) == size and found.status == status
    made.close()
