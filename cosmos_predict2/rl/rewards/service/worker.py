# SPDX-License-Identifier: Apache-2.0
"""The process of one reward: leases jobs from the queue, scores them in portions, writes the results.

The server starts it as ``python -m cosmos_predict2.rl.rewards.service.worker``. Standard input brings one line of JSON
(`message`), later perhaps "drain"; its end is the server's end, after which a worker stops at once. Events go to
standard output, one line of JSON each; whatever libraries print goes to standard error.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from cosmos_predict2.rl.rewards.local import build
from cosmos_predict2.rl.rewards.service.queue import Job, Queue
from cosmos_predict2.rl.rewards.service.scoring import Scorer, build_decoder
from cosmos_predict2.rl.rewards.service.settings import DecodeSettings, RewardSettings, ServiceSettings, open_queue
from imaginaire import log as logs
from imaginaire.errors import UserError

log = logging.getLogger(__name__)

SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.01, 0.1  # between two looks at an empty queue
OUTAGE_WAIT_S = 1.0  # after one that failed
UNFIT = 3  # the exit code of a worker whose reward cannot be built, whatever is tried again

Report = Callable[[dict[str, Any]], None]


def message(settings: ServiceSettings, reward: RewardSettings, **worker: str) -> str:
    """The configuration of a worker, of its ``name``, ``device`` and the ``version`` of its reward."""
    return json.dumps(worker | {"settings": attrs.asdict(attrs.evolve(settings, rewards=[reward], token=""))})


class Worker:
    """Scores the jobs of one reward until ``draining`` is set."""

    def __init__(
        self, name: str, version: str, settings: ServiceSettings, queue: Queue, scorer: Scorer, report: Report
    ) -> None:
        self.name = name
        self.version = version  # of the reward, which its results have
        (self.reward,) = settings.rewards
        self.lease_s = settings.lease_s
        self.queue = queue
        self.scorer = scorer
        self.report = report
        self.draining = threading.Event()
        self._held: list[Job] = []

    def run(self) -> None:
        """Until ``draining`` is set; what is leased by then is finished."""
        threading.Thread(target=self._keep_leases, daemon=True).start()
        wait = SHORTEST_WAIT_S
        while not self.draining.is_set():
            try:
                jobs = self.queue.lease(self.reward.reward_type, self.name, self.reward.max_batch, self.lease_s)
                self._held = jobs
            except Exception:  # of the queue, which may answer again
                log.exception("the queue of %s does not answer, asking again", self.reward.reward_type)
                self.draining.wait(OUTAGE_WAIT_S)
                continue
            if jobs:
                self._score(jobs)
                wait = SHORTEST_WAIT_S
            else:
                self.draining.wait(wait)
                wait = min(2 * wait, LONGEST_WAIT_S)

    def _score(self, jobs: Sequence[Job]) -> None:
        self.report({"event": "alive"})
        began = time.monotonic()
        results = self.scorer.score([job.body for job in jobs])
        for job, result in zip(jobs, results, strict=True):
            self._write(job, result)
        self._held = []
        good = [one for one in results if not isinstance(one, Exception)]
        self.report(
            dict(
                event="scored",
                clips=sum(len(one["valid"]) for one in good),
                done=len(good),
                failed=len(jobs) - len(good),
                total_s=time.monotonic() - began,
                decode_s=sum(float(one["decoded_duration"]) for one in good) if self.scorer.needs_pixels else 0.0,
                score_s=sum(float(one["duration"]) for one in good),
            )
        )

    def _write(self, job: Job, result: dict[str, Any] | Exception) -> None:
        """Write a result; where the queue does not answer, the job is scored again."""
        try:
            if isinstance(result, Exception):
                reason = str(result) if isinstance(result, UserError) else f"{type(result).__name__}: {result}"
                self.queue.fail(job, self.name, reason)
            else:
                self.queue.finish(job, self.name, json.dumps(result, allow_nan=False), self.version)
        except Exception:
            log.exception("a result of %s could not be written; it is scored again", self.reward.reward_type)

    def _keep_leases(self) -> None:
        while True:
            time.sleep(self.lease_s / 3)
            if held := self._held:
                try:
                    self.queue.renew(held, self.name, self.lease_s)
                except Exception:  # the next time may succeed; else the lease ends
                    log.exception("leases of %s could not be renewed", self.reward.reward_type)


def build_worker(order: dict[str, Any], report: Report) -> Worker:
    """The worker of a `message`; UserError where its reward cannot be built."""
    given = order["settings"]
    (reward,) = given["rewards"] = [RewardSettings(**given["rewards"][0])]
    given["decode"] = decode = DecodeSettings(**given["decode"])
    settings = ServiceSettings(**given)
    device = order["device"]
    optional = dict(model_path=reward.model_path, dtype=reward.dtype, device=device)
    function = build(reward.make, reward.arguments, **optional)
    scorer = Scorer(
        reward.reward_type,
        function,
        lambda: build_decoder(decode, device),
        reward.max_batch,
        lambda: report({"event": "alive"}),
    )
    queue = open_queue(settings.queue, settings.limits())
    return Worker(order["name"], order["version"], settings, queue, scorer, report)


def main() -> int:
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # prints of libraries do not mix with the events
    lock = threading.Lock()

    def report(event: dict[str, Any]) -> None:
        with lock:
            events.write(json.dumps(event) + "\n")
            events.flush()

    logs.setup()
    order = json.loads(sys.stdin.readline())
    draining = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "drain":
                draining.set()
        os._exit(1)  # the server is gone: another one gives the leased jobs out again

    threading.Thread(target=listen, daemon=True).start()
    try:
        worker = build_worker(order, report)
    except UserError as error:
        report({"event": "unfit", "reason": str(error)})
        return UNFIT
    worker.draining = draining
    report({"event": "ready"})
    worker.run()
    worker.queue.close()
    sys.stderr.flush()
    os._exit(0)  # the thread that listens may not be ended otherwise


if __name__ == "__main__":
    sys.exit(main())
