# SPDX-License-Identifier: Apache-2.0
"""The check of a GPU: what it does without one, when a step fails, and when memory runs out."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import benchmarks.train_step as train_step
from imaginaire.errors import TrainingError
from tests.programs import finished, warm_python

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check.sh"

# In place of Python: says that there is a GPU, notes its arguments, and fails or hangs where it is told to.
STAND_IN = """\
#!/bin/bash
[ "$1" = -c ] && exit 0
echo "$*" >>"$CALLS"
case "$*" in
    *$FAILS*) echo "it went wrong"; exit 3 ;;
    *$HANGS*) exec sleep 60 ;;
esac
echo done
"""


def run(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return finished("bash", SCRIPT, GPU_CHECK_DIR=str(tmp_path), CALLS=str(tmp_path / "calls"), **variables)


@pytest.fixture
def stand_in(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return str(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    result = run(tmp_path, PYTHON=warm_python())
    assert result.returncode == 2
    assert "no GPU here" in result.stderr and "scripts.doctor" in result.stderr


def test_every_step_is_run_and_summed_up(tmp_path: Path, stand_in: str) -> None:
    result = run(tmp_path, PYTHON=stand_in, FAILS="nothing fails", HANGS="nothing hangs")
    assert result.returncode == 0, result.stdout
    calls = (tmp_path / "calls").read_text()
    for words in (
        "scripts.doctor --dist",
        "pytest -q -m gpu",
        "tiny_groot_gr1_480",
        "lora_training_tiny",
        "benchmarks.rl_step",
        "--resolution 720",
    ):
        assert words in calls
    assert result.stdout.count("\nok  ") == 9
    assert "FAILED" not in result.stdout


def test_a_failed_step_is_named_and_the_others_still_run(tmp_path: Path, stand_in: str) -> None:
    result = run(tmp_path, PYTHON=stand_in, FAILS="-m gpu", HANGS="nothing hangs")
    assert result.returncode == 1
    assert "FAILED   parity" in result.stdout and "exit code 3" in result.stdout and "it went wrong" in result.stdout
    assert result.stdout.count("\nok  ") == 7


# --- the training step


def arguments(**changes: Any) -> Any:
    plain = dict(model_size="2B", resolution="480", fps=16, steps=1, random_weights=True, overrides=[])
    plain |= dict(action=False, profile=False, batch_sizes=None)
    return SimpleNamespace(**{**plain, **changes})


def test_memory_that_runs_out_is_met_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def measure(what: str, overrides: list[str]) -> str:
        tried.append(overrides)
        if len(tried) < 3:
            raise TrainingError("Out of memory: tried to allocate 20 GiB\nTry, in this order: ...")
        return what

    monkeypatch.setattr(train_step, "measure", measure)
    found, added = train_step.first_that_fits(arguments())
    assert found == "without the weight average"  # type: ignore[comparison-overlap]
    assert [override.rpartition(".")[2] for override in added] == ["mode=block_wise", "enabled=False"]
    assert len(tried[1]) == len(tried[0]) + 1 and tried[2][: len(tried[1])] == tried[1]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla T4", None),
    ],
)
def test_the_gpu_is_found_in_the_table_of_plan(name: str, known: str | None) -> None:
    assert train_step.machine.known_gpu(name) == known


@pytest.mark.slow
def test_a_tiny_step_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", "unused")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    overrides = [
        *train_step.experiment(arguments(model_size="tiny")),
        *train_step.settings(arguments(model_size="tiny")),
    ]
    found = train_step.measure("tiny", overrides)
    assert found.seconds > 0 and found.allocated > 0 and found.loss > 0
    assert found.tokens == 16 * 4 * 3 * 3 and found.flops > 3 * 2 * found.tokens * 4 * (4 * 128**2)


@pytest.mark.slow
def test_the_largest_batch_with_actions_is_found_and_its_step_profiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", "unused")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    measure = train_step.measure

    def limited(what: str, overrides: list[str]) -> train_step.StepCosts:
        if what == "batch 2":
            train_step.StepClock.profiled.clear()  # as the attempt begins
            raise TrainingError("Out of memory: tried to allocate 20 GiB\nTry, in this order: ...")
        return measure(what, overrides)

    monkeypatch.setattr(train_step, "measure", limited)
    sizes = dict(model_size="tiny", action=True, profile=True, batch_sizes=[1, 2, 4])
    found, added = train_step.largest_batch(arguments(**sizes))
    assert added == ["dataloader_train.batch_size=1"] and found.what == "batch 1"
    assert found.tokens == 4 * 6 * 6 and len(train_step.StepClock.seconds) == 2
    train_step.report_kernels(found.kernels)
    lines = capsys.readouterr().out.splitlines()
    assert "  batch 2: Out of memory: tried to allocate 20 GiB" in lines and not any(
        "batch 4" in line for line in lines
    )
    assert any("matrix products" in line for line in lines) and sum("aten::" in line for line in lines) > 5
