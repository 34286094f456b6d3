# SPDX-License-Identifier: Apache-2.0
"""Commands as published guides print them, carried out in a folder that looks like a checkout."""

import os
import subprocess
import sys
from pathlib import Path

from tests.programs import python

ROOT = Path(__file__).resolve().parents[1]


def linked(folder: Path, *names: str) -> Path:
    """The folder, with the packages of this checkout in it, and what else is named."""
    for name in ("scripts", "cosmos_predict2", "imaginaire", *names):
        (folder / name).symlink_to(ROOT / name)
    return folder


def start(checkout: Path, text: str, **variables: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(python()).parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **variables,
    }
    for name in ("PYTHONPATH", "IMAGINAIRE_OUTPUT_ROOT"):
        if name not in variables:
            environment.pop(name, None)
    return subprocess.Popen(
        ["bash", "-eo", "pipefail", "-c", text],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def follow(checkout: Path, text: str, code: int = 0, **variables: str) -> str:
    """What the command printed; it must end with this exit code."""
    process = start(checkout, text, **variables)
    printed = process.communicate(timeout=600)[0]
    assert process.returncode == code, f"{text}\n{printed[-4000:]}"
    return printed
