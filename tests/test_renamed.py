# SPDX-License-Identifier: Apache-2.0
"""Modules that moved can be imported by their old names."""

from importlib.util import find_spec

import pytest

import cosmos_predict2  # noqa: F401  (adds its own)
from imaginaire.renamed import RENAMED


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_name_finds_its_module(old: str) -> None:
    assert find_spec(old) is not None and find_spec(RENAMED[old]) is not None


def test_an_old_name_gives_the_very_same_module() -> None:
    from cosmos_predict2.planning.memory import __name__ as name

    assert name == "cosmos_predict2.tools.plan.memory"
