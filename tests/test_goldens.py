# SPDX-License-Identifier: Apache-2.0
"""The golden kit: what is changed, added or missing in a folder is seen."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests import goldens
from tests.goldens import DEFAULT, Golden
from tests.programs import finished, warm_python

REPOSITORY = Path(__file__).parent.parent


def test_entries_are_files_keys_and_tensors(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "cases": [{"x": [1, 2, 3], "p": {"k": "v"}}]}))
    header = {"config": json.dumps({"sizes": [1, 2], "mode": "flat"}), "seed": "7", "note": "as it is", "format": "pt"}
    save_file({"q": torch.zeros(2, 3)}, tmp_path / "t.safetensors", metadata=header)
    (tmp_path / "README.md").write_text("documentation")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "clip.mp4").write_bytes(b"")
    assert Golden("area", tmp_path).entries() == {
        "a.json/version": 1,
        "a.json/cases/0/x": 3,
        "a.json/cases/0/p/k": 1,
        "deeper/clip.mp4": 1,
        "t.safetensors/q": 6,
        "t.safetensors/__metadata__/config/sizes": 2,
        "t.safetensors/__metadata__/config/mode": 1,
        "t.safetensors/__metadata__/seed": 1,
        "t.safetensors/__metadata__/note": 1,
    }


def test_reading_is_noted_only_when_a_value_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"cases": [{"x": [1, 2], "y": 3}, {"x": [4, 5], "y": 6}]}))
    golden = Golden("area", tmp_path)
    cases = golden.json("a.json")["cases"]
    assert len(cases) == 2 and [case["y"].entry for case in cases] == ["a.json/cases/0/y", "a.json/cases/1/y"]
    assert not golden.used and not golden.compared
    assert cases[0]["x"].use() == [1, 2]
    cases[1].compare({"x": [4, 5], "y": 6})
    assert golden.used == {"a.json/cases/0/x": 2}
    assert golden.compared == {"a.json/cases/1/x": 2, "a.json/cases/1/y": 1}


def test_a_wrong_number_or_shape_is_told_with_its_entry(tmp_path: Path) -> None:
    save_file({"q": torch.ones(2), "quarters": torch.tensor([0.0, 4.0])}, tmp_path / "t.safetensors")
    (tmp_path / "a.json").write_text(json.dumps({"x": [1.0, 2.0], "s": "text", "rows": [{"a": 1}]}))
    golden = Golden("area", tmp_path)
    golden.json("a.json")["x"].compare(np.array([1.0, 2.0 + 1e-12]), rtol=1e-9)
    quarters = golden.tensors("t.safetensors")["quarters"]
    quarters.compare(torch.tensor([0.1, 4.0]), of_largest=0.03)
    with pytest.raises(AssertionError, match=quarters.entry):
        quarters.compare(torch.tensor([0.1, 4.0]), of_largest=0.02)
    for value, actual in [
        (golden.tensors("t.safetensors")["q"], torch.tensor([1.0, 1.1])),
        (golden.tensors("t.safetensors")["q"], torch.ones(3)),
        (golden.json("a.json")["x"], [1.0, 2.0001]),
        (golden.json("a.json")["x"], [1.0]),
        (golden.json("a.json")["s"], "other"),
        (golden.json("a.json")["rows"], [{"a": 1, "b": 2}]),
    ]:
        with pytest.raises(AssertionError, match=value.entry):
            value.compare(actual, rtol=1e-6)


def _parity(folder: Path, *arguments: str) -> tuple[int, str]:
    words = ["-m", "pytest", "tests/parity", "-p", "no:cacheprovider", *arguments, "--goldens", folder]
    run = finished(warm_python(), *words, cwd=REPOSITORY)
    return run.returncode, run.stdout + run.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEFAULT / "training", tmp_path / "training"))


@pytest.mark.slow
def test_an_unread_file_fails_the_run(folder: Path) -> None:
    (folder / "surprise.bin").write_bytes(b"1")
    save_file({"weight": torch.zeros(2)}, folder / "more.safetensors")
    code, output = _parity(folder)
    assert code == 1 and "1 error in " in output.strip().splitlines()[-1]
    assert "neither compared nor used: surprise.bin" in output
    assert "neither compared nor used: more.safetensors/weight" in output


@pytest.mark.slow
def test_a_changed_number_fails(folder: Path) -> None:
    path = folder / "lr_schedules.json"
    content = json.loads(path.read_text())
    content["cases"][0]["multiplier"][2] += 1e-6
    path.write_text(json.dumps(content))
    code, output = _parity(folder)
    assert code == 1 and "lr_schedules.json/cases/0/multiplier" in output and "1 failed" in output


@pytest.mark.slow
def test_an_unknown_area_or_folder_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    code, output = _parity(tmp_path / "pictures")
    areas = "Areas: action, rl, serving, tokenizer, training, video2world, vla, wan"
    assert code == 4 and f"no parity test is of area 'pictures'. {areas}" in output
    code, output = _parity(tmp_path / "nowhere" / "training")
    assert code == 4 and "there is no such folder" in output


def test_the_written_list_is_held_to_reasons_and_to_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"pattern": "a.json/*", "reason": "of another part"},
        {"pattern": "gone.json/*", "reason": "was of another part"},
        {"pattern": "later.json/*", "reason": "of a later part", "optional": True},
        {"pattern": "b.json", "reason": " "},
    ]
    (tmp_path / "unread.json").write_text(json.dumps({"area": rows}))
    monkeypatch.setattr(goldens, "PARITY", tmp_path)
    listed, problems = goldens._listed("area", ["a.json/x", "b.json", "c.json/y"], is_default=True)
    assert listed == {"a.json/x", "b.json"}
    assert problems == [
        "unread.json: area: 'gone.json/*' matches nothing that is left unread: remove it",
        "unread.json: area: 'b.json' gives no reason",
    ]
    assert len(goldens._listed("area", ["a.json/x", "b.json"], is_default=False)[1]) == 1
