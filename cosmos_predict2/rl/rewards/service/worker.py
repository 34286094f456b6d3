# SPDX-License-Identifier: Apache-2.0
"""The process of one reward: leases jobs from the queue, scores them in portions, writes the results.

The server starts it as ``python -m cosmos_predict2.rl.rewards.service.worker``. Standard input brings one line of JSON
(`WorkerSettings`), later perhaps "drain"; its end is the server's end, after which a worker stops at once. Events go to
standard output, one line of JSON each; whatever libraries print goes to standard error.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cosmos_predict2.rl.rewards.local import build
from cosmos_predict2.rl.rewards.service.open_queue import open_queue
from cosmos_predict2.rl.rewards.service.queue import Job, Limits, Queue
from cosmos_predict2.rl.rewards.service.scoring import Decoded, Scorer, build_decoder
from cosmos_predict2.rl.rewards.service.settings import DecodeSettings
from imaginaire import log as logs
from imaginaire.errors import UserError

log = logging.getLogger(__name__)

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.01, 0.1  # between two looks at an empty queue
OUTAGE_WAIT_S = 1.0  # after one that failed
UNFIT = 3  # the exit code of a worker whose reward cannot be built, whatever is tried again


@dataclass(frozen=True)
class WorkerSettings:
    """The configuration of a worker."""

    name: str
    reward: str
    path: str
    queue: str
    version: str = ""  # of the reward, which its results have
    arguments: dict[str, Any] = field(default_factory=dict)
    model_path: str = ""
    dtype: str = ""
    device: str = ""
    max_batch: int = 8
    max_wait_s: float = 0.02
    lease_s: float = 30.0
    decode: dict[str, Any] = field(default_factory=dict)
    decoded: str = ""  # a folder in which the workers share what they decode
    decoding: str = ""  # the version of how latents are decoded
    limits: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


Report = Callable[[dict[str, Any]], None]


class Worker:
    """Scores the jobs of one reward until a signal stops it."""

    def __init__(self, settings: WorkerSettings, queue: Queue, scorer: Scorer, report: Report) -> None:
        self.settings = settings
        self.queue = queue
        self.scorer = scorer
        self.report = report
        self.draining = threading.Event()
        self._held: list[Job] = []
        self._suspect_first = False  # in turn: a worker that died of one begins with the others

    def run(self) -> None:
        """Until ``draining`` is set; what is leased by then is finished."""
        threading.Thread(target=self._keep_leases, daemon=True).start()
        wait = SHORTEST_WAIT_S
        while not self.draining.is_set():
            try:
                jobs = self._next_portion()
            except Exception:  # of the queue, which may answer again; lost leases end by themselves
                log.exception("the queue of %s does not answer, asking again", self.settings.reward)
                self._held = []
                self.draining.wait(OUTAGE_WAIT_S)
                continue
            if jobs:
                self._score(jobs)
                wait = SHORTEST_WAIT_S
            else:
                self.draining.wait(wait)
                wait = min(2 * wait, LONGEST_WAIT_S)

    def _next_portion(self) -> list[Job]:
        """Waiting jobs, at most a batch; where there are some, after a short wait for more."""
        jobs = self._lease(self.settings.max_batch)
        ends = time.monotonic() + self.settings.max_wait_s
        is_suspect = any(job.is_suspect for job in jobs)
        while jobs and not is_suspect and len(jobs) < self.settings.max_batch and time.monotonic() < ends:
            time.sleep(min(SHORTEST_WAIT_S, self.settings.max_wait_s))
            jobs += self._lease(self.settings.max_batch - len(jobs))
        self._suspect_first = not is_suspect
        return jobs

    def _lease(self, limit: int) -> list[Job]:
        settings = self.settings
        jobs = self.queue.lease(settings.reward, settings.name, limit, settings.lease_s, self._suspect_first)
        self._held = [*self._held, *jobs]
        return jobs

    def _score(self, jobs: Sequence[Job]) -> None:
        self.report({"event": "alive"})
        began = time.monotonic()
        results = self.scorer.score([job.body for job in jobs])
        num_clips, late = 0, 0
        decode_s = score_s = 0.0
        failures = 0
        for job, result in zip(jobs, results, strict=True):
            late += not self._write(job, result)
            if isinstance(result, Exception):
                failures += 1
            else:
                num_clips += len(result["valid"])
                score_s += float(result["duration"])
                decode_s += float(result["decoded_duration"]) if self.scorer.needs_pixels else 0.0
        self._held = []
        took = time.monotonic() - began
        self.report(
            dict(event="scored", jobs=len(jobs), clips=num_clips, failed=failures, late=late, total_s=took,
                 decode_s=decode_s, score_s=score_s)
        )  # fmt: skip

    def _write(self, job: Job, result: dict[str, Any] | Exception) -> bool:
        """True if the result is written; where the queue does not answer, the job is scored again."""
        try:
            if isinstance(result, Exception):
                reason = str(result) if isinstance(result, UserError) else f"{type(result).__name__}: {result}"
                return self.queue.fail(job, self.settings.name, reason)
            text = json.dumps(result, allow_nan=False)
            return self.queue.finish(job, self.settings.name, text, self.settings.version)
        except Exception:
            log.exception("a result of %s could not be written; it is scored again", self.settings.reward)
            return False

    def _keep_leases(self) -> None:
        while True:
            time.sleep(self.settings.lease_s / 3)
            held = self._held
            if held:
                try:
                    self.queue.renew(held, self.settings.name, self.settings.lease_s)
                except Exception:  # tried again; when it stays so, the leases end and others score the jobs
                    log.exception("the leases of %d jobs could not be renewed", len(held))


def build_worker(settings: WorkerSettings, report: Report) -> Worker:
    """Open the queue, build the reward."""
    queue = open_queue(settings.queue, Limits(**settings.limits))
    optional = dict(model_path=settings.model_path, dtype=settings.dtype, device=settings.device)
    function = build(settings.path, settings.arguments, **optional)
    decode = DecodeSettings(**settings.decode)
    scorer = Scorer(
        settings.reward,
        function,
        lambda: build_decoder(decode, settings.device),
        settings.max_batch,
        lambda: report({"event": "alive"}),
        Decoded(Path(settings.decoded), settings.decoding) if settings.decoded else None,
    )
    return Worker(settings, queue, scorer, report)


def main() -> int:
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # prints of libraries do not mix with the events
    lock = threading.Lock()

    def report(event: dict[str, Any]) -> None:
        with lock:
            events.write(json.dumps(event) + "\n")
            events.flush()

    logs.setup()
    settings = WorkerSettings(**json.loads(sys.stdin.readline()))
    draining = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "drain":
                draining.set()
        os._exit(1)  # the server is gone: another one gives the leased jobs out again

    threading.Thread(target=listen, daemon=True).start()
    try:
        worker = build_worker(settings, report)
    except UserError as error:
        report({"event": "unfit", "reason": str(error)})
        return UNFIT
    worker.draining = draining
    report({"event": "ready", "needs_pixels": worker.scorer.needs_pixels})
    worker.run()
    worker.queue.close()
    sys.stderr.flush()
    os._exit(0)  # the thread that listens may not be ended otherwise


if __name__ == "__main__":
    sys.exit(main())
