# SPDX-License-Identifier: Apache-2.0
"""A folder of pictures with prompts becomes a batch that the inference script accepts."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from cosmos_predict2.data.video import media
from cosmos_predict2.pipelines.requests import Request, read_batch
from scripts import prepare_batch_input_json as script
from tests.programs import python

ROOT = Path(__file__).resolve().parents[3]


def _pictures(folder: Path, *names: str) -> None:
    for name in names:
        media.write_image(folder / name, torch.full((3, 16, 24), 90, dtype=torch.uint8))


def _run(*arguments: object) -> int:
    return script.command_line.main(script._parser(), script.run, [str(argument) for argument in arguments])


def _prepare(folder: Path, *more: str) -> int:
    flags = ["--dataset_path", folder, "--save_path", folder.parent / "videos"]
    return _run(*flags, "--output_path", folder.parent / "new" / "batch.json", *more)


def test_the_batch_is_what_the_inference_script_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "pictures"
    _pictures(folder, "b.jpg", "a.PNG", "c.jpeg", "alone.webp")
    (folder / "a.txt").write_text("  a robot\n")
    (folder / "b..txt").write_text("müde Äpfel\n\n")
    (folder / "c.txt").write_text("c")
    assert _prepare(folder) == 0
    assert "1 pictures have no NAME.txt beside them and are left out: alone.webp" in caplog.text
    requests = read_batch(str(tmp_path / "new" / "batch.json"), Request("", "", "output/x.mp4"))
    assert [(Path(r.input_path).name, r.prompt, Path(r.save_path).name) for r in requests] == [
        ("a.PNG", "a robot", "a.mp4"),
        ("b.jpg", "müde Äpfel", "b.mp4"),
        ("c.jpeg", "c", "c.mp4"),
    ]
    for request in requests:
        request.check()


def test_nothing_to_write_is_exit_1_and_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "pictures"
    _pictures(folder, "a.jpg")
    assert _prepare(folder) == 1 and "no picture of" in caplog.text
    (folder / "a.txt").write_bytes(b"\xff\xfe")
    assert _prepare(folder) == 1 and "a.txt is not UTF-8" in caplog.text
    (folder / "a.txt").write_text("a")
    assert _prepare(folder, "--dry-run") == 0
    assert not (tmp_path / "new").exists()


def test_a_broken_prompt_is_exit_1_and_the_others_are_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "pictures"
    _pictures(folder, "a.jpg", "b.jpg")
    (folder / "a.txt").write_text(" \n")
    (folder / "b.txt").write_text("b")
    assert _prepare(folder) == 1 and "a.txt is empty" in caplog.text
    assert [entry["prompt"] for entry in json.loads((tmp_path / "new" / "batch.json").read_text())] == ["b"]


def test_what_would_overwrite_an_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "pictures"
    _pictures(folder, "a.jpg")
    (folder / "a.txt").write_text("a")
    assert _run("--dataset_path", folder, "--save_path", folder, "--output_path", tmp_path / "b.json") == 2
    assert "would replace the prompt" in capsys.readouterr().err
    save = tmp_path / "videos"
    assert _run("--dataset_path", folder, "--save_path", save, "--output_path", save / "a.json") == 2
    assert "would be replaced" in capsys.readouterr().err
    _pictures(folder, "a.png")
    assert _prepare(folder) == 2 and "have the same stem" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "text"),
    [("absent", "There is no folder"), ("pictuers", "Did you mean pictures?"), ("empty", "holds no pictures")],
)
def test_a_wrong_folder_is_named(tmp_path: Path, place: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    _pictures(tmp_path / "pictures", "a.jpg")
    (tmp_path / "empty").mkdir()
    assert _prepare(tmp_path / place) == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["scripts/prepare_batch_input_json.py"], ["-m", "scripts.prepare_batch_input_json"]]
)
def test_both_forms_of_the_command_run(tmp_path: Path, command: list[str]) -> None:
    _pictures(tmp_path / "in", "a.jpg")
    (tmp_path / "in" / "a.txt").write_text("a")
    flags = ["--dataset_path", tmp_path / "in", "--save_path", tmp_path / "out", "--output_path", tmp_path / "b.json"]
    without_path = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python(), *command, *flags], cwd=ROOT, env=without_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "b.json").is_file()
