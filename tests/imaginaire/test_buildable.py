# SPDX-License-Identifier: Apache-2.0
"""One name, every program: what is registered, shipped, at a path or in a lazy node is found; all else is named."""

from pathlib import Path

import pytest

from imaginaire import buildable
from imaginaire.buildable import recorded, resolve, shipped
from imaginaire.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buildable, "_TABLES", {})


@buildable.buildable("shape")
class Square: ...


def test_a_name_a_path_and_a_node_are_one_thing() -> None:
    shipped("shape", {"shipped": f"{__name__}:Square", "absent": "no.such.module:Thing"})
    buildable.buildable("shape", "mine")(Square)
    for value in ("shipped", "mine", f"{__name__}:Square", f"{__name__}.Square", {"_target_": Square}, Square):
        assert resolve(value, "shape") is Square
    assert recorded(f"{__name__}.Square", "shape") is Square
    assert recorded("os.system", "shape") is None


def test_a_module_of_the_working_folder_registers_before_and_after_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_shapes.py").write_text("Round = object\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [])
    assert resolve("my_shapes:Round", "shape") is object
    buildable.buildable("shape", "before")(Square)
    table = shipped("shape", {})
    buildable.buildable("shape", "after")(Square)
    buildable.buildable("shape", "after")(Square)  # its module is imported anew
    assert set(table) == {"before", "after"}


@pytest.mark.parametrize(
    ("value", "named"),
    [("sqare", "square.*--import MODULE"), ("nowhere:Mine", "nowhere"), ("math:none", "math"), (":x", ":x|'.x'")],
)
def test_what_is_nothing_is_named_with_the_cure(value: str, named: str) -> None:
    shipped("shape", {"square": f"{__name__}:Square"})
    with pytest.raises(ConfigError, match=named):
        resolve(value, "shape")


def test_a_name_stands_for_one_thing() -> None:
    shipped("shape", {"square": "elsewhere:Square"})
    with pytest.raises(ConfigError, match=r"Two of the kind shape are called 'square'.*give yours another"):
        buildable.buildable("shape", "square")(Square)
