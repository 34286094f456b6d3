# SPDX-License-Identifier: Apache-2.0
"""Every program that prepares or checks data starts as a file, and one as a user starts it; that each file finds the
packages from any folder is seen in tests/test_imports.py."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.programs import finished, python

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = sorted(
    path.stem for path in (ROOT / "scripts").glob("*.py") if "sys.path.insert" in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_command_starts_as_a_file(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(ROOT / "scripts" / f"{program}.py")
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as left:
        runpy.run_path(path, run_name="__main__")
    assert not left.value.code and f"scripts.{program}" in capsys.readouterr().out


@pytest.mark.slow
def test_both_forms_of_a_command_start_in_processes_of_their_own(tmp_path: Path) -> None:
    program = "get_t5_embeddings"
    for command, folder in (([str(ROOT / f"scripts/{program}.py")], tmp_path), (["-m", f"scripts.{program}"], ROOT)):
        done = finished(python(), *command, "--help", cwd=folder, PYTHONPATH=None)
        assert done.returncode == 0 and f"scripts.{program}" in done.stdout, done.stderr
