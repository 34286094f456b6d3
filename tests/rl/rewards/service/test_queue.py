# SPDX-License-Identifier: Apache-2.0
"""The queue: nothing is lost, nothing is written twice, and what does not fit is refused."""

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from cosmos_predict2.rl.rewards.service import queue as queues
from cosmos_predict2.rl.rewards.service import redis_queue, sqlite_queue
from cosmos_predict2.rl.rewards.service.open_queue import open_queue
from cosmos_predict2.rl.rewards.service.queue import Limits, Queue, QueueUnusable
from cosmos_predict2.rl.rewards.service.redis_queue import RedisQueue
from cosmos_predict2.rl.rewards.service.sqlite_queue import SQLiteQueue
from imaginaire.errors import ConfigError
from tests.rl.rewards.doubles import in_threads

A, AB = {"a": "v1"}, {"a": "v1", "b": "v1"}  # rewards, and their versions
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


def test_a_lost_server_or_machine_speaks_against_no_job_until_very_often(opened: Open) -> None:
    queue = opened(Limits(max_attempts=2))
    for ticket in ("t0", "t1"):
        queue.put(ticket, A, b"body", ticket, 1)
    for k in range(4):
        jobs = queue.lease("a", f"w{k}", 9, 0.0)
        assert [job.ticket for job in jobs] == ["t0", "t1"]
        time.sleep(0.002)
    for k in range(50 - 4):
        (job,) = queue.lease("a", f"v{k}", 9, 0.0)
        assert (job.ticket, job.is_suspect) == ("t0", True)
        time.sleep(0.002)
    (other,) = queue.lease("a", "last", 9, 30)
    assert other.ticket == "t1" and queue.finish(other, "last", "{}", "v1")
    status = queue.look("t0", "a")
    assert status is not None
    assert status.state == "failed" and "leased" in str(status.error)


def test_no_two_workers_and_no_two_requests_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({queues.worker_name("a") for _ in range(9)}) == len({queues.ticket_of(None) for _ in range(9)}) == 9
    assert queues.ticket_of("run/1") == queues.ticket_of("run/1") != queues.ticket_of("run/2")
    monkeypatch.setattr(time, "time", lambda: 5.0)  # which processes and restarts agree on
    assert queues.now() == 5.0


def test_more_jobs_than_one_question_holds_are_waited_for(tmp_path: Path) -> None:
    queue = open_queue(str(tmp_path / "queue.sqlite3"), Limits())
    queue.put("t", A, b"body", "d", 1)
    waiting = [*((f"u{k:04}", "a") for k in range(1100)), ("t", "a")]
    for order in (waiting, waiting[::-1]):
        assert ("t", "a") not in queue.settled(order) and len(queue.settled(order)) == 1100
    queue.close()


def test_a_file_of_a_later_version_is_left_alone_and_a_lock_is_no_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "queue.sqlite3")
    monkeypatch.setattr(sqlite_queue, "_BUSY_S", 0.01)
    queue: Any = open_queue(path, Limits())
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        queue.put("s", A, b"body", "d", 1)
        assert queue._db().execute("PRAGMA synchronous").fetchone() == (2,)  # what is accepted survives a power cut
        queue.lease("a", "w", 1, 30)
        assert queue._db().execute("PRAGMA synchronous").fetchone() == (1,)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(QueueUnusable, match="locked") as error:
            queue.put("t", A, b"x" * 10**6, "d", 1)
        assert not error.value.is_full and "locked" in queue.fault()
        other.execute("ROLLBACK")
        assert queue.fault() == ""
        real = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(sqlite_queue, "_LEAST_FREE", 1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=10**5))
        assert queue.fault() == ""  # it lacked no room
        queue.close()
        other.execute("PRAGMA user_version = 3")
        with pytest.raises(ConfigError, match="version 3"):
            open_queue(path, Limits())


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


def test_a_file_that_is_deleted_or_replaced_under_the_service_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite3"
    queue, other = open_queue(str(path), Limits()), open_queue(str(tmp_path / "other"), Limits())
    queue.put("t", A, b"body", "d", 1)
    assert queue.fault() == ""
    for gone in (path.unlink, lambda: shutil.copy(tmp_path / "other", path)):
        gone()
        assert "deleted or replaced" in queue.fault()
        for use in (lambda: queue.put("u", A, b"", "d", 1), lambda: queue.look("t", "a"), queue.depth):
            with pytest.raises(QueueUnusable, match="deleted or replaced"):
                use()
            (failed,) = in_threads(1, lambda _, use=use: _raised(use))  # a connection of its own
            assert isinstance(failed, QueueUnusable)
    queue.close()
    other.close()


