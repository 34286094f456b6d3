# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run where the project says, and say so."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks import machine

FOLDER = Path(machine.__file__).parent


def test_no_benchmark_chooses_one_itself() -> None:
    chooses = re.compile(r"""device\(f?["']cuda|device=["']cuda|\.cuda\(|\.to\(f?["']cuda""")
    found = [path.name for path in FOLDER.glob("*.py") if chooses.search(path.read_text())]
    assert found == []


def test_figures_are_compared_with_those_of_the_same_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(machine, "RECORD", tmp_path / "recorded.json")
    monkeypatch.setattr(machine, "processor_name", lambda: "AuthenticAMD AMD EPYC")
    machine.compare("dit", {"small": 1.5}, cpu)
    assert "No figures are recorded" in capsys.readouterr().out
    machine.compare("dit", {"small": 1.5, "large": 2.0}, cpu, record=True)
    machine.compare("dit", {"small": 1.0}, cpu, record=True)  # a part of the cases: the others stay
    capsys.readouterr()
    machine.compare("dit", {"small": 1.05, "large": 1.2, "new": 3.0}, cpu)
    small, large, new = capsys.readouterr().out.splitlines()[1:]
    assert "recorded 1.00 (+5%)" in small and "DIFFERS" not in small
    assert "recorded 2.00 (-40%)" in large and "DIFFERS" in large
    assert "not recorded" in new
    monkeypatch.setattr(machine, "processor_name", lambda: "GenuineIntel Intel(R) Xeon(R)")
    machine.compare("dit", {"small": 1.0}, cpu)
    assert "No figures are recorded for GenuineIntel" in (found := capsys.readouterr().out) and "AMD EPYC" in found
