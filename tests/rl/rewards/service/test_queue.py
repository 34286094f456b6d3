# SPDX-License-Identifier: Apache-2.0
"""The queue: nothing is lost, nothing is written twice, and what does not fit is refused."""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis

from cosmos_predict2.rl.rewards.service import queue as queues
from cosmos_predict2.rl.rewards.service import redis_queue
from cosmos_predict2.rl.rewards.service.open_queue import open_queue
from cosmos_predict2.rl.rewards.service.queue import Limits, Queue, QueueUnusable
from cosmos_predict2.rl.rewards.service.redis_queue import RedisQueue
from cosmos_predict2.rl.rewards.service.sqlite_queue import SQLiteQueue
from imaginaire.errors import ConfigError
from tests.rl.rewards.doubles import in_threads

A = {"a": "v1"}  # rewards, and their versions
Open = Callable[[Limits], Queue]


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    made: list[Queue] = []
    place = str(tmp_path / "queue.sqlite3")
    if request.param == "redis":
        place = request.getfixturevalue("redis_url")

    def make(limits: Limits) -> Queue:
        made.append(open_queue(place, limits))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


def test_no_two_workers_and_no_two_requests_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({queues.worker_name("a") for _ in range(9)}) == len({queues.ticket_of(None) for _ in range(9)}) == 9
    assert queues.ticket_of("run/1") == queues.ticket_of("run/1") != queues.ticket_of("run/2")
    monkeypatch.setattr(time, "time", lambda: 5.0)  # which processes and restarts agree on
    assert queues.now() == 5.0


def test_many_threads_lease_each_job_once(opened: Open) -> None:
    queue = opened(Limits())
    in_threads(4, lambda k: [queue.put(f"t{k}.{i}", A, b"b", "d", 1) for i in range(15)])

    def work(k: int) -> list[str]:
        done: list[str] = []
        while jobs := queue.lease("a", f"w{k}", 3, 30):
            done += [job.ticket for job in jobs if queue.finish(job, f"w{k}", "{}", "v1")]
        return done

    found = [ticket for tickets in in_threads(4, work) for ticket in tickets]
    assert len(found) == len(set(found)) == 60


def test_a_full_disk_is_named_until_there_is_room(tmp_path: Path) -> None:
    queue = open_queue(str(tmp_path / "queue.sqlite3"), Limits())
    assert isinstance(queue, SQLiteQueue)
    queue.put("t", A, b"body", "d", 1)
    (pages,) = queue._db.execute("PRAGMA page_count").fetchone()
    queue._db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite answers as on a full disk
    with pytest.raises(QueueUnusable, match="full"):
        queue.put("u", A, b"x" * 500_000, "d", 1)
    assert queue.look("u", "a") is None and "full" in queue.fault()
    queue._db.execute("PRAGMA max_page_count = 1000000")
    assert queue.put("u", A, b"x" * 500_000, "d", 1) and queue.fault() == ""
    queue.close()


def test_what_is_no_queue_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"not a database, but long enough to look at" * 50)
    for place in (str(tmp_path / "picture.png"), "amqp://host", "redis://127.0.0.1:1/0"):
        with pytest.raises(ConfigError):
            open_queue(place, Limits())
    with contextlib.closing(sqlite3.connect(tmp_path / "later", isolation_level=None)) as db:
        db.execute("PRAGMA user_version = 3")
    with pytest.raises(ConfigError, match="version 3"):
        open_queue(str(tmp_path / "later"), Limits())


@pytest.fixture
def of_no_server(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RedisQueue]:
    """A queue whose Redis has these settings, and nothing else."""

    def make(url: str = "redis://user:secret@host/0", **settings: str) -> RedisQueue:
        def config_get(*_: str) -> dict[str, str]:
            if not settings:
                raise redis.ResponseError("unknown command")
            return {name.replace("_", "-"): value for name, value in settings.items()}

        server = SimpleNamespace(ping=lambda: True, config_get=config_get, register_script=lambda text: text)
        monkeypatch.setattr(redis.Redis, "from_url", lambda url, **_: server)
        return RedisQueue(url, Limits())

    return make


def test_a_redis_that_evicts_is_refused_and_one_that_forgets_is_warned_of(
    of_no_server: Callable[..., RedisQueue], caplog: pytest.LogCaptureFixture
) -> None:
    for policy in ("allkeys-lru", "allkeys-lfu", "volatile-ttl"):
        with pytest.raises(ConfigError, match="noeviction"):
            of_no_server(maxmemory_policy=policy, appendonly="yes")
    of_no_server(maxmemory_policy="noeviction", appendonly="yes")
    assert not caplog.text
    of_no_server(maxmemory_policy="noeviction", appendonly="no")
    assert "append-only" in caplog.text
    of_no_server()
    assert "does not show its settings" in caplog.text


def test_a_redis_that_does_not_answer_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:1/0 does not answer") as error:
        open_queue("redis://user:secret@127.0.0.1:1/0", Limits())
    assert "secret" not in str(error.value)
    opened: list[str] = []
    monkeypatch.setattr(redis_queue, "RedisQueue", lambda place, limits: opened.append(place))
    for place in ("redis://host", "rediss://host", "unix:///socket"):
        open_queue(place, Limits())
    assert opened == ["redis://host", "rediss://host", "unix:///socket"]


def test_a_redis_that_restarts_is_asked_again_for_a_while(
    of_no_server: Callable[..., RedisQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, clock = of_no_server(appendonly="yes"), [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += 25.0

    monkeypatch.setattr(redis_queue, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))

    def asked(*script: object) -> object:
        left = list(script)

        def ask() -> object:
            found = left.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        return queue._asked(ask)

    gone = [redis.ConnectionError("gone"), redis.TimeoutError("late"), redis.exceptions.BusyLoadingError("loading")]
    assert asked(*gone, 7) == 7
    with pytest.raises(QueueUnusable, match="does not answer"):
        asked(*gone, gone[0])  # 75 s later
    for kind in (redis.exceptions.OutOfMemoryError, redis.ResponseError):
        with pytest.raises(QueueUnusable, match="refused a change"):
            asked(kind("MISCONF Redis cannot save"))


@pytest.mark.slow
def test_the_time_of_redis_counts_not_that_of_the_machine(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = open_queue(redis_url, Limits())
    queue.put("t", A, b"body", "d", 1)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)  # a machine whose clock is an hour late
    (first,) = queue.lease("a", "w1", 1, 30)
    monkeypatch.setattr(time, "time", lambda: real() + 3600)  # another, an hour early
    assert queue.lease("a", "w2", 1, 30) == []
    assert queue.purge() == 0 and queue.depth()["a"].oldest_s < 1000
    assert queue.finish(first, "w1", "{}", "v1")
    assert queue.purge() == 0
    queue.close()


@pytest.mark.slow
def test_a_full_redis_is_named_until_there_is_room(redis_url: str) -> None:
    server = redis.Redis.from_url(redis_url)
    queue = open_queue(redis_url, Limits())
    server.config_set("maxmemory", "1")
    try:
        with pytest.raises(QueueUnusable, match="maxmemory"):
            queue.put("t", A, b"body", "d", 1)
        assert "maxmemory" in queue.fault()
    finally:
        server.config_set("maxmemory", "0")
    assert queue.fault() == ""
    assert queue.put("t", A, b"body", "d", 1)
    queue.close()
