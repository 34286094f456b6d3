# SPDX-License-Identifier: Apache-2.0
"""Seconds spent in each phase of a step: device time on a GPU, wall time on a CPU; no synchronisation in a step."""

import time
from types import TracebackType

import torch

# Wall time whatever the device: the wait for the loader, what a model does to make batches, a callback's own work.
HOST_PHASES = frozenset({"data", "train_batches", "apart"})
_MAX_PENDING = 512


class Timers:
    """``with timers("forward"): ...`` adds to the seconds of that name; `read_and_reset` hands them out.

    On a GPU a phase lasts from when the device reaches its first line to when it has finished its last, by events on
    the current stream. Phases named in ``HOST_PHASES`` are always wall time. A phase must not contain itself; the wall
    time of one inside another counts for the inner one alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._phases: dict[str, _HostPhase | _DevicePhase] = {}
        self._running: list[_HostPhase] = []  # the innermost last; only that one counts

    def __call__(self, name: str) -> "_HostPhase | _DevicePhase":
        phase = self._phases.get(name)
        if phase is None:
            phase = _DevicePhase() if self._cuda and name not in HOST_PHASES else _HostPhase(self._running)
            self._phases[name] = phase
        return phase

    def read_and_reset(self) -> dict[str, float]:
        """Seconds of each name since the last call. On a GPU this waits for the phases still running there."""
        return {name: phase.take() for name, phase in self._phases.items()}


class _HostPhase:
    def __init__(self, running: "list[_HostPhase]") -> None:
        self._seconds = 0.0
        self._start = 0.0
        self._running = running

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        if self._running:
            self._running[-1]._seconds += self._start - self._running[-1]._start
        self._running.append(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        now = time.perf_counter()
        self._seconds += now - self._start
        self._running.pop()
        if self._running:
            self._running[-1]._start = now

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _DevicePhase:
    def __init__(self) -> None:
        self._seconds = 0.0
        self._pending: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        self._pending.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        self._pending[-1][0].record()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._pending[-1][1].record()
        if len(self._pending) > _MAX_PENDING:
            self._fold(_MAX_PENDING // 2)  # so old that waiting for them costs nothing

    def take(self) -> float:
        self._fold(len(self._pending))
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _fold(self, count: int) -> None:
        done, self._pending = self._pending[:count], self._pending[count:]
        for start, end in done:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1000
