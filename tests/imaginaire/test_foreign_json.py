# SPDX-License-Identifier: Apache-2.0
"""JSON of others: what is read, and that each fault is a ValueError."""

import json
from pathlib import Path

import pytest

from imaginaire import foreign_json

FAULTS: dict[str, tuple[str | bytes, str]] = {
    "cut": ('{"a": [1, 2', "Expecting"),
    "empty": ("", "Expecting"),
    "deep": ("[" * 100_000 + "]" * 100_000, "64 deep"),
    "deep_object": ('{"a":' * 65 + "1" + "}" * 65, "64 deep"),
    "nan": ('{"a": NaN}', "NaN is no number"),
    "infinity": ("[-Infinity]", "-Infinity is no number"),
    "overflow": ("[1e999]", "1e999 is too large"),
    "digits": (f"[1{'0' * 400}]", "has 401 digits"),
    "more_digits": (f"[1{'0' * 10_000}]", "digits"),
    "twice": ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' stands twice"),
    "latin": ('{"a": "é"}'.encode("latin-1"), "utf-8"),
    "half_a_character": (r'{"a": "\ud800"}', "surrogates not allowed"),
    "its_other_half": (r'{"a": "\udFfF"}', "surrogates not allowed"),
    "trailing": ("{} {}", "Extra data"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_a_value_error(fault: str, tmp_path: Path) -> None:
    content, message = FAULTS[fault]
    with pytest.raises(ValueError, match=message):
        foreign_json.loads(content)
    path = tmp_path / "file.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message):
        foreign_json.load(path)


def test_what_is_in_order_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"a": [1, -2.5, 1e-300, None, True], "é": {"ü": "😀"}, "n": 2**62, "deep": [[[[]]]]}
    for text in (json.dumps(content), json.dumps(content, ensure_ascii=False)):
        assert foreign_json.loads(text) == foreign_json.loads(b"\xef\xbb\xbf" + text.encode()) == content
    assert foreign_json.loads('{"loss": NaN}', constants=True)["loss"] != 0
    path = tmp_path / "file.json"
    path.write_text("[1, 2, 3]")
    with pytest.raises(ValueError, match="an object was expected, not list"):
        foreign_json.load_object(path)
    monkeypatch.setattr(foreign_json, "MOST_BYTES", 8)
    with pytest.raises(ValueError, match="more than 8 bytes"):
        foreign_json.load(path)
