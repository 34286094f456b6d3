# SPDX-License-Identifier: Apache-2.0
"""The NeMo clips arrive from a hub in the layout that training reads; pictures are made of them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import check_dataset, extract_images_from_videos, get_t5_embeddings_from_cosmos_nemo_assets
from scripts import prepare_cosmos_nemo_data as script
from tests.checkpoints.hub_server import Hub, serve
from tests.data.sources_nemo import NAME, STEMS, nemo_files
from tests.programs import python

ROOT = Path(__file__).resolve().parents[3]
WANTED = {"source.json", *(f"videos/{name}.mp4" for name in STEMS)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "scratch").mkdir()
    with serve(Hub({NAME: nemo_files(tmp_path / "scratch")})) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def _run(dataset: Path, *more: str) -> int:
    return script.command_line.main(script._parser(), script.run, ["--dataset_path", str(dataset), *more])


def _names(folder: Path) -> set[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in files if ".cache" not in path.parts}


def test_clips_lie_where_training_reads_them_and_pictures_follow(
    hub: Hub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, images = tmp_path / "nemo", tmp_path / "nemo_images"
    assert _run(dataset, "--dry-run") == 0 and not dataset.exists()
    with caplog.at_level("INFO"):
        assert _run(dataset) == 0
    assert _names(dataset) == WANTED
    assert f"get_t5_embeddings_from_cosmos_nemo_assets --data {dataset}" in caplog.text
    hub.asked.clear()
    assert _run(dataset) == 0 and not hub.asked
    flags = ["--input_dataset_dir", str(dataset), "--output_dataset_dir", str(images), "--stride", "5"]
    extract = extract_images_from_videos
    assert extract.command_line.main(extract._parser(), extract.run, [*flags, "--workers", "0"]) == 0
    assert len(_names(images / "images")) == 4 * 3
    embed, check = get_t5_embeddings_from_cosmos_nemo_assets, check_dataset
    for folder, kind in ((dataset, []), (images, ["--is_image"])):
        flags = ["--dataset_path", str(folder), "--text_encoder", "bytes", *kind]
        assert embed.command_line.main(embed._parser(), embed.run, flags) == 0
        assert check.command_line.main(check._parser(), check.run, [str(folder), "--workers", "0"]) == 0
    (images / "metas" / "video_1_00000002.txt").write_text("A video of something else.")
    assert check.command_line.main(check._parser(), check.run, [str(images), "--workers", "0"]) == 1


def test_a_repository_of_another_layout_is_described(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["me/other"] = {"clips/a.mp4": b"a"}
    assert _run(tmp_path / "nemo", "--repo_id", "me/other") == 2
    assert "no clips in nemo_diffusion_example_data/; it has files in clips" in capsys.readouterr().err
    files = hub.repositories[NAME]
    files["nemo_diffusion_example_data/more/video_0.mp4"] = b"twice"
    assert _run(tmp_path / "nemo") == 2
    assert "several files called video_0.mp4" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["scripts/prepare_cosmos_nemo_data.py"], ["-m", "scripts.prepare_cosmos_nemo_data"]]
)
def test_both_forms_of_the_command_run(hub: Hub, tmp_path: Path, command: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [python(), *command, "--dataset_path", str(tmp_path / "nemo")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert _names(tmp_path / "nemo") == WANTED
