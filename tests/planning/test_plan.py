# SPDX-License-Identifier: Apache-2.0
"""The command: verdicts, advice that holds when it is followed, errors as in training."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import plan
from tests.planning.test_memory import AGIBOT

TINY = "experiment=predict2_video2world_training_tiny_groot_gr1_480"
GROOT = "experiment=predict2_video2world_training_2b_groot_gr1_480"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plan", *arguments])
    return plan.main()


def values(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    code = run(monkeypatch, "--json", "-", *arguments)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if found["fits"] else 1)
    return found


def test_a_tiny_run_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--gpus", "2", "--", TINY) == 0
    shown = capsys.readouterr().out
    assert "fits in 79" in shown and "32 clips: 16 in a micro-batch" in shown and "estimate" in shown.lower()


def test_advice_holds_when_it_is_followed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for where in (("--gpus", "2", "--gpu", "L40S"), ("--gpus", "8", "--gpu_memory", "20")):
        before = values(monkeypatch, capsys, *where, "--", GROOT)
        assert not before["fits"]
        lines = before["nearest_that_fits"]["overrides"]
        gpus = [shlex.split(line)[1] for line in lines if line.startswith("--gpus")]
        overrides = [line for line in lines if not line.startswith("--gpus")]
        after = values(monkeypatch, capsys, *where, *(["--gpus", gpus[-1]] if gpus else []), "--", GROOT, *overrides)
        assert after["fits"]
        assert after["memory_bytes"]["total"] == before["nearest_that_fits"]["bytes"]


def test_each_single_change_is_what_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--gpus", "4", "--gpu_memory", "24")
    before = values(monkeypatch, capsys, *where, "--", GROOT, "dataloader_train.batch_size=2")
    changes = [c for c in before["single_changes"] if not c["overrides"][0].startswith("--")]
    assert {c["overrides"][0].split("=")[0].rpartition(".")[2] for c in changes} >= {
        "mode", "context_parallel_size", "batch_size", "train_architecture",
    }  # fmt: skip
    for change in changes[::2]:
        overrides = dict(o.split("=", 1) for o in ("dataloader_train.batch_size=2", *change["overrides"]))
        after = values(monkeypatch, capsys, *where, "--", GROOT, *(f"{k}={v}" for k, v in overrides.items()))
        assert after["memory_bytes"]["total"] == change["bytes"] < before["memory_bytes"]["total"]


def test_room_is_used_for_speed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    policy = "model.config.pipe_config.net.sac_config.mode=block_wise"
    found = values(monkeypatch, capsys, "--gpus", "8", "--", GROOT, policy)
    faster = found["faster_that_fits"]
    assert faster["seconds"] < found["seconds_per_iteration"] and faster["bytes"] < found["gpu_memory_bytes"]


def test_degrees_that_cannot_work_are_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        ("--gpus", "6", "--", f"experiment={AGIBOT.format('14b')}"): "does not divide the 6 processes",
        ("--gpus", "0", "--", TINY): "at least one",
        ("--", TINY, "model_parallel.context_parallel_size=8"): "heads",
        ("--", TINY, "model.config.pipe_config.net.sac_config.mode=block"): "block_wise",
        ("--gpu", "H1000", "--", TINY): "H100",
        ("--", "experiment=none_such"): "none_such",
        ("--", ""): "",
    }
    for arguments, sentence in cases.items():
        assert run(monkeypatch, *arguments) == 2, arguments
        assert sentence in capsys.readouterr().err


def test_the_file_runs_by_its_path(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(plan.__file__)), "--json", str(tmp_path / "plan.json"), "--", TINY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "memory of a GPU" in done.stdout
    assert json.loads((tmp_path / "plan.json").read_text())["fits"]
