# SPDX-License-Identifier: Apache-2.0
"""Paths as guides print them, which are not always those of the files."""

from pathlib import Path

import pytest

from imaginaire.storage.hub import absent

RUN = "checkpoints/posttraining/video2world/2b_groot_gr1_480"
FILE = f"{RUN}/checkpoints/model/iter_000001000.pt"


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for iteration in (200, 1000):
        path = tmp_path / RUN / f"checkpoints/model/iter_{iteration:09d}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "checkpoints/posttraining/video2world/14b_groot_gr1_480").mkdir()


@pytest.mark.parametrize(
    "printed",
    [
        FILE.replace("iter_000001000", "iter_001000"),
        FILE.replace("2b_groot", "predict2_video2world_training_2b_groot"),
        FILE.replace("2b_groot", "predict2_video2world_training_2b_groot").replace("iter_00000", "iter_0"),
        FILE.replace("iter_000001000", "iter_1000"),
    ],
)
def test_the_file_that_a_printed_path_means_is_named(printed: str, tmp_path: Path) -> None:
    for root in ("", f"{tmp_path}/"):
        text = str(absent(root + printed))
        assert text.startswith(f"{root}{printed} does not exist: ") and text.endswith(f" There is {root}{FILE}.")


def test_where_none_is_meant_what_is_there_is_listed() -> None:
    text = str(absent(FILE.replace("1000", "3000")))
    assert "has no 'iter_000003000.pt'. Did you mean iter_000001000.pt, iter_000000200.pt?" in text
    text = str(absent(FILE.replace("2b_groot_gr1_480", "mine")))
    assert "has no 'mine'. Known: 14b_groot_gr1_480, 2b_groot_gr1_480." in text
    wrong = FILE.replace("2b_groot", "predict2_video2world_training_14b_groot")
    assert "There is" not in str(absent(wrong)), "that run has no checkpoints"


def test_an_empty_folder_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "models/tokenizer").mkdir(parents=True)
    for file in ("tokenizer.pth", "deep/tokenizer.pth"):
        text = str(absent(f"{tmp_path}/models/tokenizer/{file}"))
        assert text.endswith(f"does not exist: {tmp_path}/models/tokenizer is empty.")


def test_the_working_folder_is_not_listed() -> None:
    for path in ("nowhere", "nowhere/model.pt"):
        assert str(absent(path)).startswith(f"{path} does not exist.") and "Known" not in str(absent(path))
    assert str(absent("checkpoint")) == "checkpoint does not exist. Did you mean checkpoints?"
