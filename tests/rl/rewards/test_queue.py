# SPDX-License-Identifier: Apache-2.0
"""The queue: nothing is lost, nothing is written twice, and what does not fit is refused."""

import contextlib
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cosmos_predict2.rl.rewards.service import queue as queues
from cosmos_predict2.rl.rewards.service import sqlite_queue
from cosmos_predict2.rl.rewards.service.opening import open_queue
from cosmos_predict2.rl.rewards.service.queue import Limits, OtherBody, Queue, QueueFull, QueueUnusable
from cosmos_predict2.rl.rewards.service.sqlite_queue import SQLiteQueue
from imaginaire.distributed import free_port
from imaginaire.errors import ConfigError
from tests.programs import HANG_S
from tests.rl.rewards.doubles import in_threads

A, AB = {"a": "v1"}, {"a": "v1", "b": "v1"}  # rewards, and their versions
Open = Callable[[Limits], Queue]


def await_redis(port: int) -> None:
    import redis

    for _ in range(int(10 * HANG_S)):
        try:
            redis.Redis(port=port).ping()
            return
        except redis.ConnectionError:
            time.sleep(0.1)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server is installed: apt-get install redis-server")
    folder, port = tmp_path_factory.mktemp("redis"), free_port()
    words = ["redis-server", "--port", str(port), "--dir", str(folder), "--appendonly", "yes", "--bind", "127.0.0.1"]
    process = subprocess.Popen([*words, "--save", ""], stdout=subprocess.DEVNULL)
    await_redis(port)
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait()


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    made: list[Queue] = []
    place = str(tmp_path / "queue.sqlite3")
    if request.param == "redis":
        import redis

        place = request.getfixturevalue("redis_url")
        redis.Redis.from_url(place).flushdb()

    def make(limits: Limits) -> Queue:
        made.append(open_queue(place, limits))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


def test_jobs_are_leased_in_order_and_finished_once(opened: Open) -> None:
    queue = opened(Limits())
    for k in range(5):
        assert queue.put(f"t{k}", AB, b"body%d" % k, "d", 1)
    jobs = queue.lease("a", "w1", 3, 30)
    assert [(job.ticket, job.body) for job in jobs] == [("t0", b"body0"), ("t1", b"body1"), ("t2", b"body2")]
    assert [job.ticket for job in queue.lease("a", "w2", 10, 30)] == ["t3", "t4"]
    assert queue.lease("a", "w2", 10, 30) == []
    assert queue.finish(jobs[0], "w1", '{"x": 1}', "v1")
    assert not queue.finish(jobs[0], "w1", '{"x": 2}', "v1")
    assert not queue.fail(jobs[0], "w1", "late")
    assert not queue.finish(jobs[1], "w2", "{}", "v1")  # it is w1's
    status = queue.look("t0", "a")
    assert status is not None
    assert (status.state, status.result) == ("done", '{"x": 1}')
    assert queue.fail(jobs[1], "w1", "torn")
    assert queue.look("t1", "a") == queues.Status("failed", None, "torn", 1)
    assert queue.look("t0", "c") is None
    waiting = [("t0", "a"), ("t1", "a"), ("t2", "a"), ("t0", "b"), ("unknown", "a")]
    assert sorted(queue.settled(waiting)) == [("t0", "a"), ("t1", "a"), ("unknown", "a")]
    assert queue.depth()["b"].counts["queued"] == 5
    assert queue.depth()["a"].counts["running"] == 3


def test_the_same_request_counts_once(opened: Open) -> None:
    queue = opened(Limits())
    assert queue.put("t", A, b"body", "d", 1)
    assert not queue.put("t", A, b"body", "d", 1)
    with pytest.raises(OtherBody):
        queue.put("t", A, b"other", "e", 1)
    (job,) = queue.lease("a", "w", 10, 30)
    queue.finish(job, "w", "{}", "v1")
    assert not queue.put("t", A, b"body", "d", 1)
    assert queue.lease("a", "w", 10, 30) == []


def test_a_lease_that_ends_gives_the_job_to_another_worker(opened: Open) -> None:
    queue = opened(Limits(max_attempts=2))
    queue.put("t", A, b"body", "d", 1)
    (first,) = queue.lease("a", "w1", 1, 0.05)
    time.sleep(0.1)
    (second,) = queue.lease("a", "w2", 1, 2.0)
    assert second.attempt == 2
    queue.renew([second], "w2", 60)
    queue.renew([first], "w1", 30)
    time.sleep(2.1)
    assert queue.lease("a", "w3", 1, 30) == []
    assert not queue.finish(first, "w1", "{}", "v1")
    assert queue.finish(second, "w2", "{}", "v1")


