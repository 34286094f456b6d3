# SPDX-License-Identifier: Apache-2.0
"""Modules that moved can be imported by their old names."""

import sys
from importlib import import_module

import pytest

import cosmos_predict2  # noqa: F401  (adds its own)
from imaginaire.renamed import RENAMED


@pytest.mark.parametrize("old", sorted(RENAMED))
def test_an_old_name_gives_the_very_same_module(old: str) -> None:
    assert import_module(old) is import_module(RENAMED[old])


def test_no_second_copy_is_loaded_below_a_package_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("imaginaire.callbacks", "imaginaire.callbacks.base"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    from imaginaire.callbacks.base import Callback
    from imaginaire.training.callbacks.base import Callback as same

    assert Callback is same
