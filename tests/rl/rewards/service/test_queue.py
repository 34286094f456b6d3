# SPDX-License-Identifier: Apache-2.0
"""The queue: nothing is lost or written twice, what does not fit is refused; and its contract in plain Python, by the
same calls in random order, with everything compared after each."""

import contextlib
import random
import shutil
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from cosmos_predict2.rl.rewards.service import queue as queues
from cosmos_predict2.rl.rewards.service import redis_queue, sqlite_queue
from cosmos_predict2.rl.rewards.service.queue import (
    Job,
    Limits,
    OtherBody,
    Queue,
    QueueFull,
    QueueUnusable,
    Status,
    death_reason,
)
from cosmos_predict2.rl.rewards.service.redis_queue import RedisQueue
from cosmos_predict2.rl.rewards.service.settings import open_queue
from cosmos_predict2.rl.rewards.service.sqlite_queue import SQLiteQueue
from imaginaire.distributed import free_port
from imaginaire.errors import ConfigError
from tests.programs import HANG_S
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


def test_no_two_workers_and_no_two_requests_have_one_name() -> None:
    assert len({queues.worker_name("a") for _ in range(9)}) == len({queues.ticket_of(None) for _ in range(9)}) == 9
    assert queues.ticket_of("run/1") == queues.ticket_of("run/1") != queues.ticket_of("run/2")
    assert sqlite_queue.now is time.time  # which processes and restarts agree on


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


REWARDS, WORKERS = ("a", "b"), ("w0", "w1", "w2")
BODIES = {f"t{k}": b"x" * (5 + 4 * k) for k in range(6)}
TTL_S = 100.0
LIMITS = [Limits(jobs, size, TTL_S, 2) for jobs, size in ((4, 1000), (100, 45), (7, 60))]
Key = tuple[str, str]  # ticket, reward


@dataclass
class Row:
    number: int
    accepted: float
    state: str = "queued"
    attempt: int = 0
    deaths: int = 0
    worker: str = ""
    ends: float = 0.0
    settled: float = 0.0
    version: str = ""
    result: str | None = None
    error: str | None = None

    @property
    def is_open(self) -> bool:
        return self.state in ("queued", "running")


