# SPDX-License-Identifier: Apache-2.0
"""Every refusal of the service: how it is answered and counted, and that it holds nothing afterwards."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cosmos_predict2.rl.rewards.service.queue import QueueUnusable
from cosmos_predict2.rl.rewards.service.server import create_app
from cosmos_predict2.rl.rewards.service.supervisor import BROKEN
from tests.rl.rewards.doubles import body
from tests.rl.rewards.service.here import Here

RIGHT = ("authorization", "Bearer secret")
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


def rejects(made: Here) -> dict[str, float]:
    rows = made.supervisor.metrics._counters["reward_rejects_total"]
    return {dict(labels)["reason"]: number for labels, number in rows.items()}


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
    assert rejects(made) == ({reason: 1} if reason else {})
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
