# SPDX-License-Identifier: Apache-2.0
"""Recipes are named from the root; what a command in this process sets in the environment is undone."""

import pytest

from tests.compat.recipes import ROOT


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("COSMOS_PREDICT2_ARGS", "EMBODIED_PATH", "IMAGINAIRE_OUTPUT_ROOT", "REPO_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
