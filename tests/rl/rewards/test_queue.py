# SPDX-License-Identifier: Apache-2.0
"""The queue: nothing is lost, nothing is written twice, and what does not fit is refused."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cosmos_predict2.rl.rewards.service import queue as queues
from cosmos_predict2.rl.rewards.service.opening import open_queue
from cosmos_predict2.rl.rewards.service.queue import Limits, OtherBody, Queue, QueueFull
from imaginaire.distributed import free_port
from imaginaire.errors import ConfigError
from tests.rl.rewards.doubles import in_threads

Open = Callable[[Limits], Queue]


def await_redis(port: int) -> None:
    import redis

    for _ in range(100):
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


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.long)])
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
        assert queue.put(f"t{k}", ["a", "b"], b"body%d" % k, "d", 1)
    jobs = queue.lease("a", "w1", 3, 30)
    assert [(job.ticket, job.body) for job in jobs] == [("t0", b"body0"), ("t1", b"body1"), ("t2", b"body2")]
    assert [job.ticket for job in queue.lease("a", "w2", 10, 30)] == ["t3", "t4"]
    assert queue.lease("a", "w2", 10, 30) == []
    assert queue.finish(jobs[0], "w1", '{"x": 1}')
    assert not queue.finish(jobs[0], "w1", '{"x": 2}')
    assert not queue.fail(jobs[0], "w1", "late")
    assert not queue.finish(jobs[1], "w2", "{}")  # it is w1's
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
    assert queue.put("t", ["a"], b"body", "d", 1)
    assert not queue.put("t", ["a"], b"body", "d", 1)
    with pytest.raises(OtherBody):
        queue.put("t", ["a"], b"other", "e", 1)
    (job,) = queue.lease("a", "w", 10, 30)
    queue.finish(job, "w", "{}")
    assert not queue.put("t", ["a"], b"body", "d", 1)
    assert queue.lease("a", "w", 10, 30) == []


def test_a_lease_that_ends_gives_the_job_to_another_worker(opened: Open) -> None:
    queue = opened(Limits(max_attempts=2))
    queue.put("t", ["a"], b"body", "d", 1)
    (first,) = queue.lease("a", "w1", 1, 0.05)
    time.sleep(0.1)
    (second,) = queue.lease("a", "w2", 1, 0.2)
    assert second.attempt == 2
    for _ in range(4):
        time.sleep(0.1)
        queue.renew([second], "w2", 0.2)
        queue.renew([first], "w1", 30)
    assert queue.lease("a", "w3", 1, 30) == []
    assert not queue.finish(first, "w1", "{}")
    assert queue.finish(second, "w2", "{}")


def test_a_worker_that_leases_its_own_lost_job_again_finishes_the_new_lease_alone(opened: Open) -> None:
    """What it still computed under the old one comes too late, like that of any other worker."""
    queue = opened(Limits(max_attempts=3))
    queue.put("t", ["a"], b"body", "d", 1)
    (first,) = queue.lease("a", "w", 1, 0.05)
    time.sleep(0.1)
    (second,) = queue.lease("a", "w", 1, 30)
    assert not queue.finish(first, "w", '{"late": 1}')
    assert not queue.fail(first, "w", "late")
    assert queue.finish(second, "w", "{}") and not queue.finish(second, "w", "{}")


def test_a_job_whose_workers_die_fails_after_its_attempts_and_is_leased_alone(opened: Open) -> None:
    queue = opened(Limits(max_attempts=2))
    for k in range(3):
        queue.put(f"t{k}", ["a"], b"body", f"d{k}", 1)
    assert len(queue.lease("a", "w1", 10, 30)) == 3
    assert queue.release("w1", "signal 9", counts=True) == 3
    assert [job.ticket for job in queue.lease("a", "w2", 10, 30)] == ["t0"]
    queue.release("w2", "signal 9", counts=True)
    status = queue.look("t0", "a")
    assert status is not None
    assert status.state == "failed" and "signal 9" in str(status.error)
    for worker in ("w3", "w4"):  # a drain uses up no attempt
        assert [job.ticket for job in queue.lease("a", worker, 10, 30)] == ["t1"]
        queue.release(worker, "drained", counts=False)


def test_a_full_queue_refuses_and_takes_again(opened: Open) -> None:
    queue = opened(Limits(max_jobs=3, max_bytes=100))
    queue.put("t0", ["a", "b"], b"x" * 60, "d", 1)
    with pytest.raises(QueueFull):
        queue.put("t1", ["a", "b"], b"x", "d", 1)
    with pytest.raises(QueueFull):
        queue.put("t1", ["a"], b"x" * 60, "d", 1)
    for reward in "ab":
        (job,) = queue.lease(reward, "w", 1, 30)
        queue.finish(job, "w", "{}")
    assert queue.put("t1", ["a", "b"], b"x" * 60, "d", 1)
    assert queue.fail_waiting("a", "broken") == 1
    assert queue.depth()["a"].counts.get("queued", 0) == 0


def test_results_expire_and_may_be_asked_again(opened: Open) -> None:
    queue = opened(Limits(result_ttl_s=0.3))
    queue.put("t", ["a"], b"body", "d", 1)
    (job,) = queue.lease("a", "w", 1, 30)
    queue.finish(job, "w", "{}")
    assert queue.purge() == 0
    time.sleep(0.4)
    assert queue.purge() == 1
    status = queue.look("t", "a")
    assert status is not None
    assert status.state == "expired" and status.result is None
    assert queue.put("t", ["a"], b"body", "d", 1)
    assert len(queue.lease("a", "w", 1, 30)) == 1


def test_many_threads_lease_each_job_once(opened: Open) -> None:
    queue = opened(Limits())
    in_threads(4, lambda k: [queue.put(f"t{k}.{i}", ["a"], b"b", "d", 1) for i in range(15)])

    def work(k: int) -> list[str]:
        done: list[str] = []
        while jobs := queue.lease("a", f"w{k}", 3, 30):
            done += [job.ticket for job in jobs if queue.finish(job, f"w{k}", "{}")]
        return done

    found = [ticket for tickets in in_threads(4, work) for ticket in tickets]
    assert len(found) == len(set(found)) == 60


def test_a_file_of_sqlite_survives_its_process(tmp_path: Path) -> None:
    path = str(tmp_path / "queue.sqlite3")
    queue = open_queue(path, Limits())
    queue.put("t", ["a"], b"body", "d", 1)
    queue.lease("a", "w", 1, 3600)
    queue.close()
    again = open_queue(path, replace(Limits(), max_jobs=5))
    assert again.lease("a", "w2", 1, 30) == []
    assert again.recover() == 1
    (job,) = again.lease("a", "w2", 1, 30)
    assert job.attempt == 1
    again.close()


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
