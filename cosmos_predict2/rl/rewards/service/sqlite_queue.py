# SPDX-License-Identifier: Apache-2.0
"""The queue in one file of SQLite, for a service on one machine: what was accepted survives every kill."""

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import time as now  # processes and restarts agree on it
from typing import Any

from cosmos_predict2.rl.rewards.service import queue
from cosmos_predict2.rl.rewards.service.queue import Job, Limits, QueueUnusable
from imaginaire.errors import ConfigError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    ticket TEXT PRIMARY KEY, digest TEXT NOT NULL, num_clips INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS bodies (ticket TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, ticket TEXT NOT NULL, reward TEXT NOT NULL, state TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0, worker TEXT, lease_until REAL, accepted REAL NOT NULL, settled REAL,
    result TEXT, error TEXT, deaths INTEGER NOT NULL DEFAULT 0, version TEXT NOT NULL DEFAULT '',
    UNIQUE (ticket, reward));
CREATE INDEX IF NOT EXISTS waiting_jobs ON jobs (reward, state, deaths, number);
CREATE INDEX IF NOT EXISTS open_jobs ON jobs (state) WHERE state IN ('queued', 'running');
CREATE INDEX IF NOT EXISTS kept_bodies ON requests (bytes) WHERE bytes > 0;
CREATE INDEX IF NOT EXISTS settled_jobs ON jobs (settled) WHERE settled IS NOT NULL;
"""
_VERSION = 2
_BUSY_S = 60.0
_PAGE = 1 << 15
_CHECKPOINT = 64 << 20  # bytes of changes until they are copied to the main file: not after each body


class SQLiteQueue:
    """`Queue` in the file ``path``."""

    def __init__(self, path: str, limits: Limits) -> None:
        self.path = path
        self.limits = limits
        self._lock = threading.RLock()  # of the connection, which all threads share
        self._failure = ""  # of the last change
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._db.execute(f"PRAGMA page_size = {_PAGE}")  # bodies are large; of a new file only
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT // _PAGE}")
            with self._writing() as db:
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if version not in (0, _VERSION):
                    raise ConfigError(f"The queue {path} was written by version {version}; this one reads {_VERSION}.")
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {_VERSION}")
        except (sqlite3.DatabaseError, QueueUnusable) as error:
            raise ConfigError(f"The queue {path} cannot be opened: {error}. Move it away, or name another.") from error

    def put(self, ticket: str, rewards: Mapping[str, str], body: bytes, digest: str, num_clips: int) -> bool:
        with self._writing() as db:
            found = db.execute("SELECT digest FROM requests WHERE ticket = ?", (ticket,)).fetchone()
            if found is not None and found[0] != digest:
                raise queue.OtherBody
            known = db.execute("SELECT reward, state, version FROM jobs WHERE ticket = ?", (ticket,)).fetchall()
            good = {
                reward
                for reward, state, version in known
                if state in ("queued", "running") or (state == "done" and version == rewards.get(reward))
            }
            wanted = [reward for reward in rewards if reward not in good]
            if not wanted:
                return False
            jobs, size = db.execute(
                "SELECT (SELECT COUNT(*) FROM jobs WHERE state IN ('queued', 'running')),"
                " (SELECT COALESCE(SUM(bytes), 0) FROM requests WHERE bytes > 0)"
            ).fetchone()
            if jobs + len(wanted) > self.limits.max_jobs or size + len(body) > self.limits.max_bytes:
                raise queue.QueueFull(f"{jobs} jobs and {size >> 20} MiB wait.")
            db.execute("INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?)", (ticket, digest, num_clips, len(body)))
            db.execute("INSERT OR REPLACE INTO bodies VALUES (?, ?)", (ticket, body))
            rows = [(ticket, reward, now()) for reward in wanted]
            values = "(ticket, reward, state, accepted) VALUES (?, ?, 'queued', ?)"
            db.executemany(f"INSERT OR REPLACE INTO jobs {values}", rows)
        return True

    def lease(self, reward: str, worker: str, limit: int, seconds: float) -> list[Job]:
        ended = "reward = ? AND state = 'running' AND lease_until < ?"
        is_work = f"SELECT 1 FROM jobs WHERE (reward = ? AND state = 'queued') OR ({ended}) LIMIT 1"
        if not self._read(is_work, (reward, reward, now())):  # a look that locks nothing
            return []
        with self._writing() as db:
            self._retry(db, ended, (reward, now()))
            waiting = (
                "SELECT number, ticket, attempt, body FROM jobs JOIN bodies USING (ticket)"
                " WHERE reward = ? AND state = 'queued' AND deaths {} 0 ORDER BY number LIMIT ?"
            )
            rows = db.execute(waiting.format(">"), (reward, 1)).fetchall()
            rows = rows or db.execute(waiting.format("="), (reward, limit)).fetchall()
            db.executemany(
                "UPDATE jobs SET state = 'running', worker = ?, lease_until = ?, attempt = attempt + 1"
                " WHERE number = ?",
                [(worker, now() + seconds, row[0]) for row in rows],
            )
        return [Job(ticket, reward, attempt + 1, body) for _, ticket, attempt, body in rows]

    def renew(self, jobs: Sequence[Job], worker: str, seconds: float) -> None:
        ends = now() + seconds
        with self._writing() as db:
            db.executemany(
                "UPDATE jobs SET lease_until = ? WHERE ticket = ? AND reward = ? AND state = 'running' AND worker = ?",
                [(ends, job.ticket, job.reward, worker) for job in jobs],
            )

    def finish(self, job: Job, worker: str, result: str, version: str) -> bool:
        return self._settle(job, worker, "done", result, None, version)

    def fail(self, job: Job, worker: str, reason: str) -> bool:
        return self._settle(job, worker, "failed", None, reason, "")

    def release(self, reward: str, worker: str, reason: str, has_died: bool) -> int:
        with self._writing() as db:
            held = "reward = ? AND state = 'running' AND worker = ?"
            return self._retry(db, held, (reward, worker), has_died, reason)

    def look(self, ticket: str, reward: str) -> queue.Status | None:
        rows = self._read(
            "SELECT state, result, error, num_clips FROM jobs JOIN requests USING (ticket)"
            " WHERE ticket = ? AND reward = ?",
            (ticket, reward),
        )
        return queue.Status(*rows[0]) if rows else None

    def depth(self) -> dict[str, queue.Depth]:
        counts: dict[str, dict[str, int]] = {}
        oldest: dict[str, float] = {}
        rows = self._read("SELECT reward, state, COUNT(*), MIN(accepted) FROM jobs GROUP BY reward, state")
        for reward, state, number, accepted in rows:
            counts.setdefault(reward, {})[state] = number
            if state in ("queued", "running"):
                oldest[reward] = max(oldest.get(reward, 0.0), now() - accepted)
        return {reward: queue.Depth(found, oldest.get(reward, 0.0)) for reward, found in counts.items()}

    def purge(self) -> int:
        with self._writing() as db:
            old = now() - self.limits.result_ttl_s
            forgotten = db.execute("DELETE FROM jobs WHERE settled < ?", (old,)).rowcount
            db.execute("DELETE FROM requests WHERE bytes = 0 AND ticket NOT IN (SELECT ticket FROM jobs)")
        return int(forgotten)

    def recover(self) -> int:
        with self._writing() as db:
            return self._retry(db, "state = 'running'", ())

    def fault(self) -> str:
        return self._failure

    def close(self) -> None:
        self._db.close()

    def _settle(
        self, job: Job, worker: str, state: str, result: str | None, error: str | None, version: str
    ) -> bool:  # fmt: skip
        with self._writing() as db:
            written = db.execute(
                "UPDATE jobs SET state = ?, result = ?, error = ?, version = ?, settled = ?, worker = NULL"
                " WHERE ticket = ? AND reward = ? AND state = 'running' AND worker = ? AND attempt = ?",
                (state, result, error, version, now(), job.ticket, job.reward, worker, job.attempt),
            ).rowcount
            self._drop_body(db, job.ticket)
        return bool(written)

    def _retry(
        self, db: sqlite3.Connection, which: str, values: Sequence[Any], has_died: bool = False, reason: str = ""
    ) -> int:
        """Let jobs wait again, or fail where their workers died too often; how many they were."""
        rows = db.execute(f"SELECT number, ticket, deaths FROM jobs WHERE {which}", values).fetchall()
        for number, ticket, deaths in rows:
            deaths += has_died
            state, error, settled = "queued", None, None
            if deaths >= self.limits.max_attempts:
                state, error, settled = "failed", queue.death_reason(deaths, reason), now()
            db.execute(
                "UPDATE jobs SET state = ?, error = ?, settled = ?, deaths = ?, worker = NULL WHERE number = ?",
                (state, error, settled, deaths, number),
            )
            self._drop_body(db, ticket)
        return len(rows)

    def _drop_body(self, db: sqlite3.Connection, ticket: str) -> None:
        """Forget the body of a request all of whose jobs are settled."""
        is_open = "SELECT 1 FROM jobs WHERE ticket = ? AND state IN ('queued', 'running') LIMIT 1"
        if db.execute(is_open, (ticket,)).fetchone() is None:
            db.execute("DELETE FROM bodies WHERE ticket = ?", (ticket,))
            db.execute("UPDATE requests SET bytes = 0 WHERE ticket = ?", (ticket,))

    def _read(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._lock:
            return self._db.execute(statement, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, which survives a kill."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:  # a full disk may have ended it
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.OperationalError as error:  # the disk is full or torn, or another holds the lock for long
                self._failure = f"the queue {self.path} cannot be written: {error}"
                raise QueueUnusable(self._failure) from error
            self._failure = ""
