# SPDX-License-Identifier: Apache-2.0
"""Memory and GPU figures of every rank, and a warning when host memory keeps growing."""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imaginaire import distributed
from imaginaire.training.callbacks.base import EveryN
from imaginaire.training.memory import host_memory_available
from imaginaire.training.side_channel import SideChannel

log = logging.getLogger(__name__)

_GB = 2**30
_TABLE_INTERVAL_S = 600.0


class DeviceMonitor(EveryN):
    """Gathers figures from all ranks every ``every_n`` steps: ``device/<name>`` is the mean, beside ``_max``, ``_min``.

    ``cpu_mem_gb`` is the resident memory of a rank with its workers, ``host_available_gb`` what the machine (or the
    container) still has. On GPUs: peaks of allocated and reserved memory since the last time and, with nvidia-ml-py,
    used and free memory, temperature, power, utilisation and clock. ``log_memory_detail`` also logs them, at first and
    then at most every ten minutes: a table, or one line for a single rank.
    """

    def __init__(self, every_n: int | None = 200, step_size: int = 1, log_memory_detail: bool = True) -> None:
        super().__init__(every_n=every_n, step_size=step_size)
        self.log_memory_detail = log_memory_detail
        self._gpu: Gpu | None = None
        self._watches: dict[int, LeakWatch] = {}
        self._has_warned = False
        self._next_table = 0.0
        self._channel = SideChannel("device monitor")

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        device = distributed.device()
        self._gpu = Gpu(device) if device.type == "cuda" else None

    def every_n_impl(
        self, trainer: Any, model: Any, batch: Any, output: dict[str, Any], loss: Tensor, iteration: int
    ) -> None:
        figures: dict[str, float] = {}
        with self._channel.attempt():
            figures = {"cpu_mem_gb": tree_rss_bytes() / _GB, "host_available_gb": host_memory_available() / _GB}
            if self._gpu is not None:
                figures |= self._gpu.figures()
        of_ranks = distributed.all_gather_object(figures)
        if not distributed.is_rank0():
            return
        summary = summarise(of_ranks)
        values = {f"device/{name}": mean for name, (mean, _, _) in summary.items()}
        if len(of_ranks) > 1:
            values |= {f"device/{name}_max": highest for name, (_, highest, _) in summary.items()}
            values |= {f"device/{name}_min": lowest for name, (_, _, lowest) in summary.items()}
        trainer.metrics.log(values, iteration)
        if self.log_memory_detail and time.monotonic() >= self._next_table:
            self._next_table = time.monotonic() + _TABLE_INTERVAL_S
            log.info("iter %d devices%s", iteration, _line_of(of_ranks[0]) if len(of_ranks) == 1 else _table(summary))
        self._watch_for_leaks(of_ranks, iteration)

    def _watch_for_leaks(self, of_ranks: Sequence[dict[str, float]], iteration: int) -> None:
        for rank, figures in enumerate(of_ranks):
            if "cpu_mem_gb" not in figures:
                continue
            growth = self._watches.setdefault(rank, LeakWatch()).add(iteration, figures["cpu_mem_gb"])
            if growth is not None and not self._has_warned:
                self._has_warned = True
                left = figures["host_available_gb"] / growth / len(of_ranks)
                log.warning(
                    "host memory of rank %d keeps growing: %.2f GB now, %+.3f GB per 1000 iterations. "
                    "%.1f GB are available on that machine: about %d iterations if every rank grows like this. "
                    "Look for lists that grow in the data set or in callbacks, and for losses stored with their graph.",
                    rank,
                    figures["cpu_mem_gb"],
                    growth * 1000,
                    figures["host_available_gb"],
                    int(left),
                )


