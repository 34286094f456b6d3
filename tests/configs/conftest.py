# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory and the environment of somebody who follows the pages."""
    monkeypatch.chdir(Path(__file__).parent.parent.parent)
    for variable in ("IMAGINAIRE_OUTPUT_ROOT", "COSMOS_PREDICT2_ARGS"):
        monkeypatch.delenv(variable, raising=False)
