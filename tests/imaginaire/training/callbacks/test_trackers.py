# SPDX-License-Identifier: Apache-2.0
import json
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from imaginaire import storage
from imaginaire.training.callbacks import trackers
from imaginaire.training.callbacks.trackers import Metrics, console_line
from tests.imaginaire.training.callbacks.fakes import JOB
from tests.training import records


def new(folder: Path | str, iteration: int = 0) -> Metrics:
    metrics = Metrics(str(folder), JOB, is_writer=True)
    metrics.open(iteration)
    return metrics


def test_one_iteration_is_one_record_of_all_that_was_logged(tmp_path: Path) -> None:
    metrics = new(tmp_path / "made" / "here")
    metrics.log({"a": 1, "b": torch.tensor(2.5)}, 3)
    metrics.log({"c": torch.tensor([4], dtype=torch.bfloat16), "bad": math.nan}, 3)
    metrics.flush(2)
    assert records(tmp_path / "made" / "here") == [], "its own flush is to come"
    metrics.flush(3)
    metrics.flush(3)
    metrics.log({"a": 2.0}, 4)
    metrics.close()
    metrics.close()
    assert records(tmp_path / "made" / "here") == [
        {"iteration": 3, "a": 1, "b": 2.5, "c": 4.0, "bad": None},
        {"iteration": 4, "a": 2.0},
    ]


def test_resume_drops_later_records_and_a_torn_last_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [json.dumps({"iteration": i, "x": i}) for i in (2, 4, 6, 8)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"iteration": 1')
    with caplog.at_level(logging.INFO):
        metrics = new(tmp_path, iteration=4)
    metrics.log({"x": 60}, 6)
    metrics.close()
    assert [(r["iteration"], r["x"]) for r in records(tmp_path)] == [(2, 2), (4, 4), (6, 60)]
    assert "dropped 3 records after iteration 4" in caplog.text
    with caplog.at_level(logging.INFO):
        new(tmp_path, iteration=4).close()
    assert "dropped 1 record after iteration 4" in caplog.text
    new(tmp_path).close()
    assert records(tmp_path) == [], "a run from scratch starts a new file"


def test_a_record_after_half_a_line_begins_a_line_of_its_own(tmp_path: Path) -> None:
    metrics = new(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 1, "x"')  # what a disk had room for
    metrics.log({"x": 2.0}, 2)
    metrics.log({"x": 3.0}, 3)
    metrics.close()
    half, *lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert half.endswith('"x"') and [json.loads(line)["x"] for line in lines] == [2, 3]


def test_ranks_that_do_not_write_leave_nothing(tmp_path: Path) -> None:
    metrics = Metrics(str(tmp_path), JOB, is_writer=False)
    metrics.load_state_dict({"wandb_run_id": "abc", "values": {"x": 1.0}, "iteration": 1})
    metrics.open(0)
    metrics.log({"x": 1.0}, 1)
    metrics.flush(1)
    metrics.log_video("v", np.zeros((1, 3, 8, 8), dtype=np.uint8), 1, fps=4)
    metrics.close()
    assert list(tmp_path.iterdir()) == []


def test_trackers_get_the_same_values_with_second_names_and_images_and_the_file_each_value_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no tensorboard")
    metrics = new(tmp_path)
    metrics.also_call({"train/kl_loss": "GRPO/kl_loss", "train/other": "GRPO/other"})
    metrics.log({"train/kl_loss": 0.5, "train/loss": 1.0}, 1)
    metrics.log_image("samples", np.zeros((8, 8, 3), dtype=np.uint8), 1)
    metrics.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["GRPO/kl_loss", "train/kl_loss", "train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1.0)]
    assert events.Tags()["images"] == ["samples"]
    assert records(tmp_path) == [{"iteration": 1, "train/kl_loss": 0.5, "train/loss": 1.0}]


def test_console_line_shows_what_is_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {"train/loss": 0.12345, "train/grad_norm": 1.0, "optim/lr_0": 1e-4}
    values |= {"train/s_per_iter": 0.5123, "train/data_percent": 3.2, "device/cpu_mem_gb": 2.0}
    line = "loss 0.1235 grad_norm 1.000 lr 0.0001 0.512 s/iter, 9 min left data 3 %"
    assert console_line(values, 7, 120, 540.0) == f"iter 7/120 5 % {line} host mem 2.0 GB"
    assert "left" not in console_line(values, 120, 120, 0.0)
    assert console_line({**values, "device/peak_gpu_mem_gb": 12.14}, 7, None, 540.0) == f"iter 7 {line} mem 12.1 GB"
    metrics = new(tmp_path)
    with caplog.at_level(logging.INFO):
        metrics.log({"device/cpu_mem_gb": 3.0}, 1)
        metrics.flush(1)
        metrics.log({"train/loss": 1.0}, 2)
        metrics.flush(2)
    metrics.close()
    lines = [text for text in caplog.messages if text.startswith("iter")]
    assert lines == ["iter 2 loss 1.0000 host mem 3.0 GB"]


def test_without_the_packages_there_is_one_line_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    with caplog.at_level(logging.INFO):
        metrics = new(tmp_path)
    metrics.log({"x": 1.0}, 1)
    metrics.close()
    assert [text for text in caplog.messages if ".[track]" in text] == [
        "TensorBoard: not installed; for it: pip install -e '.[track]'",
        "W&B: wandb is not installed; for it: pip install -e '.[track]'",
    ]
    assert records(tmp_path) == [{"iteration": 1, "x": 1.0}]


@pytest.mark.slow
def test_a_run_folder_in_an_object_store_is_mirrored(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = storage.join(s3_bucket, "run")
    remote = storage.join(run_dir, "metrics.jsonl")

    def on_record() -> list[Any]:
        return [json.loads(line)["iteration"] for line in storage.read_text(remote).splitlines()]

    metrics = new(run_dir)
    metrics.log({"x": 1.0}, 1)
    metrics.flush(1)
    assert not storage.exists(remote)  # at most once a minute
    monkeypatch.setattr(trackers, "UPLOAD_INTERVAL_S", 0.0)
    metrics.log({"x": 1.0}, 2)
    metrics.flush(2)
    assert on_record() == [1, 2]
    metrics.log({"x": 1.0}, 3)
    metrics.close()
    assert on_record() == [1, 2, 3]
    assert len(storage.listdir(storage.join(run_dir, "tensorboard"))) == 1
    metrics = new(run_dir, iteration=2)
    metrics.log({"x": 9.0}, 3)
    metrics.close()
    assert on_record() == [1, 2, 3]
    assert not os.path.exists(metrics._folder)
