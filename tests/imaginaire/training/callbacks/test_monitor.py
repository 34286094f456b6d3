# SPDX-License-Identifier: Apache-2.0
import gzip
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from imaginaire.config.schema import Profiling
from imaginaire.training.callbacks import monitor
from imaginaire.training.callbacks.monitor import DeviceMonitor, Profiler, is_profiled_rank
from tests.imaginaire.training.callbacks.fakes import Trainer, lazy, make_config, stepped
from tests.training import records


def test_the_monitor_records_figures_and_logs_them_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(monitor, "tree_rss_bytes", lambda: 4 * 2**30)
    with caplog.at_level(logging.INFO):
        stepped(tmp_path, {"device_monitor": lazy(DeviceMonitor, every_n=1)}, *[1.0] * 3)
    assert records(tmp_path)[0]["device/cpu_mem_gb"] == 4
    assert records(tmp_path)[0]["device/host_available_gb"] > 0
    (table,) = [r.getMessage() for r in caplog.records if "devices" in r.getMessage()]  # not at every hit
    assert table.splitlines()[2].split() == ["cpu_mem_gb", "4.00", "4.00", "4.00"]


def test_resident_memory_includes_children() -> None:
    alone = monitor.tree_rss_bytes()
    code = "x = bytearray(200 * 2**20); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert monitor.tree_rss_bytes() - alone > 190 * 2**20
        child.communicate(b"\n")


def test_summary_over_ranks_uses_those_that_have_the_figure() -> None:
    assert monitor.summarise([{"a": 1.0, "b": 5.0}, {"a": 3.0}]) == {"a": (2.0, 3.0, 1.0), "b": (5.0, 5.0, 5.0)}


def test_a_figure_that_a_board_does_not_have_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> int:
        raise Exception("Not Supported")  # as pynvml.NVMLError, which is no RuntimeError

    fakes = {"mem_get_info": (2**30, 3 * 2**30), "max_memory_allocated": 2**30, "max_memory_reserved": 2**30}
    fakes |= {"reset_peak_memory_stats": None, "temperature": 40, "power_draw": 300000, "clock_rate": 1500}
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "utilization", refused)
    found = monitor.gpu_figures(torch.device("cuda"))
    assert "util" not in found and (found["temp"], found["power"], found["nvml_used_gpu_mem_gb"]) == (40, 300, 2)


def profiled(folder: Path, steps: int, profile_freq: int, **fields: Any) -> Trainer:
    """A trainer that has made so many steps with the profiler."""
    profiling = Profiling(enable_profiling=True, profile_freq=profile_freq, with_stack=False, with_modules=False)
    return stepped(folder, None, *[1.0] * steps, profiling=profiling, **fields)


def test_profiler_joins_when_enabled_and_writes_one_trace_per_period(tmp_path: Path) -> None:
    trainer = profiled(tmp_path, steps=12, profile_freq=5)
    trainer.callbacks.on_train_end(trainer.model, 12)
    traces = sorted((tmp_path / "torch_trace").glob("*/*"))
    assert [str(p.relative_to(tmp_path / "torch_trace")) for p in traces] == [
        "iteration_10/rank0_trace.json.gz",
        "iteration_5/rank0_trace.json.gz",
    ]
    names = {event.get("name") for event in json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]}
    assert any("aten::" in str(name) for name in names)


def test_profiler_begins_no_period_too_many_and_is_silent(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    trainer = profiled(tmp_path, steps=9, profile_freq=4, max_iter=9)
    profile = cast(Profiler, trainer.callbacks["profiler"])._profile
    assert profile is not None and profile.current_action is torch.profiler.ProfilerAction.NONE
    trainer.callbacks.on_train_end(trainer.model, 9)
    assert sorted(p.name for p in (tmp_path / "torch_trace").iterdir()) == ["iteration_4", "iteration_8"]
    assert not [w for w in recwarn if "Profiler" in str(w.message)]


@pytest.mark.parametrize(
    ("target_ranks", "first_n_rank", "expected"),
    [(None, 8, True), (None, -1, True), (None, 0, False), ([1], -1, False), ([0, 1], 0, True)],
)
def test_ranks_that_are_profiled(target_ranks: list[int] | None, first_n_rank: int, expected: bool) -> None:
    assert is_profiled_rank(SimpleNamespace(target_ranks=target_ranks, first_n_rank=first_n_rank)) is expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_snapshots_are_written_on_a_gpu(tmp_path: Path) -> None:
    config = make_config(None)
    config.trainer.profiling.enable_memory_snapshot = True
    config.trainer.profiling.profile_freq = 2
    trainer = Trainer(config, tmp_path)
    trainer.start()
    for _ in range(2):
        torch.ones(1000, device="cuda")
        trainer.step(1.0)
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(2**44, device="cuda")  # more than 1 EB never reaches the allocator
    trainer.callbacks.on_train_end(trainer.model, 2)
    trainer.metrics.close()
    folder = tmp_path / "memory_snapshot"
    assert (folder / "iteration_2" / "rank0_memory_snapshot.pickle").stat().st_size > 0
    assert (folder / "iteration_2_exit" / "rank0_memory_snapshot.pickle").stat().st_size > 0
