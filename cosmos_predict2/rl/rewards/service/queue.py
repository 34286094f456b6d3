# SPDX-License-Identifier: Apache-2.0
"""The contract of the queue between the server, which takes requests, and the workers, which score them.

A request is one body and one job for each reward it asks for. A job is leased to a worker for a while and must be
renewed; a lease that ran out is given to another worker, and what its first worker still writes is refused. So a job
is lost with no process, and its result is written once.

Only a worker's own death, which its supervisor reports, speaks against its jobs. Each of them is a suspect then, which
is leased before the others and alone; one that was there at ``max_attempts`` deaths fails. A server or a machine that
is lost proves nothing.

A result has the version of the reward that gave it. A request that is asked again takes what is there of the present
version; what failed, was forgotten or has another version is scored anew.
"""

import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from imaginaire.errors import DataError

STATES = ("queued", "running", "done", "failed")
_TICKETS = uuid.UUID("6a0f4f1c-52f1-4f0e-9a43-9d0c6f7e2b11")


class QueueFull(Exception):
    """The queue takes no more jobs for now."""


class QueueUnusable(Exception):
    """The queue cannot be read or written."""


class OtherBody(DataError):
    def __init__(self) -> None:
        super().__init__("This request id was used before, with another body.")


@dataclass(frozen=True)
class Limits:
    """Bounds of a queue: how much it holds, and for how long."""

    max_jobs: int = 10_000  # waiting and running, of all rewards
    max_bytes: int = 20 << 30  # bodies of the same
    result_ttl_s: float = 3600.0
    max_attempts: int = 2  # a job whose worker died so often fails; at the first death it may have been in company


@dataclass(frozen=True)
class Job:
    """A leased job. ``attempt``, the number of its leases, and the worker's name are the right to finish it."""

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

    @property
    def is_open(self) -> bool:
        return self.state in ("queued", "running")


@dataclass(frozen=True)
class Depth:
    """Jobs of a reward by state, and how many seconds the oldest one has waited."""

    counts: Mapping[str, int]
    oldest_s: float

    @property
    def num_open(self) -> int:
        return self.counts.get("queued", 0) + self.counts.get("running", 0)


class Queue(Protocol):
    """Safe to use from several threads; several processes open the same one."""

    limits: Limits

    def put(self, ticket: str, rewards: Mapping[str, str], body: bytes, digest: str, num_clips: int) -> bool:
        """Accept a request of rewards in their present versions; False where nothing of it is to be scored anew."""

    def lease(self, reward: str, worker: str, limit: int, seconds: float) -> list[Job]:
        """The oldest suspect alone, or up to ``limit`` jobs, oldest first."""

    def renew(self, jobs: Sequence[Job], worker: str, seconds: float) -> None:
        """Keep these jobs, as far as the worker has them still."""

    def finish(self, job: Job, worker: str, result: str, version: str) -> bool:
        """Write the result of a reward in this version; False where the lease is another worker's by now."""

    def fail(self, job: Job, worker: str, reason: str) -> bool:
        """Write that the job failed for good; False as for finish."""

    def release(self, reward: str, worker: str, reason: str, has_died: bool) -> int:
        """Give back what a worker has leased, of which it may have died."""

    def look(self, ticket: str, reward: str) -> Status | None: ...

    def depth(self) -> dict[str, Depth]: ...

    def fault(self) -> str:
        """The reason that it cannot be written, as far as that is known; else empty."""

    def purge(self) -> int:
        """Forget what was settled longer ago than the time to live; how many jobs."""

    def recover(self) -> int:
        """At the start of a service that has this queue for itself: nothing runs, so what was leased waits again."""

    def close(self) -> None: ...


def ticket_of(request_id: str | None) -> str:
    """The ticket of a request: of a client's own id always the same one."""
    return str(uuid.uuid5(_TICKETS, request_id) if request_id else uuid.uuid4())


def worker_name(reward: str) -> str:
    """A name that no other worker has had."""
    return f"{reward}@{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


def death_reason(deaths: int, reason: str) -> str:
    return f"the worker died {deaths} times while it scored this request: {reason}"
