# SPDX-License-Identifier: Apache-2.0
"""The queue in one file of SQLite, for a service on one machine: what was accepted survives every kill."""

import os
import shutil
import sqlite3
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cosmos_predict2.rl.rewards.service import queue
from cosmos_predict2.rl.rewards.service.queue import (
    Depth,
    Job,
    Limits,
    OtherBody,
    QueueFull,
    QueueUnusable,
    Status,
    now,
)
from imaginaire.errors import ConfigError

_SUSPECT = f"(deaths > 0 OR attempt >= {queue.OFTEN})"
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS requests (
    ticket TEXT PRIMARY KEY, digest TEXT NOT NULL, num_clips INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS bodies (ticket TEXT PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, ticket TEXT NOT NULL, reward TEXT NOT NULL, state TEXT NOT NULL,
    attempt INTEGER NOT NULL DEFAULT 0, worker TEXT, lease_until REAL, accepted REAL NOT NULL, settled REAL,
    result TEXT, error TEXT, deaths INTEGER NOT NULL DEFAULT 0, version TEXT NOT NULL DEFAULT '',
    UNIQUE (ticket, reward));
CREATE INDEX IF NOT EXISTS jobs_by_state ON jobs (reward, state, number);
CREATE INDEX IF NOT EXISTS suspects ON jobs (reward, number) WHERE state = 'queued' AND {_SUSPECT};
CREATE INDEX IF NOT EXISTS open_jobs ON jobs (state, worker) WHERE state IN ('queued', 'running');
CREATE INDEX IF NOT EXISTS kept_bodies ON requests (bytes) WHERE bytes > 0;
CREATE INDEX IF NOT EXISTS settled_jobs ON jobs (settled) WHERE settled IS NOT NULL;
"""
_SINCE_VERSION_1 = ("deaths INTEGER NOT NULL DEFAULT 0", "version TEXT NOT NULL DEFAULT ''")
_VERSION = 2
_HELD = "FROM jobs WHERE state IN ('queued', 'running') AND state = 'running' AND worker = ?"  # by open_jobs
_BUSY_S = 60.0
_PAGE = 1 << 15
_LEAST_FREE = 64 << 20
_CHECKPOINT = 64 << 20  # bytes of changes until they are copied to the main file: not after each body


class SQLiteQueue:
    """`Queue` in the file ``path``."""

    def __init__(self, path: str, limits: Limits) -> None:
        self.path = path
        self.limits = limits
        self._own = threading.local()
        self._all: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._file: tuple[int, int] | None = None  # device and number of the file, once it is open
        self._failure = ""  # of the last write
        self._lacked = 0  # bytes of the last body, if it did not fit on the disk
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with self._writing() as db:
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if version not in (0, 1, _VERSION):
                    raise ConfigError(f"The queue {path} was written by version {version}; this one reads {_VERSION}.")
                for column in _SINCE_VERSION_1 if version == 1 else ():
                    db.execute(f"ALTER TABLE jobs ADD COLUMN {column}")
                for statement in _SCHEMA.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {_VERSION}")
            self._file = _identity(path)
        except (sqlite3.DatabaseError, QueueUnusable) as error:
            raise ConfigError(
                f"The queue {path} cannot be opened: {error}. Move the file away, or name another."
            ) from error

    def put(self, ticket: str, rewards: Mapping[str, str], body: bytes, digest: str, num_clips: int) -> bool:
        with self._writing(lasting=len(body)) as db:
            found = db.execute("SELECT digest FROM requests WHERE ticket = ?", (ticket,)).fetchone()
            if found is not None and found[0] != digest:
                raise OtherBody("This request id was used before, with another body.")
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
                raise QueueFull(f"{jobs} jobs and {size >> 20} MiB wait.")
            db.execute("INSERT OR REPLACE INTO requests VALUES (?, ?, ?, ?)", (ticket, digest, num_clips, len(body)))
            db.execute("INSERT OR REPLACE INTO bodies VALUES (?, ?)", (ticket, body))
            rows = [(ticket, reward, now()) for reward in wanted]
            values = "(ticket, reward, state, accepted) VALUES (?, ?, 'queued', ?)"
            db.executemany(f"INSERT OR REPLACE INTO jobs {values}", rows)
        return True

    def lease(self, reward: str, worker: str, limit: int, seconds: float, suspect_first: bool = False) -> list[Job]:
        work = self._db().execute(  # a look that locks nothing
            "SELECT 1 FROM jobs"
            " WHERE reward = ? AND (state = 'queued' OR (state = 'running' AND lease_until < ?)) LIMIT 1",
            (reward, now()),
        )
        if work.fetchone() is None:
            return []
        with self._writing() as db:
            for row in db.execute(
                "SELECT number, ticket, attempt, deaths FROM jobs"
                " WHERE reward = ? AND state = 'running' AND lease_until < ?",
                (reward, now()),
            ).fetchall():
                self._retry(db, *row)

            def waiting(table: str, condition: str, most: int) -> list[tuple[int, str, int, bool]]:
                return db.execute(
                    f"SELECT number, ticket, attempt, {_SUSPECT} FROM {table}"
                    f" WHERE reward = ? AND state = 'queued' AND {condition} ORDER BY number LIMIT ?",
                    (reward, most),
                ).fetchall()

            held = db.execute(f"SELECT 1 {_HELD} LIMIT 1", (worker,)).fetchone()
            suspects = [] if held else waiting("jobs INDEXED BY suspects", _SUSPECT, 1)
            rows = suspects if suspect_first and suspects else waiting("jobs", f"NOT {_SUSPECT}", limit) or suspects
            jobs = []
            for number, ticket, attempt, is_suspect in rows:
                db.execute(
                    "UPDATE jobs SET state = 'running', worker = ?, lease_until = ?, attempt = ? WHERE number = ?",
                    (worker, now() + seconds, attempt + 1, number),
                )
                (body,) = db.execute("SELECT body FROM bodies WHERE ticket = ?", (ticket,)).fetchone()
                jobs.append(Job(ticket, reward, attempt + 1, body, bool(is_suspect)))
        return jobs

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

    def release(self, worker: str, reason: str, has_died: bool) -> int:
        with self._writing() as db:
            rows = db.execute(f"SELECT number, ticket, attempt, deaths {_HELD}", (worker,)).fetchall()
            for number, ticket, attempt, deaths in rows:
                self._retry(db, number, ticket, attempt, deaths + has_died, reason)
        return len(rows)

    def look(self, ticket: str, reward: str) -> Status | None:
        row = self._db().execute(
            "SELECT state, result, error, num_clips FROM jobs JOIN requests USING (ticket)"
            " WHERE ticket = ? AND reward = ?",
            (ticket, reward),
        ).fetchone()  # fmt: skip
        return None if row is None else Status(*row)

    def settled(self, waiting: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
        wanted = list({ticket for ticket, _ in waiting})
        found: set[tuple[str, str]] = set()
        for k in range(0, len(wanted), 500):
            part = wanted[k : k + 500]
            marks = ",".join("?" * len(part))
            found.update(
                self._db().execute(
                    f"SELECT ticket, reward FROM jobs WHERE ticket IN ({marks}) AND state IN ('queued', 'running')",
                    part,
                )
            )
        return [pair for pair in waiting if pair not in found]

    def depth(self) -> dict[str, Depth]:
        counts: dict[str, dict[str, int]] = {}
        oldest: dict[str, float] = {}
        for reward, state, number, accepted in self._db().execute(
            "SELECT reward, state, COUNT(*), MIN(accepted) FROM jobs GROUP BY reward, state"
        ):
            counts.setdefault(reward, {})[state] = number
            if state in ("queued", "running"):
                oldest[reward] = max(oldest.get(reward, 0.0), now() - accepted)
        return {reward: Depth(found, oldest.get(reward, 0.0)) for reward, found in counts.items()}

    def purge(self) -> int:
        ttl = self.limits.result_ttl_s
        with self._writing() as db:
            forgotten = db.execute(
                "UPDATE jobs SET state = 'expired', result = NULL, error = NULL"
                " WHERE settled < ? AND state IN ('done', 'failed')",
                (now() - ttl,),
            ).rowcount
            db.execute("DELETE FROM jobs WHERE settled < ? AND state = 'expired'", (now() - 2 * ttl,))
            db.execute("DELETE FROM requests WHERE bytes = 0 AND ticket NOT IN (SELECT ticket FROM jobs)")
        return int(forgotten)

    def recover(self) -> int:
        with self._writing() as db:
            rows = db.execute("SELECT number, ticket, attempt, deaths FROM jobs WHERE state = 'running'").fetchall()
            for row in rows:
                self._retry(db, *row)
        return len(rows)

    def fault(self) -> str:
        try:
            self._require_file()
            if self._failure:
                with self._writing() as db:  # does it still fail?
                    db.execute(f"PRAGMA user_version = {_VERSION}")
            free = shutil.disk_usage(Path(self.path).parent).free
        except (QueueUnusable, OSError) as error:
            return str(error)
        if free < max(_LEAST_FREE, self._lacked):  # a small write proves nothing: it finds room in the file
            return f"the disk of the queue {self.path} is full: {free >> 20} MiB are left"
        return ""

    def close(self) -> None:
        with self._lock:
            for connection in self._all:
                connection.close()
            self._all.clear()
        self._own = threading.local()

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
        self, db: sqlite3.Connection, number: int, ticket: str, attempt: int, deaths: int, reason: str = ""
    ) -> None:
        is_guilty = deaths >= self.limits.max_attempts
        if is_guilty or attempt >= queue.MOST_LEASES:
            text = queue.death_reason(deaths, reason) if is_guilty else queue.LOST_REASON
            db.execute(
                "UPDATE jobs SET state = 'failed', error = ?, settled = ?, worker = NULL WHERE number = ?",
                (text, now(), number),
            )
            self._drop_body(db, ticket)
            return
        db.execute("UPDATE jobs SET state = 'queued', worker = NULL, deaths = ? WHERE number = ?", (deaths, number))

    def _drop_body(self, db: sqlite3.Connection, ticket: str) -> None:
        is_open = db.execute(
            "SELECT 1 FROM jobs WHERE ticket = ? AND state IN ('queued', 'running') LIMIT 1", (ticket,)
        ).fetchone()
        if is_open is None:
            db.execute("DELETE FROM bodies WHERE ticket = ?", (ticket,))
            db.execute("UPDATE requests SET bytes = 0 WHERE ticket = ?", (ticket,))

    def _require_file(self) -> None:
        """Raise where the file that was opened is no longer there: each new connection would begin another queue."""
        if self._file is not None and _identity(self.path) != self._file:
            raise QueueUnusable(f"the queue {self.path} was deleted or replaced: start the service again")

    def _db(self) -> sqlite3.Connection:
        """This thread's connection."""
        self._require_file()
        connection: sqlite3.Connection | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            connection.execute(f"PRAGMA page_size = {_PAGE}")  # bodies are large; of a new file only
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT // _PAGE}")
            self._own.connection = connection
            with self._lock:
                self._all.append(connection)
        return connection

    @contextmanager
    def _writing(self, lasting: int | None = None) -> Iterator[sqlite3.Connection]:
        """A transaction, which survives a kill; that of a body of ``lasting`` bytes survives a power cut, too."""
        try:
            db = self._db()
            db.execute(f"PRAGMA synchronous = {'NORMAL' if lasting is None else 'FULL'}")
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:  # a full disk may have ended it
                    db.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:  # the disk is full or torn, or another holds the lock for long
            unusable = QueueUnusable(f"the queue {self.path} cannot be written: {error}")
            unusable.is_full = "full" in str(error)
            self._failure = str(unusable)
            if lasting is not None:
                self._lacked = lasting if unusable.is_full else 0
            raise unusable from error
        self._failure = ""
        if lasting is not None:
            self._lacked = 0


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
