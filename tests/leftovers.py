# SPDX-License-Identifier: Apache-2.0
"""A temporary folder for the whole test run, removed at its end; the run fails when a test left something in it.

With several workers the folder is the controller's, and the workers inherit it.
"""

import multiprocessing.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest

# Of processes that a test kills, or that leave by os._exit: Python and torch have no moment to tidy up.
OF_ENDED_PROCESSES = ("pymp-*", "torch_*", "torchelastic_*")


class Leftovers:
    """The plugin; it exists in the process that began the run alone."""

    def __init__(self) -> None:
        self._usual = tempfile.gettempdir()
        # What outlives a run: pytest's folders of the last three, and torch's cache of compiled code.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", self._usual)
        user = os.environ.get("USER") or str(os.getuid())
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(self._usual, f"torchinductor_{user}"))
        self._folder = Path(tempfile.mkdtemp(prefix="tests-"))
        # At the end of the process, behind multiprocessing, which removes its own folder (priority -100) from this one.
        self.remove = multiprocessing.util.Finalize(None, shutil.rmtree, (str(self._folder), True), exitpriority=-200)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._folder)

    def found(self) -> list[str]:
        """What lies in the folder and should not."""
        return sorted(
            path.name
            for path in self._folder.iterdir()
            if not any(path.match(pattern) for pattern in OF_ENDED_PROCESSES)
        )

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if names := self.found():
            if session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
            print(f"\nThe tests left {len(names)} in the temporary folder, use tmp_path: {', '.join(names[:20])}")

    def pytest_unconfigure(self) -> None:
        tempfile.tempdir = self._usual
        os.environ["TMPDIR"] = self._usual
