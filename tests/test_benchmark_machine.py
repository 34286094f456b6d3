# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run where the project says, and say so."""

import re
from pathlib import Path

import pytest

from benchmarks import machine, trainer_overhead

FOLDER = Path(machine.__file__).parent


def test_no_benchmark_chooses_one_itself() -> None:
    chooses = re.compile(r"""device\(f?["']cuda|device=["']cuda|\.cuda\(|\.to\(f?["']cuda""")
    found = [path.name for path in FOLDER.glob("*.py") if chooses.search(path.read_text())]
    assert found == []


def test_a_figure_that_noise_hides_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def saves(*tens: float, lost: int = 0) -> float | None:
        steps = [0.0] * 19 + [seconds / 10 for seconds in tens for _ in range(10)]
        monkeypatch.setattr(trainer_overhead, "trainer_loop", lambda *_: steps[: len(steps) - lost])
        return trainer_overhead.saving(len(tens) // 2, 0.1)

    assert saves(1.03, 1.0, 1.04, 1.0, 1.03, 1.0, 1.03, 1.0) == pytest.approx(1.03)
    assert "+3.0%" in capsys.readouterr().out
    assert saves(1.4, 1.0, 1.0, 1.3, 1.2, 1.0, 0.9, 1.0) is None
    assert saves(1.03, 1.0, 1.04, 1.0, lost=10) is None  # which divided by zero
    assert capsys.readouterr().out.count("not measured here") == 2
    times = iter([[1.0] * 10, [1.5] * 10, [1.0] * 10, [1.1] * 10])
    monkeypatch.setattr(trainer_overhead, "bare_loop", lambda steps: next(times))
    monkeypatch.setattr(trainer_overhead, "trainer_loop", lambda *_: next(times))
    trainer_overhead.overhead(10, 2)
    assert "not measured here" in capsys.readouterr().out
