# SPDX-License-Identifier: Apache-2.0
"""Memory and GPU figures of every rank."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
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
    container) still has. On GPUs: peaks of allocated and reserved memory since the last time, used and free memory and,
    with nvidia-ml-py, temperature, power, utilisation and clock. ``log_memory_detail`` also logs them as a table, at
    first and then at most every ten minutes.
    """

    def __init__(self, every_n: int | None = 200, step_size: int = 1, log_memory_detail: bool = True) -> None:
        super().__init__(every_n=every_n, step_size=step_size)
        self.log_memory_detail = log_memory_detail
        self._next_table = 0.0
        self._channel = SideChannel("device monitor")

    def every_n_impl(
        self, trainer: Any, model: Any, batch: Any, output: dict[str, Any], loss: Tensor, iteration: int
    ) -> None:
        figures: dict[str, float] = {}
        with self._channel.attempt():
            figures = {"cpu_mem_gb": tree_rss_bytes() / _GB, "host_available_gb": host_memory_available() / _GB}
            figures |= gpu_figures(distributed.device())
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
            rows = [f"  {name:<26}{a:>10.2f}{b:>10.2f}{c:>10.2f}" for name, (a, b, c) in summary.items()]
            head = f"  {'':<26}{'avg':>10}{'max':>10}{'min':>10}"
            log.info("iter %d devices\n%s", iteration, "\n".join([head, *rows]))


def summarise(of_ranks: Sequence[dict[str, float]]) -> dict[str, tuple[float, float, float]]:
    """Name → (mean, max, min) over the ranks that have the figure."""
    names = dict.fromkeys(name for figures in of_ranks for name in figures)
    columns = {name: [figures[name] for figures in of_ranks if name in figures] for name in names}
    return {name: (sum(column) / len(column), max(column), min(column)) for name, column in columns.items()}


def tree_rss_bytes() -> int:
    """Resident memory of this process and everything below it (data workers). Shared pages count in each."""
    process = psutil.Process()
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return int(total)


def gpu_figures(device: torch.device) -> dict[str, float]:
    """Peaks since the last call, and current figures, the driver's where nvidia-ml-py is installed; none on a CPU."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    values = {
        "peak_gpu_mem_gb": torch.cuda.max_memory_allocated(device) / _GB,
        "peak_gpu_mem_reserved_gb": torch.cuda.max_memory_reserved(device) / _GB,
        "nvml_used_gpu_mem_gb": (total - free) / _GB,
        "nvml_free_gpu_mem_gb": free / _GB,
    }
    torch.cuda.reset_peak_memory_stats(device)
    readings: dict[str, Callable[[], float]] = {
        "temp": lambda: torch.cuda.temperature(device),
        "power": lambda: torch.cuda.power_draw(device) / 1000,
        "util": lambda: torch.cuda.utilization(device),
        "clock": lambda: torch.cuda.clock_rate(device),
    }
    for name, read in readings.items():
        try:
            values[name] = float(read())
        except Exception as error:  # NVMLError is a plain Exception: not every board, or part of one, has every figure
            log.debug("the driver gives no %s: %s", name, error)
    return values
