# SPDX-License-Identifier: Apache-2.0
"""Starts the worker processes, watches them, and starts them again when they die.

The jobs of a worker that dies wait again at once. One that dies with jobs may have died of them, which is the queue's
to judge; it is started again, later with each such death in a row. Some deaths in a row without jobs speak against the
reward, which is ``broken`` then: new requests are rejected, those that wait stay, and after a pause one more start is
tried.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from cosmos_predict2.rl.rewards.service.queue import Queue, worker_name
from cosmos_predict2.rl.rewards.service.settings import RewardSettings, ServiceSettings, version_of
from cosmos_predict2.rl.rewards.service.worker import UNFIT, message

log = logging.getLogger(__name__)

STARTING, READY, WAITING, BROKEN, STOPPED = "starting", "ready", "waiting", "broken", "stopped"
ROOT = Path(__file__).resolve().parents[4]
Labels = tuple[tuple[str, str], ...]


class ServiceMetrics:
    """The numbers of one service, in the text format of Prometheus; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))

    def count(self, name: str, by: float = 1.0, **labels: str) -> None:
        with self._lock:
            self._counters[name][tuple(sorted(labels.items()))] += by

    def text(self, gauges: Mapping[str, Iterable[tuple[Mapping[str, str], float]]]) -> str:
        """Everything, with gauges that are measured now. Labels are names of rewards or our own: none needs quotes."""
        with self._lock:
            found = {name: ("counter", sorted(rows.items())) for name, rows in self._counters.items()}
        for name, measured in gauges.items():
            found[name] = "gauge", [(tuple(sorted(labels.items())), value) for labels, value in measured]
        lines: list[str] = []
        for name, (kind, rows) in found.items():
            lines.append(f"# TYPE {name} {kind}")
            for labels, value in rows:
                words = ",".join(f'{label}="{text}"' for label, text in labels)
                lines.append(f"{name}{{{words}}} {value:g}")
        return "\n".join(lines) + "\n"


@attrs.define(kw_only=True)
class Patience:
    """Limits of a supervisor for workers that die."""

    first_wait_s: float = 0.5  # before a new start; doubles with each death, up to the longest
    longest_wait_s: float = 30.0
    deaths: int = 5  # in a row, after which the reward is broken
    pause_s: float = 60.0  # of a broken reward
    start_s: float = 1800.0  # to load a model


