# SPDX-License-Identifier: Apache-2.0
"""The contract of the queue between the server, which takes requests, and the workers, which score them.

A request is one body and one job for each reward it asks for. A job is leased to a worker for a while and must be
renewed; a lease that ran out is given to another worker, and what its first worker still writes is refused. So a job
is lost with no process, and its result is written once.
"""

import os
import socket
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from imaginaire.errors import DataError

QUEUED, RUNNING, DONE, FAILED, EXPIRED = "queued", "running", "done", "failed", "expired"
STATES = (QUEUED, RUNNING, DONE, FAILED, EXPIRED)
_TICKETS = uuid.UUID("6a0f4f1c-52f1-4f0e-9a43-9d0c6f7e2b11")


class QueueFull(Exception):
    """The queue takes no more jobs for now."""


class OtherBody(DataError):
    """A request id that was used before, with another body."""


@dataclass(frozen=True)
class Limits:
    """What a queue holds, and for how long."""

    max_jobs: int = 10_000  # waiting and running, of all rewards
    max_bytes: int = 20 << 30  # bodies of the same
    result_ttl_s: float = 3600.0
    max_attempts: int = 2  # a job whose worker died so often fails


@dataclass(frozen=True)
class Job:
    """A leased job. ``attempt`` and the worker's name are the right to finish it."""

    ticket: str
    reward: str
    attempt: int
    body: bytes = field(repr=False)


@dataclass(frozen=True)
class Status:
    state: str
    result: str | None = None  # JSON, of a job that is done
    error: str | None = None
    num_clips: int = 0


@dataclass(frozen=True)
class Depth:
    """Jobs of a reward by state, and how many seconds the oldest one has waited."""

    counts: Mapping[str, int]
    oldest_s: float


class Queue(Protocol):
    """Safe to use from several threads; several processes open the same one."""

    limits: Limits

    def put(self, ticket: str, rewards: Sequence[str], body: bytes, digest: str, num_clips: int) -> bool:
        """Accept a request; False where the same one is there already, which then counts once."""

    def lease(self, reward: str, worker: str, limit: int, seconds: float) -> list[Job]:
        """Up to ``limit`` jobs, oldest first; one whose worker died before is leased alone."""

    def renew(self, jobs: Sequence[Job], worker: str, seconds: float) -> None:
        """Keep these jobs, as far as the worker has them still."""

    def finish(self, job: Job, worker: str, result: str) -> bool:
        """Write the result; False where the lease is another worker's by now."""

    def fail(self, job: Job, worker: str, reason: str) -> bool:
        """Write that the job failed for good; False as for finish."""

    def release(self, worker: str, reason: str, counts: bool) -> int:
        """Give back what a worker has leased. ``counts``: the worker died of it, perhaps: an attempt is used up."""

    def fail_waiting(self, reward: str, reason: str) -> int:
        """Fail all jobs of a reward that wait."""

    def look(self, ticket: str, reward: str) -> Status | None: ...

    def settled(self, waiting: Collection[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of (ticket, reward) that wait no longer."""

    def depth(self) -> dict[str, Depth]: ...

    def purge(self) -> int:
        """Forget results that are older than their time to live; jobs are ``expired`` for as long again."""

    def recover(self) -> int:
        """At the start of a service that has this queue for itself: nothing runs, so what was leased waits again."""

    def close(self) -> None: ...


def ticket_of(request_id: str | None) -> str:
    """The ticket of a request: of a client's own id always the same one."""
    return str(uuid.uuid5(_TICKETS, request_id) if request_id else uuid.uuid4())


def worker_name(reward: str) -> str:
    """A name that no other worker has had."""
    return f"{reward}@{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


def now() -> float:
    """Seconds that processes and restarts agree on."""
    return time.time()


def death_reason(attempts: int, reason: str) -> str:
    return f"the worker died {attempts} times while it scored this request: {reason}"
