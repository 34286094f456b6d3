# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of preparation: a hub and a web server's file, the files of a folder, and starting a command."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.checkpoints.hub_server import Hub, serve
from tests.programs import call

Start = Callable[..., int]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub without repositories, which HF_ENDPOINT names."""
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
    with serve(Hub({})) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Start:
    """Runs a script with its own main; the exit code. ``caplog`` then holds the lines of this run alone."""
    caplog.set_level("INFO")

    def run(script: ModuleType, *arguments: object) -> int:
        caplog.clear()
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, arguments)])  # which some records have
        return call(script, *arguments)

    return run


def names(folder: Path) -> set[str]:
    """The files below a folder, without the hub client's own."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in files if ".cache" not in path.parts}
