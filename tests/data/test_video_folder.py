# SPDX-License-Identifier: Apache-2.0
"""Folders of clips whose captions are encoded in training: no embeddings, captions as text or JSON."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from cosmos_predict2.data.dataset_video import Dataset
from cosmos_predict2.data.video_folder import CaptionFiles, read_caption
from imaginaire.errors import DataError
from tests.data.video_files import video_folder
from tests.findings import problems

SETTINGS: dict[str, Any] = dict(num_frames=5, video_size=(32, 32), text_encoder="none")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three clips; captions of the first two."""
    video_folder(tmp_path, dict.fromkeys("abc", 5))
    (tmp_path / "metas/c.txt").unlink()
    (tmp_path / "captions").mkdir()
    for stem in "ab":
        first, second = {"long": f"long {stem}", "short": " "}, {"long": "x", "short": f"short {stem}"}
        (tmp_path / f"captions/{stem}.json").write_text(json.dumps({"first": first, "second": second}))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["what a shows", "what b shows"]),
        (dict(caption_format="json"), ["long a", "long b"]),
        (dict(caption_format="json", prompt_type="short"), ["short a", "short b"]),
    ],
)
def test_items_have_captions_and_no_embeddings(
    options: dict[str, str], expected: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        dataset = Dataset(str(folder), 5, (32, 32), text_encoder="none", **options)  # type: ignore[arg-type]
    assert "1 of 3 clips have no caption" in caplog.text and "excluded: c" in caplog.text
    items = [dataset[i] for i in range(len(dataset))]
    assert [item["ai_caption"] for item in items] == expected
    assert all("t5_text_embeddings" not in item and item["video"].shape == (3, 5, 32, 32) for item in items)
    assert problems(Dataset, **SETTINGS, dataset_dir=str(folder), **options) == []


def test_what_is_absent_is_reported_before_training(folder: Path) -> None:
    def problem(form: str) -> str:
        (found,) = problems(Dataset, **SETTINGS, dataset_dir=str(folder), caption_format=form)
        return found

    for path in (folder / "captions").iterdir():
        path.unlink()
    assert "None of the 3 clips has a caption" in problem("json")
    (folder / "captions").rmdir()
    assert "has no folder captions" in problem("json") and "no caption_format 'yaml'" in problem("yaml")


@pytest.mark.parametrize(
    ("form", "content"), [("text", ""), ("text", " \n"), ("json", '{"model": {"long": " ", "short": ""}}')]
)
def test_an_empty_caption_is_an_error_with_the_file(form: str, content: str, folder: Path) -> None:
    path = folder / {"text": "metas/a.txt", "json": "captions/a.json"}[form]
    path.write_text(content)
    dataset = Dataset(str(folder), 5, (32, 32), text_encoder="none", caption_format=form)
    with pytest.raises(DataError, match=str(path)):
        dataset[dataset.source.stems.index("a")]
    assert dataset[dataset.source.stems.index("b")]["ai_caption"]


@pytest.mark.parametrize("content", ["{", "[]", '{"model": "text"}', '{"model": {"medium": "x"}}'])
def test_json_of_another_form_is_an_error_with_the_file(content: str, folder: Path) -> None:
    (folder / "captions/a.json").write_text(content)
    with pytest.raises(DataError, match=r"captions/a\.json"):
        CaptionFiles(folder, "json").read("a")


def test_a_caption_has_no_blanks_and_no_mark_around_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(" a robot \n")
    assert read_caption(path) == "a robot"
    path.write_bytes("\ufeffa robot\r\n".encode())  # as some editors save it
    assert read_caption(path) == "a robot"
