# SPDX-License-Identifier: Apache-2.0
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from imaginaire.training.callbacks import monitor
from imaginaire.training.callbacks.monitor import DeviceMonitor
from tests.imaginaire.training.callbacks.fakes import Trainer, lazy, make_config
from tests.imaginaire.training.callbacks.records import records


def test_the_monitor_records_figures_and_logs_them_as_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(make_config({"device_monitor": lazy(DeviceMonitor, every_n=1)}), tmp_path)
    monkeypatch.setattr(monitor, "tree_rss_bytes", lambda: 4 * 2**30)
    with caplog.at_level(logging.INFO):
        trainer.start()
        for _ in range(3):
            trainer.step(1.0)
    trainer.metrics.close()
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