class Reference:
    """The contract."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.limits, self.clock = limits, clock
        self.rows: dict[Key, Row] = {}
        self.requests: dict[str, tuple[str, int]] = {}  # digest, number of clips
        self.number = 0

    def open_tickets(self) -> set[str]:
        return {ticket for (ticket, _), row in self.rows.items() if row.is_open}

    def num_bytes(self) -> int:
        return sum(len(BODIES[ticket]) for ticket in self.open_tickets())

    def put(self, ticket: str, rewards: Mapping[str, str], body: bytes, digest: str, num_clips: int) -> bool:
        if self.requests.get(ticket, (digest, 0))[0] != digest:
            raise OtherBody
        found = {reward: self.rows.get((ticket, reward)) for reward in rewards}
        good = [
            reward
            for reward, row in found.items()
            if row is not None and (row.is_open or (row.state == "done" and row.version == rewards[reward]))
        ]
        if not (wanted := [reward for reward in rewards if reward not in good]):
            return False
        num_open = sum(row.is_open for row in self.rows.values())
        if num_open + len(wanted) > self.limits.max_jobs or self.num_bytes() + len(body) > self.limits.max_bytes:
            raise QueueFull
        self.requests[ticket] = digest, num_clips
        for reward in wanted:
            self.number += 1
            self.rows[ticket, reward] = Row(self.number, self.clock())
        return True

    def lease(self, reward: str, worker: str, limit: int, seconds: float) -> list[Job]:
        own = {key: row for key, row in self.rows.items() if key[1] == reward}
        for row in own.values():
            if row.state == "running" and row.ends < self.clock():
                self._retry(row, "", False)
        waiting = sorted((row.number, key) for key, row in own.items() if row.state == "queued")
        alone = [key for _, key in waiting if own[key].deaths][:1]
        jobs = []
        for key in alone or [key for _, key in waiting if not own[key].deaths][:limit]:
            row = own[key]
            row.state, row.worker, row.ends, row.attempt = "running", worker, self.clock() + seconds, row.attempt + 1
            jobs.append(Job(*key, row.attempt, BODIES[key[0]]))
        return jobs

    def renew(self, jobs: Sequence[Job], worker: str, seconds: float) -> None:
        for job in jobs:
            row = self.rows.get((job.ticket, job.reward))
            if row is not None and row.state == "running" and row.worker == worker:
                row.ends = self.clock() + seconds

    def finish(self, job: Job, worker: str, result: str, version: str) -> bool:
        return self._settle(job, worker, state="done", result=result, version=version)

    def fail(self, job: Job, worker: str, reason: str) -> bool:
        return self._settle(job, worker, state="failed", error=reason)

    def release(self, reward: str, worker: str, reason: str, has_died: bool) -> int:
        own = [row for key, row in self.rows.items() if key[1] == reward]
        held = [row for row in own if row.state == "running" and row.worker == worker]
        for row in held:
            self._retry(row, reason, has_died)
        return len(held)

    def purge(self) -> int:
        old = self.clock() - self.limits.result_ttl_s
        forgotten = [key for key, row in self.rows.items() if not row.is_open and row.settled < old]
        for key in forgotten:
            del self.rows[key]
        self.requests = {t: facts for t, facts in self.requests.items() if any(key[0] == t for key in self.rows)}
        return len(forgotten)

    def recover(self) -> int:
        running = [row for row in self.rows.values() if row.state == "running"]
        for row in running:
            self._retry(row, "", False)
        return len(running)

    def look(self, ticket: str, reward: str) -> Status | None:
        row = self.rows.get((ticket, reward))
        return None if row is None else Status(row.state, row.result, row.error, self.requests[ticket][1])

    def _settle(self, job: Job, worker: str, **values: Any) -> bool:
        row = self.rows.get((job.ticket, job.reward))
        if row is None or (row.state, row.worker, row.attempt) != ("running", worker, job.attempt):
            return False
        for name, value in {**values, "settled": self.clock()}.items():
            setattr(row, name, value)
        return True

    def _retry(self, row: Row, reason: str, has_died: bool) -> None:
        row.deaths += has_died
        row.state, row.worker = "queued", ""
        if row.deaths >= self.limits.max_attempts:
            row.state, row.settled, row.error = "failed", self.clock(), death_reason(row.deaths, reason)


class OfSQLite:
    """A queue in a file, and what is kept in it."""

    counts_settled = True

    def __init__(self, folder: Path, clock: Callable[[], float], patch: pytest.MonkeyPatch) -> None:
        self.place = str(folder / "queue.sqlite3")
        patch.setattr(sqlite_queue, "now", clock)

    def open(self, limits: Limits) -> Any:
        return open_queue(self.place, limits)

    def kept(self, queue: Any) -> Any:
        """Bytes that count, and tickets of bodies."""
        (size,) = queue._db.execute("SELECT COALESCE(SUM(bytes), 0) FROM requests").fetchone()
        return size, {ticket for (ticket,) in queue._db.execute("SELECT ticket FROM bodies")}

    def is_empty(self, queue: Any) -> bool:
        return not any(queue._db.execute(f"SELECT 1 FROM {name}").fetchone() for name in ("jobs", "requests"))


class OfRedis:
    """A queue in Redis, by the clock of the test, and what is kept there."""

    counts_settled = False

    def __init__(self, place: str, clock: Callable[[], float], patch: pytest.MonkeyPatch) -> None:
        self.place, self.clock = place, clock
        self.server = redis.Redis.from_url(place)
        script = redis_queue._COMMON.replace("redis.call('TIME')", "{redis.call('GET', 'clock'), 0}")
        assert script != redis_queue._COMMON
        patch.setattr(redis_queue, "_COMMON", script)
        run = redis_queue.RedisQueue._run
        patch.setattr(
            redis_queue.RedisQueue,
            "_run",
            lambda queue, *arguments: (self.server.set("clock", clock()), run(queue, *arguments))[1],
        )

    def open(self, limits: Limits) -> Any:
        queue: Any = open_queue(self.place, limits)
        queue._redis.time = lambda: (int(self.clock()), self.clock() % 1 * 1e6)
        return queue

    def kept(self, queue: Any) -> Any:
        bodies = {key.decode().rpartition(":")[2] for key in self.server.scan_iter("*:body:*")}
        assert int(self.server.get("cosmos_rewards:open") or 0) == sum(one.num_open for one in queue.depth().values())
        return int(self.server.get("cosmos_rewards:bytes") or 0), bodies

    def is_empty(self, queue: Any) -> bool:
        lasting = {key.decode().partition(":")[2] for key in self.server.keys("*:*")}
        return lasting <= {"rewards", "number", "open", "bytes"}


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.slow)])
def clock_and_place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[float], Any]]:
    clock = [1e9]
    if request.param == "redis":
        yield clock, OfRedis(request.getfixturevalue("redis_url"), lambda: clock[0], monkeypatch)
    else:
        yield clock, OfSQLite(tmp_path, lambda: clock[0], monkeypatch)


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (OtherBody, QueueFull) as error:
        return type(error)


def compare(queue: Any, reference: Reference, place: Any) -> None:
    for ticket in BODIES:
        for reward in REWARDS:
            assert queue.look(ticket, reward) == reference.look(ticket, reward)
    depth = queue.depth()
    for reward in REWARDS:
        rows = [row for key, row in reference.rows.items() if key[1] == reward]
        counts = Counter(row.state for row in rows if place.counts_settled or row.is_open)
        found = {state: n for state, n in depth[reward].counts.items() if n} if reward in depth else {}
        assert found == counts
        oldest = max((reference.clock() - row.accepted for row in rows if row.is_open), default=0.0)
        assert (depth[reward].oldest_s if reward in depth else 0.0) == pytest.approx(oldest, abs=1e-5)
    assert place.kept(queue) == (reference.num_bytes(), reference.open_tickets())


@pytest.mark.parametrize("limits", LIMITS)
def test_the_queue_does_what_its_contract_says(limits: Limits, clock_and_place: tuple[list[float], Any]) -> None:
    clock, place = clock_and_place
    draw = random.Random(limits.max_jobs)
    queue, reference = place.open(limits), Reference(limits, lambda: clock[0])
    leased: list[Job] = []

    def both(name: str, *arguments: Any) -> Any:
        found = outcome(lambda: getattr(queue, name)(*arguments))
        assert found == outcome(lambda: getattr(reference, name)(*arguments)), (name, arguments)
        compare(queue, reference, place)
        return found

    def one() -> tuple[Job, str]:
        """A job that was leased not long ago, and mostly the name of its worker."""
        job = draw.choice(leased[-8:])
        row = reference.rows.get((job.ticket, job.reward))
        return job, row.worker if row is not None and row.worker and draw.random() < 0.8 else draw.choice(WORKERS)

    for step in range(220):
        clock[0] += draw.choice((0.0, 0.0, 0.0, 0.1, 3.0, 30.0))
        kind = draw.choices(
            ("put", "lease", "finish", "fail", "renew", "release", "purge", "open"), (6, 8, 4, 1, 2, 2, 1, 0.5)
        )[0]
        worker, reward = draw.choice(WORKERS), draw.choice(REWARDS)
        if kind == "put":
            ticket = draw.choice([*BODIES])
            asked = {name: draw.choice(("v1", "v1", "v2")) for name in draw.choice((("a",), ("b",), REWARDS))}
            digest = "another" if draw.random() < 0.1 else "digest"
            both("put", ticket, asked, BODIES[ticket], digest, draw.randint(1, 3))
        elif kind == "lease":
            leased += both("lease", reward, worker, draw.randint(1, 3), draw.choice((5.0, 50.0)))
        elif kind == "release":
            both("release", reward, worker, f"signal {step}", draw.random() < 0.5)
        elif kind == "purge":
            clock[0] += draw.choice((0.0, 60.0, 150.0))
            both("purge")
        elif kind == "open":
            queue.close()
            queue = place.open(limits)
            if place.counts_settled:
                both("recover")
        elif leased:
            job, name = one()
            if kind == "renew":
                both("renew", [*{(j.ticket, j.reward): j for j in leased[-4:]}.values()], name, 20.0)
            else:
                both(kind, job, name, *((f'"{step}"', draw.choice(("v1", "v2"))) if kind == "finish" else ("torn",)))
    clock[0] += 60.0  # every lease has ended
    while jobs := [job for reward in REWARDS for job in both("lease", reward, "last", 9, 1e9)]:
        for job in jobs:
            both("finish", job, "last", "{}", "v1")
    for _ in range(2):
        clock[0] += 2 * TTL_S + 1
        both("purge")
    assert place.is_empty(queue)
    queue.close()


def await_redis(port: int) -> None:
    for _ in range(int(10 * HANG_S)):
        try:
            redis.Redis(port=port).ping()
            return
        except redis.ConnectionError:
            time.sleep(0.1)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server is installed: apt-get install redis-server")
    folder, port = tmp_path_factory.mktemp("redis"), free_port()
    words = ["redis-server", "--port", str(port), "--dir", str(folder), "--appendonly", "yes", "--bind", "127.0.0.1"]
    process = subprocess.Popen([*words, "--save", ""], stdout=subprocess.DEVNULL)
    await_redis(port)
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait()


@pytest.fixture
def redis_url(redis_server: str) -> str:
    """An empty Redis."""
    redis.Redis.from_url(redis_server).flushdb()
    return redis_server
