# SPDX-License-Identifier: Apache-2.0
import logging
import random
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from imaginaire.training.callbacks import monitor
from imaginaire.training.callbacks.monitor import DeviceMonitor, LeakWatch
from tests.imaginaire.training.callbacks.fakes import Trainer, lazy, make_config
from tests.imaginaire.training.callbacks.records import records

GB = 2**30


def first_alarm(readings: list[float]) -> int | None:
    watch = LeakWatch()
    return next((i for i, gb in enumerate(readings) if watch.add(10 * i, gb) is not None), None)


def noisy(values: list[float], scale: float) -> list[float]:
    source = random.Random(0)
    return [value + source.gauss(0, scale) for value in values]


@pytest.mark.parametrize(
    "readings",
    [
        noisy([4 + 0.02 * i for i in range(70)], 0.02),  # fast
        noisy([4 + 0.001 * i for i in range(3000)], 0.01),  # slow: 3 GB in 30000 iterations
        noisy([4.0] * 500 + [4 + 0.02 * i for i in range(200)], 0.02),  # begins late
        noisy([min(4.0, 0.5 * i) for i in range(100)] + [4 + 0.02 * i for i in range(200)], 0.02),  # after start-up
    ],
    ids=["fast", "slow", "late", "after_start_up"],
)
def test_a_planted_leak_is_found(readings: list[float]) -> None:
    assert first_alarm(readings) is not None


@pytest.mark.parametrize(
    "readings",
    [
        [4.0] * 3000,
        noisy([4.0] * 3000, 0.1),
        [4 * (1 - 0.9**i) for i in range(300)],  # start-up that saturates
        noisy([4 * (1 - 0.97**i) for i in range(600)], 0.02),
        [4 + 0.5 * (i % 40) / 40 for i in range(1000)],  # saw teeth: workers that restart
        [4.0] * 50 + [6.0] * 200,  # one step up, as when validation ran
        [4 - 0.01 * i for i in range(200)],
        [4 + 0.00001 * i for i in range(1000)],  # 10 MB in all
    ],
    ids=["flat", "noisy", "start_up", "slow_start_up", "saw", "step", "falling", "tiny"],
)
def test_no_alarm_without_a_leak(readings: list[float]) -> None:
    assert first_alarm(readings) is None


def test_monitor_warns_once_about_a_leak_and_logs_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(make_config({"device_monitor": lazy(DeviceMonitor, every_n=1)}), tmp_path)
    monkeypatch.setattr(monitor, "tree_rss_bytes", lambda: int((4 + 0.05 * trainer.iteration) * GB))
    with caplog.at_level(logging.INFO):
        trainer.start()
        for _ in range(70):
            trainer.step(1.0)
    trainer.metrics.close()
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "rank 0 keeps growing" in warnings[0] and "+50.000 GB per 1000 iterations" in warnings[0]
    assert records(tmp_path)[0]["device/cpu_mem_gb"] == pytest.approx(4.05)
    assert records(tmp_path)[0]["device/host_available_gb"] > 0
    (line,) = [r.getMessage() for r in caplog.records if "devices" in r.getMessage()]  # not at every hit
    assert re.fullmatch(r"iter 1 devices: cpu_mem 4\.05 GB, host available [\d.]+ GB(, .*)?", line)


def test_several_ranks_are_a_table() -> None:
    table = monitor._table(monitor.summarise([{"cpu_mem_gb": 1.0}, {"cpu_mem_gb": 3.0}]))
    assert [line.split() for line in table.splitlines()[1:]] == [
        ["avg", "max", "min"],
        ["cpu_mem_gb", "2.00", "3.00", "1.00"],
    ]


def test_resident_memory_includes_children() -> None:
    alone = monitor.tree_rss_bytes()
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]  # other tests may have left some
    assert alone == pytest.approx(sum(process.memory_info().rss for process in processes), rel=0.05)
    code = "x = bytearray(200 * 2**20); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert monitor.tree_rss_bytes() - alone > 190 * 2**20
        child.communicate(b"\n")


def test_summary_over_ranks_uses_those_that_have_the_figure() -> None:
    assert monitor.summarise([{"a": 1.0, "b": 5.0}, {"a": 3.0}]) == {"a": (2.0, 3.0, 1.0), "b": (5.0, 5.0, 5.0)}
