# SPDX-License-Identifier: Apache-2.0
import importlib
from pathlib import Path
from typing import Any

import pytest

WRITTEN: dict[str, dict[str, Any]] = {
    "openvla": dict(
        sentences=["push the red disc to the ring", "push it"],
        **dict(image_size=28, text_tokens=200, action_chunk=4, action_dim=4, hold=3),
    ),
    "pi05": dict(action_horizon=4, hold=3),
}


class Folders(dict[str, str]):
    """A tiny policy of each name in its public layout, written when it is asked for: one needs not the other's code."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __missing__(self, name: str) -> str:
        tiny = importlib.import_module(f"cosmos_predict2.rl.policies.{name}.tiny")
        tiny.write_tiny(self._root / name, **WRITTEN[name])
        self[name] = str(self._root / name)
        return self[name]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny policies in their public layouts, which no test changes: four actions of the toy world, each held thrice."""
    return Folders(tmp_path_factory.mktemp("policies"))
