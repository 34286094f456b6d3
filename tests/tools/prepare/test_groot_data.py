# SPDX-License-Identifier: Apache-2.0
"""The GR1 clips arrive from a hub in the layout that training reads, once, and also after a stop."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmos_predict2.data.video import media
from cosmos_predict2.tools.prepare import hub_videos
from cosmos_predict2.tools.prepare.caption_embeddings import captions_of_csv
from scripts import check_dataset, get_t5_embeddings_from_groot_dataset
from scripts import prepare_groot_data as script
from tests.checkpoints.hub_server import Hub, serve
from tests.data.sources_groot import NAME, PROMPTS, groot_files
from tests.programs import python

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "scratch").mkdir()
    with serve(Hub({NAME: groot_files(tmp_path / "scratch")})) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def _run(tmp_path: Path, *more: str) -> int:
    flags = ["--dataset_path", str(tmp_path / "gr1"), "--download_dir", str(tmp_path / "hf_gr1"), *more]
    return script.command_line.main(script._parser(), script.run, flags)


def _names(folder: Path) -> set[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in files if ".cache" not in path.parts}


WANTED = {"metadata.csv", "source.json", *(f"videos/{name}.mp4" for name in PROMPTS)}


def test_clips_and_prompts_lie_where_training_reads_them(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert _run(tmp_path) == 0
    assert _names(tmp_path / "gr1") == WANTED and not _names(tmp_path / "hf_gr1")
    assert media.scan_video(tmp_path / "gr1" / "videos" / "1.mp4").num_frames == 9
    assert dict(captions_of_csv(tmp_path / "gr1" / "metadata.csv").results) == PROMPTS
    record = json.loads((tmp_path / "gr1" / "source.json").read_text())
    assert (record["repository"], record["revision"]) == (NAME, hub.commit(NAME))
    next_step = f"get_t5_embeddings_from_groot_dataset --data {tmp_path}/gr1 --meta_csv {tmp_path}/gr1/meta"
    assert next_step in caplog.text


def test_the_next_steps_make_a_folder_without_faults(hub: Hub, tmp_path: Path) -> None:
    assert _run(tmp_path) == 0
    folder = str(tmp_path / "gr1")
    for next_script, flags in (
        (get_t5_embeddings_from_groot_dataset, ["--dataset_path", folder, "--text_encoder", "bytes"]),
        (check_dataset, [folder, "--num_frames", "9", "--text_encoder", "bytes", "--workers", "0"]),
    ):
        assert next_script.command_line.main(next_script._parser(), next_script.run, flags) == 0
    prompt = (tmp_path / "gr1" / "metas" / "2.txt").read_text()
    assert prompt == "The robot arm is performing a task. Open the box.\n"


def test_the_same_again_needs_no_hub_and_what_is_missing_is_fetched_alone(hub: Hub, tmp_path: Path) -> None:
    assert _run(tmp_path) == 0
    hub.asked.clear()
    hub.revisions.clear()
    assert _run(tmp_path) == 0 and not hub.asked and not hub.revisions
    (tmp_path / "gr1" / "videos" / "2.mp4").unlink()
    assert _run(tmp_path) == 0
    assert [name.rpartition("/")[2] for name in hub.asked] == ["2.mp4"]
    assert _names(tmp_path / "gr1") == WANTED


def test_a_stop_among_the_moves_loses_nothing(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move, moved = hub_videos._move, []

    def stop_at_the_third(source: Path, place: Path) -> None:
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(place)
        move(source, place)

    monkeypatch.setattr(hub_videos, "_move", stop_at_the_third)
    assert _run(tmp_path) == 130 and "source.json" not in _names(tmp_path / "gr1")
    monkeypatch.setattr(hub_videos, "_move", move)
    hub.asked.clear()
    assert _run(tmp_path) == 0 and not hub.asked and _names(tmp_path / "gr1") == WANTED


def test_another_disk_gets_a_copy_in_one_piece(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def across(source: Path, target: Path) -> None:
        if "hf_gr1" in str(source) and "hf_gr1" not in str(target):
            raise OSError(18, "Invalid cross-device link")
        replace(source, target)

    monkeypatch.setattr(os, "replace", across)
    assert _run(tmp_path) == 0
    assert _names(tmp_path / "gr1") == WANTED and not _names(tmp_path / "hf_gr1")
    assert (tmp_path / "gr1" / "videos" / "3.mp4").read_bytes() == hub.repositories[NAME]["gr1/3.mp4"]


def test_a_dry_run_fetches_nothing(hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert _run(tmp_path, "--dry-run") == 0
    assert "would fetch 4 of 4 files" in caplog.text and not hub.asked
    assert not (tmp_path / "gr1").exists() and not (tmp_path / "hf_gr1").exists()


def test_what_cannot_be_is_said(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "gr1" / "videos" / "1.mp4"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"mine")
    assert _run(tmp_path) == 2 and f"{place} is there already" in capsys.readouterr().err
    assert place.read_bytes() == b"mine"
    place.unlink()
    hub.gated.add(NAME)
    assert _run(tmp_path) == 2 and "huggingface.co/datasets/nvidia/GR1-100" in capsys.readouterr().err
    hub.gated.clear()
    files = hub.repositories[NAME]
    files["metadata.csv"] = b"file_name,prompt\nother.mp4,Something else\n"
    assert _run(tmp_path) == 1 and "no clip of" in caplog.text and "3 clips have no prompt: 1, 2, 3" in caplog.text
    del files["metadata.csv"]
    assert _run(tmp_path / "new") == 2 and "metadata.csv" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", [["scripts/prepare_groot_data.py"], ["-m", "scripts.prepare_groot_data"]])
def test_both_forms_of_the_command_run(hub: Hub, tmp_path: Path, command: list[str]) -> None:
    flags = ["--dataset_path", str(tmp_path / "gr1"), "--download_dir", str(tmp_path / "hf_gr1")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python(), *command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert _names(tmp_path / "gr1") == WANTED
