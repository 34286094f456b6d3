# SPDX-License-Identifier: Apache-2.0
"""Commands as published guides print them, carried out in a folder that looks like a checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.programs import HANG_S, warm_python

ROOT = Path(__file__).resolve().parents[1]


def linked(folder: Path, *names: str) -> Path:
    """The folder, with the packages of this checkout in it, and what else is named."""
    for name in ("scripts", "cosmos_predict2", "imaginaire", *names):
        (folder / name).symlink_to(ROOT / name)
    return folder


def start(checkout: Path, text: str, **variables: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(warm_python()).parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
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
    """The output of a command, which must end with this exit code."""
    process = start(checkout, text, **variables)
    printed = process.communicate(timeout=HANG_S)[0]
    assert process.returncode == code, f"{text}\n{printed[-4000:]}"
    return printed


def write_published(folder: Path, source: str) -> Path:
    """The folder, with the configurations of wm_vla_rl or RLinf that published_rlinf.txt has the fields of."""
    for name, content in _published(source).items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content))
    return folder


def _published(source: str) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {}
    content: dict[str, Any] = {}
    for line in (ROOT / "tests/published_rlinf.txt").read_text().splitlines():
        if line.startswith("["):
            origin, _, name = line.strip("[]").partition(" ")
            content = files.setdefault(name, {}) if origin == source else {}
        elif not line.startswith("#"):
            field, _, value = line.partition(" ")
            *sections, key = field.split(".")
            place = content
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = json.loads(value)
    return files