def _raised(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def test_a_full_disk_is_named_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = open_queue(str(tmp_path / "queue.sqlite3"), Limits())
    assert isinstance(queue, SQLiteQueue)
    queue.put("t", A, b"body", "d", 1)
    (pages,) = queue._db().execute("PRAGMA page_count").fetchone()
    queue._db().execute(f"PRAGMA max_page_count = {pages}")  # SQLite answers as on a full disk
    with pytest.raises(QueueUnusable, match="full") as error:
        queue.put("u", A, b"x" * 500_000, "d", 1)
    assert error.value.is_full
    assert queue.look("u", "a") is None
    real = shutil.disk_usage(tmp_path)
    for free, is_full in ((499_999, True), (10**8, False)):
        monkeypatch.setattr(sqlite_queue, "_LEAST_FREE", 1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: real._replace(free=free))
        assert ("is full" in queue.fault()) == is_full
    queue._db().execute("PRAGMA max_page_count = 1000000")
    assert queue.put("u", A, b"x" * 500_000, "d", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=499_999))
    assert queue.fault() == ""  # what is left is enough until it is not
    queue.close()


def test_a_queue_of_the_first_version_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "queue.sqlite3")
    with contextlib.closing(sqlite3.connect(path)) as db:
        for statement in FIRST_VERSION.split(";"):
            db.execute(statement)
        db.commit()
    queue = open_queue(path, Limits())
    assert queue.put("done", A, b"body", "d", 1)  # of no version: scored anew
    assert [job.ticket for job in queue.lease("a", "w", 9, 30)] == ["waiting", "done"]
    queue.close()


FIRST_VERSION = """
CREATE TABLE requests (
    ticket TEXT PRIMARY KEY, digest TEXT NOT NULL, num_clips INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE bodies (ticket TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, ticket TEXT NOT NULL, reward TEXT NOT NULL, state TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0, worker TEXT, lease_until REAL, accepted REAL NOT NULL, settled REAL,
    result TEXT, error TEXT, UNIQUE (ticket, reward));
INSERT INTO requests VALUES ('waiting', 'd', 1, 4), ('done', 'd', 1, 0);
INSERT INTO bodies VALUES ('waiting', 'body');
INSERT INTO jobs (ticket, reward, state, accepted) VALUES ('waiting', 'a', 'queued', 1.0);
INSERT INTO jobs (ticket, reward, state, accepted, settled, result) VALUES ('done', 'a', 'done', 1.0, 2.0, '{}');
PRAGMA user_version = 1
"""


def test_what_is_no_queue_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"not a database, but long enough to look at" * 50)
    for place in (str(tmp_path / "picture.png"), "amqp://host", "redis://127.0.0.1:1/0"):
        with pytest.raises(ConfigError):
            open_queue(place, Limits())


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
    with pytest.raises(QueueUnusable, match="does not answer") as error:
        asked(*gone, gone[0])  # 75 s later
    assert not error.value.is_full
    for refusal, is_full in (
        (redis.exceptions.OutOfMemoryError("command not allowed"), True),
        (redis.ResponseError("MISCONF Redis cannot save"), True),
        (redis.ResponseError("READONLY a replica"), False),
    ):
        with pytest.raises(QueueUnusable, match="refused a change") as error:
            asked(refusal)
        assert error.value.is_full == is_full and queue._failure == str(error.value)


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
def test_a_request_that_is_asked_again_ends_with_its_jobs_alone(redis_url: str) -> None:
    """Not when what was forgotten of it ends: who pulls must find the number of its clips, and its bytes count once."""
    server = redis.Redis.from_url(redis_url)
    queue = open_queue(redis_url, Limits(result_ttl_s=0.0))
    queue.put("t", A, b"body", "d", 1)
    (job,) = queue.lease("a", "w", 1, 30)
    queue.finish(job, "w", "{}", "v1")
    assert queue.purge() == 1
    assert queue.put("t", A, b"body", "d", 1)
    assert {server.ttl(key) for key in server.scan_iter("*:t*")} == {-1}
    queue.close()


@pytest.mark.slow
def test_a_full_redis_is_named_until_there_is_room(redis_url: str) -> None:
    server = redis.Redis.from_url(redis_url)
    queue = open_queue(redis_url, Limits())
    server.config_set("maxmemory", "1")
    try:
        with pytest.raises(QueueUnusable, match="maxmemory") as error:
            queue.put("t", A, b"body", "d", 1)
        assert error.value.is_full and "maxmemory" in queue.fault()
    finally:
        server.config_set("maxmemory", "0")
    assert queue.fault() == ""
    assert queue.put("t", A, b"body", "d", 1)
    queue.close()