class LeakWatch:
    """Decides from a history of resident memory whether it grows steadily.

    A least-squares line is laid through the last 60 to 120 readings, and through as many spread over the whole run (for
    slow leaks). Growth is sustained when the line rises by more than 5 % of its start and 0.1 GB, explains 80 % of the
    variance, and each half alone rises at 70 % of the overall slope or more, which start-up and filling caches do not.
    """

    min_readings = 60
    min_growth_gb = 0.1
    min_growth = 0.05
    min_explained = 0.8

    def __init__(self) -> None:
        self._recent: list[tuple[float, float]] = []
        self._whole: list[tuple[float, float]] = []
        self._stride = 1
        self._count = 0

    def add(self, iteration: int, gb: float) -> float | None:
        """GB per iteration when the growth so far is sustained, else None."""
        self._recent = [*self._recent[-119:], (iteration, gb)]
        if self._count % self._stride == 0:
            self._whole.append((iteration, gb))
            if len(self._whole) >= 120:
                self._whole = self._whole[::2]
                self._stride *= 2
        self._count += 1
        for history in (self._recent, self._whole):
            if (slope := self._sustained(history)) is not None:
                return slope
        return None

    def _sustained(self, history: list[tuple[float, float]]) -> float | None:
        if len(history) < self.min_readings:
            return None
        iterations, gb = np.array(history, dtype=np.float64).T
        if iterations[0] == iterations[-1]:
            return None
        slope, start, explained = _line(iterations, gb)
        growth = slope * (iterations[-1] - iterations[0])
        if growth < max(self.min_growth_gb, self.min_growth * start) or explained < self.min_explained:
            return None
        half = len(history) // 2
        halves = (_line(iterations[:half], gb[:half])[0], _line(iterations[half:], gb[half:])[0])
        return slope if min(halves) >= 0.7 * slope else None


def _line(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """Least squares: (slope, value at the first x, explained share of the variance)."""
    x_centred, y_centred = x - x.mean(), y - y.mean()
    slope = float(x_centred @ y_centred / (x_centred @ x_centred))
    residual = y_centred - slope * x_centred
    variance = float(y_centred @ y_centred)
    explained = 1 - float(residual @ residual) / variance if variance > 0 else 0.0
    return slope, float(y.mean() - slope * (x.mean() - x[0])), explained


def _line_of(figures: dict[str, float]) -> str:
    """``: cpu_mem 0.85 GB, host available 22.6 GB``."""
    parts = (
        f"{name.removesuffix('_gb').replace('host_available', 'host available')} {value:.{2 if value < 10 else 1}f}"
        f"{' GB' if name.endswith('_gb') else ''}"
        for name, value in figures.items()
    )
    return ": " + ", ".join(parts)


def _table(summary: dict[str, tuple[float, float, float]]) -> str:
    rows = [f"  {name:<26}{a:>10.2f}{b:>10.2f}{c:>10.2f}" for name, (a, b, c) in summary.items()]
    return "\n".join([f"\n  {'':<26}{'avg':>10}{'max':>10}{'min':>10}", *rows])


def summarise(of_ranks: Sequence[dict[str, float]]) -> dict[str, tuple[float, float, float]]:
    """Name → (mean, max, min) over the ranks that have the figure."""
    names = dict.fromkeys(name for figures in of_ranks for name in figures)
    columns = {name: [figures[name] for figures in of_ranks if name in figures] for name in names}
    return {name: (sum(column) / len(column), max(column), min(column)) for name, column in columns.items()}


def tree_rss_bytes() -> int:
    """Resident memory of this process and everything below it (data workers). Shared pages count in each."""
    if Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return sum(_rss(pid) for pid in _tree(os.getpid()))
    import psutil  # other systems: looks at every process of the machine

    process = psutil.Process()
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return int(total)


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):  # a child is listed with the thread that made it
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield from _tree(int(child))
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0


class Gpu:
    """This rank's GPU as PyTorch and, where nvidia-ml-py is installed, the driver see it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._nvml: Any = None
        try:
            import pynvml  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            log.info("device monitor: nvidia-ml-py is not installed, so no temperature, power or utilisation")
            return
        try:
            pynvml.nvmlInit()
            uuid = torch.cuda.get_device_properties(device).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._nvml = pynvml
        except pynvml.NVMLError as error:
            log.info("device monitor: the driver's figures are not available (%s)", error)

    def figures(self) -> dict[str, float]:
        """Peaks since the last call, and the current figures of the driver."""
        values = {
            "peak_gpu_mem_gb": torch.cuda.max_memory_allocated(self._device) / _GB,
            "peak_gpu_mem_reserved_gb": torch.cuda.max_memory_reserved(self._device) / _GB,
        }
        torch.cuda.reset_peak_memory_stats(self._device)
        if self._nvml is None:
            return values
        nvml, handle = self._nvml, self._handle
        readings = {
            "nvml_used_gpu_mem_gb": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / _GB,
            "nvml_free_gpu_mem_gb": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).free / _GB,
            "temp": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "util": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "clock": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        }
        for name, read in readings.items():
            try:
                values[name] = float(read())
            except nvml.NVMLError:  # not every board answers every question
                continue
        return values
