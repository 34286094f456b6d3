# SPDX-License-Identifier: Apache-2.0
import gzip
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from imaginaire.callbacks.profile import is_profiled_rank
from imaginaire.errors import ConfigError
from tests.callbacks.fakes import Trainer, make_config


def test_profiler_joins_when_enabled_and_writes_one_trace_per_period(tmp_path: Path) -> None:
    config = make_config(None)
    config.trainer.profiling.enable_profiling = True
    config.trainer.profiling.profile_freq = 5
    trainer = Trainer(config, tmp_path)
    trainer.start()
    for _ in range(12):
        trainer.step(1.0)
    trainer.callbacks.on_train_end(trainer.model, 12)
    trainer.metrics.close()
    traces = sorted((tmp_path / "torch_trace").glob("*/*"))
    assert [str(p.relative_to(tmp_path / "torch_trace")) for p in traces] == [
        "iteration_10/rank0_trace.json.gz",
        "iteration_5/rank0_trace.json.gz",
    ]
    names = {event.get("name") for event in json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]}
    assert any("aten::" in str(name) for name in names)


def test_profile_freq_below_a_period_is_an_error(tmp_path: Path) -> None:
    config = make_config(None)
    config.trainer.profiling.enable_profiling = True
    with pytest.raises(ConfigError, match=r"profile_freq=1, but .* at least 4"):
        Trainer(config, tmp_path).start()


def test_null_keeps_the_profiler_out(tmp_path: Path) -> None:
    config = make_config({"profiler": None})
    config.trainer.profiling.enable_profiling = True
    assert "profiler" not in Trainer(config, tmp_path).callbacks


@pytest.mark.parametrize(
    ("target_ranks", "first_n_rank", "expected"),
    [(None, 8, True), (None, -1, True), (None, 0, False), ([1], -1, False), ([0, 1], 0, True)],
)
def test_ranks_that_are_profiled(target_ranks: list[int] | None, first_n_rank: int, expected: bool) -> None:
    assert is_profiled_rank(SimpleNamespace(target_ranks=target_ranks, first_n_rank=first_n_rank)) is expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only where there is no GPU")
def test_memory_snapshots_say_that_they_need_a_gpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(None)
    config.trainer.profiling.enable_memory_snapshot = True
    trainer = Trainer(config, tmp_path)
    with caplog.at_level(logging.INFO):
        trainer.start()
    trainer.step(1.0)
    trainer.callbacks.on_train_end(trainer.model, 1)
    trainer.metrics.close()
    assert "memory snapshots need a GPU" in caplog.text


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
        torch.ones(2**60, device="cuda")
    trainer.callbacks.on_train_end(trainer.model, 2)
    trainer.metrics.close()
    folder = tmp_path / "memory_snapshot"
    assert (folder / "iteration_2" / "rank0_memory_snapshot.pickle").stat().st_size > 0
    assert (folder / "iteration_2_exit" / "rank0_memory_snapshot.pickle").stat().st_size > 0
