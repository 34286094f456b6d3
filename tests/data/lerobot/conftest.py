# SPDX-License-Identifier: Apache-2.0
"""The same recordings in every version, some written by the lerobot package, some here."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.sources_lerobot import write_v2, write_v3

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[data]'")

MAKERS: dict[str, Callable[[Path], Path]] = {
    "v2.0": lambda folder: write_v2(folder, "v2.0"),
    "v2.1": lambda folder: write_v2(folder, modality=True),
    "v3.0": write_v3,
}
BY_LEROBOT = {"v2.1 by lerobot": FIXTURES / "lerobot_v2_1", "v3.0 by lerobot": FIXTURES / "lerobot_v3"}


@pytest.fixture(scope="session")
def data_sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Data sets that no test changes, by what they are."""
    made = {name: make(tmp_path_factory.mktemp("lerobot") / "set") for name, make in MAKERS.items()}
    return {**made, **BY_LEROBOT}
