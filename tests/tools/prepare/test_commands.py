# SPDX-License-Identifier: Apache-2.0
"""Every program that prepares or checks data starts as a module, and as a file from any folder."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.programs import HANG_S, python

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = sorted(
    path.stem for path in (ROOT / "scripts").glob("*.py") if "sys.path.insert" in path.read_text(encoding="utf-8")
)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_both_forms_of_a_command_start(program: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for command, folder in (
        ([str(ROOT / "scripts" / f"{program}.py")], tmp_path),
        (["-m", f"scripts.{program}"], ROOT),
    ):
        done = subprocess.run(
            [python(), *command, "--help"], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S
        )
        assert done.returncode == 0 and f"scripts.{program}" in done.stdout, done.stderr
