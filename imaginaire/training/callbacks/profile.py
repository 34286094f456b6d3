# SPDX-License-Identifier: Apache-2.0
"""Traces of the torch profiler and snapshots of GPU memory; both join a run when ``trainer.profiling`` enables them."""

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from imaginaire import distributed, storage
from imaginaire.errors import ConfigError
from imaginaire.training.callbacks.base import Callback
from imaginaire.training.side_channel import SideChannel

log = logging.getLogger(__name__)

_WARM_UP_STEPS = 3
_MAX_SNAPSHOT_ENTRIES = 100_000


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
        waiting = profiling.profile_freq - _WARM_UP_STEPS - 1
        if waiting < 0:
            raise ConfigError(
                f"trainer.profiling.profile_freq={profiling.profile_freq}, but with enable_profiling it must be "
                f"at least {_WARM_UP_STEPS + 1}: {_WARM_UP_STEPS} steps of warm-up and the recorded one."
            )
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
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=waiting, warmup=_WARM_UP_STEPS, active=1, repeat=periods),
            on_trace_ready=self._write,
            record_shapes=profiling.record_shape,
            profile_memory=profiling.profile_memory,
            with_stack=profiling.with_stack,
            with_modules=profiling.with_modules,
        )
        profile, self._profile = self._profile, None
        with self._channel.attempt():
            profile.start()
            self._profile = profile

    def on_training_step_end(
        self, model: Any, batch: Any, output: dict[str, Any], loss: Tensor, iteration: int = 0
    ) -> None:
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

    def on_training_step_end(
        self, model: Any, batch: Any, output: dict[str, Any], loss: Tensor, iteration: int = 0
    ) -> None:
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