def test_a_worker_that_leases_its_own_lost_job_again_finishes_the_new_lease_alone(opened: Open) -> None:
    """What it still computed under the old one comes too late, like that of any other worker."""
    queue = opened(Limits(max_attempts=3))
    queue.put("t", A, b"body", "d", 1)
    (first,) = queue.lease("a", "w", 1, 0.05)
    time.sleep(0.1)
    (second,) = queue.lease("a", "w", 1, 30)
    assert not queue.finish(first, "w", '{"late": 1}', "v1")
    assert not queue.fail(first, "w", "late")
    assert queue.finish(second, "w", "{}", "v1") and not queue.finish(second, "w", "{}", "v1")


def test_who_was_in_a_dead_workers_company_is_tried_alone_and_the_others_go_on(opened: Open) -> None:
    queue = opened(Limits(max_attempts=2))
    for k in range(6):
        queue.put(f"t{k}", A, b"body", f"d{k}", 1)
    assert len(queue.lease("a", "w1", 3, 30)) == 3
    assert queue.release("w1", "signal 9", has_died=True) == 3
    fresh = queue.lease("a", "w2", 2, 30)
    assert [(job.ticket, job.is_suspect) for job in fresh] == [("t3", False), ("t4", False)]
    assert [job.ticket for job in queue.lease("a", "w2", 2, 30, suspect_first=True)] == ["t5"]  # it holds others
    for job in fresh:
        queue.finish(job, "w2", "{}", "v1")
    (alone,) = queue.lease("a", "w3", 2, 30)
    assert alone.ticket == "t0"  # t5 is w2's: nothing else is fresh
    queue.release("w3", "drained", has_died=False)
    queue.release("w2", "drained", has_died=False)
    (suspect,) = queue.lease("a", "w4", 9, 30, suspect_first=True)
    assert (suspect.ticket, suspect.is_suspect) == ("t0", True)
    queue.release("w4", "signal 9", has_died=True)
    status = queue.look("t0", "a")
    assert status is not None
    assert status.state == "failed" and "signal 9" in str(status.error) and "2 times" in str(status.error)
    assert [job.ticket for job in queue.lease("a", "w5", 9, 30)] == ["t5"]
    for _ in range(9):
        queue.release("w5", "drained", has_died=False)
        (suspect,) = queue.lease("a", "w5", 9, 30, suspect_first=True)
        assert suspect.ticket == "t1"
    assert queue.finish(suspect, "w5", "{}", "v1")


def test_a_lost_server_or_machine_speaks_against_no_job_until_very_often(opened: Open) -> None:
    queue = opened(Limits(max_attempts=2))
    for ticket in ("t0", "t1"):
        queue.put(ticket, A, b"body", ticket, 1)
    for k in range(queues.OFTEN):
        jobs = queue.lease("a", f"w{k}", 9, 0.0)
        assert [job.ticket for job in jobs] == ["t0", "t1"]
        time.sleep(0.002)
    for k in range(queues.MOST_LEASES - queues.OFTEN):
        (job,) = queue.lease("a", f"v{k}", 9, 0.0)
        assert (job.ticket, job.is_suspect) == ("t0", True)
        time.sleep(0.002)
    (other,) = queue.lease("a", "last", 9, 30)
    assert other.ticket == "t1" and queue.finish(other, "last", "{}", "v1")
    status = queue.look("t0", "a")
    assert status is not None
    assert status.state == "failed" and "leased" in str(status.error)


def test_what_failed_or_has_another_version_is_scored_anew(opened: Open) -> None:
    queue = opened(Limits())
    assert queue.put("t", AB, b"body", "d", 1)
    (a,), (b,) = queue.lease("a", "w", 9, 30), queue.lease("b", "w", 9, 30)
    queue.finish(a, "w", '{"x": 1}', "v1")
    queue.fail(b, "w", "torn")
    assert queue.put("t", AB, b"body", "d", 1)
    assert queue.lease("a", "w", 9, 30) == []
    (b,) = queue.lease("b", "w", 9, 30)
    assert (b.body, b.attempt) == (b"body", 1) and queue.finish(b, "w", "{}", "v1")
    assert not queue.put("t", AB, b"body", "d", 1)
    assert queue.put("t", {"a": "v2"}, b"body", "d", 1)
    (a,) = queue.lease("a", "w", 9, 30)
    assert not queue.put("t", {"a": "v3"}, b"body", "d", 1)  # it is on its way
    assert queue.finish(a, "w", '{"x": 2}', "v2")
    status = queue.look("t", "a")
    assert status is not None and status.result == '{"x": 2}'
    counts = {name: one.counts for name, one in queue.depth().items()}
    assert not any(counts[name].get("queued", 0) + counts[name].get("running", 0) for name in "ab")


