# SPDX-License-Identifier: Apache-2.0
"""A temporary folder for the whole test run, removed at its end; the run fails when a test left something in it, and
names the test.

With several workers the folder is the controller's, and each worker has one of its own inside.
"""

import multiprocessing.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

# Of processes that a test kills, or that leave by os._exit: Python and torch have no moment to tidy up.
OF_ENDED_PROCESSES = ("pymp-*", "torch_*", "torchelastic_*")
AT_EXIT = ("*wandb-media", "*wandb-artifacts")  # W&B's, which go with the process that imported it
OF_COMPILERS = ("torchinductor_*",)  # a part of torch's cache does not read TORCHINDUCTOR_CACHE_DIR


class Leftovers:
    """The plugin, in the process that began the run and in each of its workers."""

    def __init__(self, worker: str = "") -> None:
        self._usual = tempfile.gettempdir()
        # What outlives a run: pytest's folders of the last three, and torch's cache of compiled code.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", self._usual)
        user = os.environ.get("USER") or str(os.getuid())
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(self._usual, f"torchinductor_{user}"))
        self._worker = worker
        self._folder = Path(tempfile.mkdtemp(prefix=f"worker-{worker}-" if worker else "tests-"))
        # At the end of the process, behind multiprocessing, which removes its own folder (priority -100) from this one.
        self.remove = multiprocessing.util.Finalize(None, shutil.rmtree, (str(self._folder), True), exitpriority=-200)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._folder)
        self._after: dict[str, str] = {}  # a name in the folder: the test that it was first seen behind
        self._of_workers: dict[str, str] = {}

    def found(self) -> dict[str, str]:
        """Files that tests left in the folder: path -> the test after which it was first seen."""
        names = [path.name for path in self._folder.iterdir() if not _is_others(path)]
        here = {f"{self._folder.name}/{name}": self._after.get(name, "outside a test") for name in sorted(names)}
        return {**here, **self._of_workers}

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        for path in self._folder.iterdir():
            self._after.setdefault(path.name, nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """The controller hears what a worker found."""
        self._of_workers.update(getattr(node, "workeroutput", {}).get("leftovers", {}))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._worker:
            session.config.workeroutput["leftovers"] = self.found()  # type: ignore[attr-defined]
        elif self.found() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """In the last lines, where the cause of a red run is looked for."""
        if left := self.found():
            rows = [f"{path}: {test}" for path, test in left.items()]
            text = "\n".join(["The temporary folder is not empty. Use tmp_path, and end what a test starts.", *rows])
            report = pytest.TestReport("leftovers", ("tests", None, "leftovers"), {}, "failed", text, "teardown")
            terminalreporter.stats.setdefault("error", []).append(report)
            terminalreporter.section("left in the temporary folder", red=True)
            terminalreporter.write_line(text)

    def pytest_unconfigure(self) -> None:
        tempfile.tempdir = self._usual
        os.environ["TMPDIR"] = self._usual


def _is_others(path: Path) -> bool:
    """True for files of W&B, Python or torch, which opens empty ones when a worker died, and may be interrupted."""
    patterns = (*OF_ENDED_PROCESSES, *AT_EXIT, *OF_COMPILERS, "worker-*")
    is_probe = path.match("tmp????????") and path.is_file() and path.stat().st_size == 0
    return is_probe or any(path.match(pattern) for pattern in patterns)