class Slot:
    """One worker process after another, in a thread."""

    def __init__(self, of: "Supervisor", reward: RewardSettings, device: str) -> None:
        self.of = of
        self.reward = reward
        self.device = device
        self.state = STARTING
        self.reason = ""
        self.process: subprocess.Popen[str] | None = None
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"worker of {reward.reward_type}")
        self.version = version_of(reward, of.settings.decode)
        self._deaths = 0  # in a row
        self._deaths_with_jobs = 0  # the same
        self._died_with_jobs = False
        self._busy_until: float | None = None
        self._unfit = ""  # why its reward cannot be built

    def stop(self) -> None:
        """Let the running portion finish, then leave."""
        process = self.process
        if process is not None and self.state == STARTING:
            process.kill()  # it holds no job
        elif process is not None and process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                process.stdin.write("drain\n")
                process.stdin.flush()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def _run(self) -> None:
        patience = self.of.patience
        while not self.of.stopping.is_set():
            self._died_with_jobs = False
            try:
                reason, is_unfit = self._live()
            except Exception as error:  # a border: the supervisor outlives what happens to one worker
                log.exception("the worker of %s could not be watched", self.reward.reward_type)
                reason, is_unfit = f"{type(error).__name__}: {error}", False
            if self.of.stopping.is_set():
                break
            self._deaths += not self._died_with_jobs
            self._deaths_with_jobs += self._died_with_jobs
            self.reason = reason
            if is_unfit or self._deaths >= patience.deaths:
                self.state = BROKEN
                log.error("the reward %s is broken: %s", self.reward.reward_type, reason)
                self.of.stopping.wait(patience.pause_s)
                self._deaths = patience.deaths - 1  # one more try
            else:
                self.state = WAITING
                log.warning("the worker of %s died (%s); it is started again", self.reward.reward_type, reason)
                times = min(self._deaths + self._deaths_with_jobs, 20)
                self.of.stopping.wait(min(patience.longest_wait_s, patience.first_wait_s * 2 ** (times - 1)))
        self.state = STOPPED

    def _live(self) -> tuple[str, bool]:
        """Run one process to its end; why it ended, and whether another start is pointless."""
        self.state, self._busy_until, self._unfit = STARTING, None, ""
        self.version = version_of(self.reward, self.of.settings.decode)  # its files may have changed
        kind, name = self.reward.reward_type, worker_name(self.reward.reward_type)
        command = [self.reward.venv_python or sys.executable, "-m", message.__module__]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self.process = process
        if self.of.stopping.is_set():
            process.kill()
        self.of.metrics.count("reward_worker_starts_total", reward=kind)
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        reason = ""
        load_ends = time.monotonic() + self.of.patience.start_s
        try:
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                sent = message(self.of.settings, self.reward, name=name, version=self.version, device=self.device)
                process.stdin.write(sent + "\n")
                process.stdin.flush()
            while reader.is_alive():
                reader.join(timeout=0.2)
                if reader.is_alive() and (reason := reason or self._overdue(load_ends)):
                    process.kill()
        finally:
            process.kill()
            code = process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            reader.join(timeout=5)
            self.process = None
            ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            reason = self._unfit or reason or f"its process {ended}"
            is_drained = self.of.stopping.is_set()
            given_back = self.of.queue.release(kind, name, reason, has_died=not is_drained)
            if given_back:
                self._died_with_jobs = True
                log.warning("%d jobs of %s wait again: %s", given_back, kind, reason)
        return reason, bool(self._unfit) or code == UNFIT

    def _read(self, process: "subprocess.Popen[str]") -> None:
        """Take the events of a process, until its end."""
        assert process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in process.stdout:
                with contextlib.suppress(json.JSONDecodeError):
                    self._take(json.loads(line))

    def _overdue(self, load_ends: float) -> str:
        """The limit of time that the process has passed; empty while it has not."""
        if self._busy_until is not None and time.monotonic() > self._busy_until:
            return f"no clip decoded and no portion scored within {self.reward.timeout_s:g} s"
        if self.state == STARTING and time.monotonic() > load_ends:
            return f"not ready within {self.of.patience.start_s:g} s"
        return ""

    def _take(self, event: dict[str, Any]) -> None:
        name, metrics = self.reward.reward_type, self.of.metrics
        if event["event"] == "ready":
            self.state, self.reason = READY, ""
            log.info("the reward %s is ready%s", name, f" on {self.device}" if self.device else "")
        elif event["event"] == "alive":
            self._busy_until = time.monotonic() + self.reward.timeout_s
        elif event["event"] == "unfit":
            self._unfit = event["reason"]
        elif event["event"] == "scored":
            self._busy_until, self._deaths, self._deaths_with_jobs = None, 0, 0
            metrics.count("reward_clips_total", event["clips"], reward=name)
            metrics.count("reward_portions_total", reward=name)
            for outcome in ("done", "failed"):
                metrics.count("reward_jobs_total", event[outcome], reward=name, outcome=outcome)
            for part in ("total", "decode", "score"):
                metrics.count("reward_score_seconds_total", event[f"{part}_s"], reward=name, part=part)


class Supervisor:
    """All workers of a service."""

    def __init__(self, settings: ServiceSettings, queue: Queue, patience: Patience | None = None) -> None:
        self.settings = settings
        self.queue = queue
        self.metrics = ServiceMetrics()
        self.patience = patience or Patience()
        self.stopping = threading.Event()
        self.slots = [
            Slot(self, reward, device)
            for reward in settings.rewards
            for device in ([reward.device] if isinstance(reward.device, str) else reward.device)
        ]

    def start(self) -> None:
        for slot in self.slots:
            slot.thread.start()

    def stop(self) -> None:
        """Finish what runs, within the time of grace; what does not finish waits for the next start."""
        self.stopping.set()
        for slot in self.slots:
            slot.stop()
        ends = time.monotonic() + self.settings.grace_s
        for slot in self.slots:
            slot.thread.join(timeout=max(0.0, ends - time.monotonic()))
        for slot in self.slots:
            if slot.thread.is_alive():
                log.warning("a worker of %s did not finish in time and is ended", slot.reward.reward_type)
                slot.kill()
                slot.thread.join(timeout=10)

    def is_broken(self, reward: str) -> bool:
        return all(slot.state == BROKEN for slot in self._of(reward))

    def why_broken(self, reward: str) -> str:
        return next((slot.reason for slot in self._of(reward) if slot.reason), "")

    def is_ready(self, reward: str) -> bool:
        return any(slot.state == READY for slot in self._of(reward))

    def states(self) -> dict[str, list[str]]:
        names = [reward.reward_type for reward in self.settings.rewards]
        return {name: [slot.state for slot in self._of(name)] for name in names}

    def version(self, reward: str) -> str:
        """The version of the reward's present workers."""
        return self._of(reward)[0].version

    def _of(self, reward: str) -> list[Slot]:
        return [slot for slot in self.slots if slot.reward.reward_type == reward]
