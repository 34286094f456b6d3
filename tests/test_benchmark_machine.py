# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run where the project says, and say so."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks import machine
from imaginaire import distributed

FOLDER = Path(machine.__file__).parent


@pytest.mark.parametrize(
    ("chosen", "dtype"), [(torch.device("cuda", 3), torch.bfloat16), (torch.device("cpu"), torch.float32)]
)
def test_the_device_is_the_projects_own(
    chosen: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(distributed, "device", lambda: chosen)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    assert machine.device_and_dtype() == (chosen, dtype)
    assert machine.seconds(lambda: None) >= 0 and len(waited) == (2 if chosen.type == "cuda" else 0)


def test_no_benchmark_chooses_one_itself() -> None:
    chooses = re.compile(r"""device\(f?["']cuda|device=["']cuda|\.cuda\(|\.to\(f?["']cuda""")
    found = [path.name for path in FOLDER.glob("*.py") if chooses.search(path.read_text())]
    assert found == []


def test_the_first_line_names_the_machine() -> None:
    assert machine.described(torch.device("cpu")).startswith(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