def test_a_full_queue_refuses_and_takes_again(opened: Open) -> None:
    queue = opened(Limits(max_jobs=3, max_bytes=120))

    def finish(reward: str) -> None:
        (job,) = queue.lease(reward, "w", 1, 30)
        queue.finish(job, "w", "{}", "v1")

    queue.put("t0", AB, b"x" * 60, "d", 1)
    with pytest.raises(QueueFull):
        queue.put("t1", AB, b"x", "d", 1)
    with pytest.raises(QueueFull):
        queue.put("t1", A, b"x" * 61, "d", 1)
    finish("a")
    assert queue.put("t0", {"a": "v2"}, b"x" * 60, "d", 1)  # while b is open: the body is there, and counts once
    finish("a")
    finish("b")
    assert queue.put("t1", AB, b"x" * 120, "d", 1)
    finish("b")
    for _ in range(2):
        queue.lease("a", "w", 1, 30)
        queue.release("w", "killed", has_died=True)
    assert queue.put("t2", A, b"x" * 120, "d", 1)  # what failed waits no longer


def test_results_expire_and_may_be_asked_again(opened: Open) -> None:
    queue = opened(Limits(result_ttl_s=1.0))
    queue.put("t", A, b"body", "d", 1)
    (job,) = queue.lease("a", "w", 1, 30)
    queue.finish(job, "w", "{}", "v1")
    assert queue.purge() == 0
    time.sleep(1.1)
    assert queue.purge() == 1
    status = queue.look("t", "a")
    assert status is not None
    assert status.state == "expired" and status.result is None
    assert queue.put("t", A, b"body", "d", 1)
    assert len(queue.lease("a", "w", 1, 30)) == 1


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


def test_the_age_of_the_oldest_open_job_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = open_queue(str(tmp_path / "queue.sqlite3"), Limits())
    for ticket, accepted in (("t0", 100.0), ("t1", 107.0)):
        monkeypatch.setattr(sqlite_queue, "now", lambda accepted=accepted: accepted)
        queue.put(ticket, A, b"body", "d", 1)
    jobs = queue.lease("a", "w", 1, 30)
    monkeypatch.setattr(sqlite_queue, "now", lambda: 110.0)
    assert queue.depth()["a"].oldest_s == 10  # it runs: nobody has its result yet
    jobs += queue.lease("a", "w", 1, 30)
    for job, age in zip(jobs, (3, 0), strict=True):
        queue.finish(job, "w", "{}", "v1")
        assert queue.depth()["a"].oldest_s == age
    queue.close()


def test_a_file_of_sqlite_survives_its_process(tmp_path: Path) -> None:
    path = str(tmp_path / "queue.sqlite3")
    queue = open_queue(path, Limits())
    queue.put("t", A, b"body", "d", 1)
    queue.lease("a", "w", 1, 3600)
    queue.close()
    again = open_queue(path, replace(Limits(), max_jobs=5))
    assert again.lease("a", "w2", 1, 30) == []
    assert again.recover() == 1
    (job,) = again.lease("a", "w2", 1, 30)
    assert not job.is_suspect
    again.close()


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


@pytest.mark.long
def test_a_redis_that_evicts_is_refused(redis_url: str) -> None:
    import redis

    server = redis.Redis.from_url(redis_url)
    server.config_set("maxmemory-policy", "allkeys-lfu")
    try:
        with pytest.raises(ConfigError, match="noeviction"):
            open_queue(redis_url, Limits())
    finally:
        server.config_set("maxmemory-policy", "noeviction")


@pytest.mark.slow
def test_the_time_of_redis_counts_not_that_of_the_machine(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import redis

    redis.Redis.from_url(redis_url).flushdb()
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
    import redis

    server = redis.Redis.from_url(redis_url)
    server.flushdb()
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
    import redis

    server = redis.Redis.from_url(redis_url)
    server.flushdb()
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
