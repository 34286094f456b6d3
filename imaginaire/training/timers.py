# SPDX-License-Identifier: Apache-2.0
"""Seconds spent in each phase of a step: device time on a GPU, wall time on a CPU; no synchronisation in a step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Wall time whatever the device: the wait for the loader, what a model does to make batches, a callback's own work.
HOST_PHASES = frozenset({"data", "train_batches", "rollout", "reward", "reward_wait", "apart"})
_MAX_PENDING = 512


class Timers:
    """``with timers("forward"): ...`` adds to the seconds of that name; `read_and_reset` hands them out.

    On a GPU a phase lasts from when the device reaches its first line to when it has finished its last, by events on
    the current stream. Phases named in ``HOST_PHASES`` are always wall time. The wall time of a phase inside another
    counts for the inner one alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._pending: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        self._inside = 0.0  # wall time of the phases that lay inside the running one

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._seconds.setdefault(name, 0.0)
        if self._cuda and name not in HOST_PHASES:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            try:
                yield
            finally:
                end.record()
                pending = self._pending.setdefault(name, [])
                pending.append((start, end))
                if len(pending) > _MAX_PENDING:
                    self._fold(name, _MAX_PENDING // 2)  # so old that waiting for them costs nothing
            return
        begin, before, self._inside = time.perf_counter(), self._inside, 0.0
        try:
            yield
        finally:
            elapsed = time.perf_counter() - begin
            self._seconds[name] += elapsed - self._inside
            self._inside = before + elapsed

    def read_and_reset(self) -> dict[str, float]:
        """Seconds of each name since the last call. On a GPU this waits for the phases still running there."""
        for name, pending in self._pending.items():
            self._fold(name, len(pending))
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds

    def _fold(self, name: str, count: int) -> None:
        done, self._pending[name] = self._pending[name][:count], self._pending[name][count:]
        for start, end in done:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1000
