# SPDX-License-Identifier: Apache-2.0
"""The clips of GR1 and of the NeMo assets arrive from a hub in the layout that training reads, also after a stop."""

import json
from pathlib import Path

import pytest

from cosmos_predict2.data.video import media
from cosmos_predict2.tools.prepare import hub_videos
from cosmos_predict2.tools.prepare.caption_embeddings import captions_of_csv
from scripts import (
    check_dataset,
    extract_images_from_videos,
    get_t5_embeddings_from_cosmos_nemo_assets,
    get_t5_embeddings_from_groot_dataset,
    prepare_cosmos_nemo_data,
    prepare_groot_data,
)
from tests.checkpoints.hub_server import Hub
from tests.data import sources_hub_videos as sources
from tests.data.sources_hub_videos import PROMPTS
from tests.tools.prepare.conftest import Start, names

GR1, NEMO = sources.GROOT, sources.NEMO
WANTED = {"metadata.csv", "source.json", *(f"videos/{name}.mp4" for name in PROMPTS)}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    scratch = tmp_path_factory.mktemp("scratch")
    return {GR1: sources.groot_files(scratch), NEMO: sources.nemo_files(scratch)}


@pytest.fixture
def hub(hub: Hub, repositories: dict[str, dict[str, bytes]]) -> Hub:
    hub.repositories.update({name: dict(files) for name, files in repositories.items()})
    return hub


@pytest.fixture
def prepare(start: Start, tmp_path: Path):
    def run(*more: object) -> int:
        return start(prepare_groot_data, "--out", tmp_path / "gr1", "--download_dir", tmp_path / "hf_gr1", *more)

    return run


def test_clips_and_prompts_lie_where_training_reads_them(
    hub: Hub, start: Start, prepare, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gr1"
    assert prepare("--dry_run") == 0 and "would fetch 4 of 4 files" in caplog.text
    assert not hub.asked and not folder.exists() and not (tmp_path / "hf_gr1").exists()
    assert prepare() == 0
    assert f"get_t5_embeddings_from_groot_dataset --data {folder} --meta_csv {folder}/meta" in caplog.text
    assert names(folder) == WANTED and not names(tmp_path / "hf_gr1")
    assert media.scan_video(folder / "videos" / "1.mp4").num_frames == 9
    assert dict(captions_of_csv(folder / "metadata.csv").results) == PROMPTS
    record = json.loads((folder / "source.json").read_text())
    assert (record["repository"], record["revision"]) == (GR1, hub.commit(GR1))
    assert start(get_t5_embeddings_from_groot_dataset, "--data", folder, "--text_encoder", "bytes") == 0
    assert start(check_dataset, folder, "--num_frames", 9, "--text_encoder", "bytes", "--workers", 0) == 0
    assert (folder / "metas" / "2.txt").read_text() == "The robot arm is performing a task. Open the box.\n"


def test_the_same_again_needs_no_hub_and_what_is_missing_is_fetched_alone(hub: Hub, prepare, tmp_path: Path) -> None:
    assert prepare() == 0
    hub.asked.clear()
    hub.revisions.clear()
    assert prepare() == 0 and not hub.asked and not hub.revisions
    (tmp_path / "gr1" / "videos" / "2.mp4").unlink()
    assert prepare() == 0
    assert [name.rpartition("/")[2] for name in hub.asked] == ["2.mp4"]
    assert names(tmp_path / "gr1") == WANTED


def test_a_stop_among_the_moves_loses_nothing(
    hub: Hub, prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    move, moved = hub_videos._move, []

    def stop_at_the_third(source: Path, place: Path) -> None:
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(place)
        move(source, place)

    with monkeypatch.context() as patched:
        patched.setattr(hub_videos, "_move", stop_at_the_third)
        assert prepare() == 130 and "source.json" not in names(tmp_path / "gr1")
    hub.asked.clear()
    assert prepare() == 0 and not hub.asked and names(tmp_path / "gr1") == WANTED


def _in_the_way(hub: Hub, out: Path) -> None:
    (out / "videos").mkdir(parents=True)
    (out / "videos" / "1.mp4").write_bytes(b"mine")


@pytest.mark.parametrize(
    ("plant", "code", "named"),
    [
        (lambda hub, _: hub.gated.add(GR1), 2, "huggingface.co/datasets/nvidia/GR1-100"),
        (_in_the_way, 2, "videos/1.mp4 is there already"),
        (lambda hub, _: hub.repositories[GR1].update({"metadata.csv": b"name,text\no.mp4,x\n"}), 1, "metadata.csv"),
        (lambda hub, _: hub.repositories[GR1].pop("metadata.csv"), 2, "metadata.csv"),
        (lambda hub, _: hub.repositories.update({GR1: {"metadata.csv": b"", "clips/a.mp4": b"a"}}), 2, "gr1"),
        (lambda hub, _: hub.repositories[GR1].update({"gr1/more/1.mp4": b"twice"}), 2, "1.mp4"),
    ],
)
def test_faults_of_the_source_are_named(
    plant, code: int, named: str, hub: Hub, prepare, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog
) -> None:
    plant(hub, tmp_path / "gr1")
    assert prepare() == code and named in capsys.readouterr().err + caplog.text
    assert plant != _in_the_way or (tmp_path / "gr1" / "videos" / "1.mp4").read_bytes() == b"mine"


def test_nemo_clips_and_pictures_of_them_train(
    hub: Hub, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, images = tmp_path / "nemo", tmp_path / "nemo_images"
    assert start(prepare_cosmos_nemo_data, "--out", dataset, "--dry_run") == 0 and not dataset.exists()
    assert start(prepare_cosmos_nemo_data, "--out", dataset) == 0
    assert f"get_t5_embeddings_from_cosmos_nemo_assets --data {dataset}" in caplog.text
    assert names(dataset) == {"source.json", *(f"videos/{name}.mp4" for name in sources.NEMO_STEMS)}
    hub.asked.clear()
    assert start(prepare_cosmos_nemo_data, "--out", dataset) == 0 and not hub.asked
    assert start(extract_images_from_videos, "--data", dataset, "--out", images, "--stride", 5, "--workers", 0) == 0
    assert len(names(images / "images")) == 4 * 3
    for folder, kind in ((dataset, []), (images, ["--is_image"])):
        flags = ["--data", folder, "--text_encoder", "bytes", *kind]
        assert start(get_t5_embeddings_from_cosmos_nemo_assets, *flags) == 0
        assert start(check_dataset, folder, "--workers", 0) == 0
    (images / "metas" / "video_1_00000002.txt").write_text("A video of something else.")
    assert start(check_dataset, images, "--workers", 0) == 1
