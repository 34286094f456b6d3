# SPDX-License-Identifier: Apache-2.0
"""Memory and GPU figures of every rank; traces of the torch profiler and snapshots of GPU memory.

Traces and snapshots join a run when ``trainer.profiling`` enables them.
"""

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from imaginaire import distributed, storage
from imaginaire.training.callbacks.base import Callback, EveryN, SideChannel
from imaginaire.training.memory import host_memory_available

log = logging.getLogger(__name__)

_GB = 2**30
_TABLE_INTERVAL_S = 600.0
_MAX_SNAPSHOT_ENTRIES = 100_000


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

    def every_n_impl(self, trainer: Any, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int) -> None:
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


class Profiler(Callback):
    """Records one step in ``trainer.profiling.profile_freq`` and writes it for https://ui.perfetto.dev.

    Files: ``torch_trace/iteration_N/rankR_trace.json.gz``, on ``target_ranks`` or the first ``first_n_rank`` ranks.
    """

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None
        self._iteration = 0
        self._channel = SideChannel("profiler")

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        profiling = self.config.trainer.profiling
        if not is_profiled_rank(profiling):
            return
        periods = (self.config.trainer.max_iter - iteration) // profiling.profile_freq
        if periods < 1:
            return
        # Each recorded step is written before the next period begins, so what torch warns of is meant.
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(
            activities=activities,
            # three steps of warm-up and the recorded one: Profiling requires a profile_freq of at least 4
            schedule=torch.profiler.schedule(wait=profiling.profile_freq - 4, warmup=3, active=1, repeat=periods),
            on_trace_ready=self._write,
            record_shapes=profiling.record_shape,
            profile_memory=profiling.profile_memory,
            with_stack=profiling.with_stack,
            with_modules=profiling.with_modules,
        )
        with self._channel.attempt():
            profile.start()
            self._profile = profile

    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int = 0) -> None:
        if self._profile is not None:
            self._iteration = iteration
            with self._channel.attempt():
                self._profile.step()

    def on_train_end(self, model: Any, iteration: int = 0) -> None:
        if self._profile is not None:
            profile, self._profile = self._profile, None
            with self._channel.attempt():
                profile.stop()

    def _write(self, profile: Any) -> None:
        if self._profile is None:  # stopped in the middle of a recording: half a step is no trace
            return
        name = f"rank{distributed.rank()}_trace.json.gz"
        with self._channel.attempt(), tempfile.TemporaryDirectory() as folder:
            local = Path(folder, name)
            profile.export_chrome_trace(str(local))
            parts = ("torch_trace", f"iteration_{self._iteration}", name)
            path = storage.copy_into(self.trainer.run_dir, local, *parts)
            log.info("profile of iteration %d written to %s", self._iteration, path)


class MemorySnapshot(Callback):
    """Writes the GPU memory history every ``trainer.profiling.profile_freq`` steps and when memory runs out.

    Files: ``memory_snapshot/iteration_N/rankR_memory_snapshot.pickle`` (``iteration_N_exit`` when out of memory), for
    https://pytorch.org/memory_viz. The ranks are those that are profiled.
    """

    def __init__(self) -> None:
        self._is_recording = False
        self._iteration = 0
        self._channel = SideChannel("memory snapshot")

    def on_train_start(self, model: Any, iteration: int = 0) -> None:
        self._iteration = iteration
        if not torch.cuda.is_available():
            log.warning("memory snapshots need a GPU: trainer.profiling.enable_memory_snapshot has no effect here")
        elif is_profiled_rank(self.config.trainer.profiling):
            torch.cuda.memory._record_memory_history(max_entries=_MAX_SNAPSHOT_ENTRIES)
            torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)  # type: ignore[attr-defined]
            self._is_recording = True

    def on_training_step_end(self, model: Any, batch: Any, output: Any, loss: Tensor, iteration: int = 0) -> None:
        self._iteration = iteration
        if self._is_recording and iteration % self.config.trainer.profiling.profile_freq == 0:
            self._write(f"iteration_{iteration}")

    def on_train_end(self, model: Any, iteration: int = 0) -> None:
        if self._is_recording:
            self._is_recording = False
            torch.cuda.memory._record_memory_history(enabled=None)

    def _out_of_memory(self, device: int, requested: int, allocated: int, free: int) -> None:
        if self._is_recording:
            self._write(f"iteration_{self._iteration}_exit")

    def _write(self, folder_name: str) -> None:
        name = f"rank{distributed.rank()}_memory_snapshot.pickle"
        with self._channel.attempt(), tempfile.TemporaryDirectory() as folder:
            local = Path(folder, name)
            torch.cuda.memory._dump_snapshot(str(local))
            path = storage.copy_into(self.trainer.run_dir, local, "memory_snapshot", folder_name, name)
            log.info("memory snapshot written to %s", path)


def is_profiled_rank(profiling: Any) -> bool:
    """``target_ranks`` decides when given, else the first ``first_n_rank`` (-1: all)."""
    if profiling.target_ranks is not None:
        return distributed.rank() in profiling.target_ranks
    return bool(profiling.first_n_rank < 0 or distributed.rank() < profiling.first_n_rank)
