# SPDX-License-Identifier: Apache-2.0
"""Clips of several cameras as training samples."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.data.dataset_multiview import MultiviewDataset
from cosmos_predict2.data.video import clips
from imaginaire.errors import ConfigError, DataError
from tests.data.video_files import all_frames, write_clip, write_embeddings
from tests.findings import problems

CAMERAS = ["left", "front", "right"]
VIEW_IDS = {"front": 0, "right": 1, "left": 5, "unused": 3}
STEMS = [f"drive_{i}" for i in range(4)]
LENGTHS = [14, 20, 16, 15]  # the last is for validation


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cameras")
    for k, camera in enumerate(CAMERAS):
        for stem, num_frames in zip(STEMS, LENGTHS, strict=True):
            write_clip(folder / "videos" / camera / f"{stem}.mp4", num_frames, size=(32, 48 + 16 * k))
        write_embeddings(folder / "t5_xxl" / camera, STEMS, num_tokens=3 + k)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy for each test to damage."""
    return Path(shutil.copytree(written, tmp_path, dirs_exist_ok=True))


def _dataset(folder: Path, **options: Any) -> MultiviewDataset:
    arguments: dict[str, Any] = dict(
        dataset_dir=str(folder),
        sequence_interval=1,
        num_frames=5,
        camera_keys=CAMERAS,
        video_size=(16, 32),
        state_t=2,
        camera_to_view_id=VIEW_IDS,
        front_camera_key="front",
        front_view_caption_only=False,
    )
    return MultiviewDataset(**arguments | options)


def test_a_sample_has_the_published_form(folder: Path) -> None:
    item = _dataset(folder)[0]
    assert item["video"].dtype == torch.uint8 and item["video"].shape == (3, 15, 16, 32)
    assert item["t5_text_embeddings"].shape == (3 * 512, 24) and item["t5_text_embeddings"].dtype == torch.float32
    masks = item["t5_text_mask"].reshape(3, 512)
    assert masks.dtype == torch.int64 and masks.sum(1).tolist() == [3, 4, 5]
    assert item["fps"] == 20.0 and item["num_frames"] == 5
    assert item["image_size"].tolist() == [16, 32, 16, 32] and item["padding_mask"].shape == (1, 16, 32)
    assert item["sample_n_views"] == 3
    assert item["view_indices"].tolist() == [5] * 5 + [0] * 5 + [1] * 5
    assert item["latent_view_indices_B_T"].tolist() == [5, 5, 0, 0, 1, 1]
    assert item["ref_cam_view_idx_sample_position"].tolist() == [-1]
    assert item["video_name"] == {
        "video_path": str(folder / "videos/front/drive_0.mp4"),
        "t5_embedding_path": str(folder / "t5_xxl/front/drive_0.pickle"),
        "start_frame_id": "0",
    }


@pytest.mark.parametrize(("interval", "every"), [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_every_start_of_every_clip_is_a_sample(folder: Path, interval: int, every: int) -> None:
    dataset = _dataset(folder, sequence_interval=interval, start_frame_interval=every)
    expected = [
        (stem, start)
        for stem, length in zip(STEMS[:3], LENGTHS, strict=False)
        for start in range(0, length - 4 * interval, every)
    ]
    assert len(dataset) == len(expected)
    for i in (0, len(expected) // 2, len(expected) - 1):
        item = dataset[i]
        stem, start = expected[i]
        frames = [start + k * interval for k in range(5)]
        views = [clips.stretch(all_frames(folder / f"videos/{c}/{stem}.mp4")[:, frames], (16, 32)) for c in CAMERAS]
        assert torch.equal(item["video"], torch.cat(views, 1))
        assert item["video_name"]["start_frame_id"] == str(start) and item["fps"] == 20.0 / interval


def test_the_last_tenth_and_one_more_is_for_validation(folder: Path) -> None:
    validation = _dataset(folder, is_train=False)
    assert list(validation.stems) == ["drive_3"] and len(validation) == 11
    assert list(_dataset(folder).stems) == STEMS[:3]
    for camera in CAMERAS:
        for stem in STEMS[1:]:
            (folder / "videos" / camera / f"{stem}.mp4").unlink()
    assert list(_dataset(folder, is_train=False).stems) == ["drive_0"]
    with pytest.raises(DataError, match="none to train on"):
        _dataset(folder)


def test_only_the_front_cameras_text_is_needed_if_it_is_the_only_one(folder: Path) -> None:
    for camera in ("left", "right"):
        for path in (folder / "t5_xxl" / camera).iterdir():
            path.unlink()
        (folder / "t5_xxl" / camera).rmdir()
    item = _dataset(folder, front_view_caption_only=True)[0]
    text = item["t5_text_embeddings"].reshape(3, 512, 24)
    assert text[1].any() and not text[0].any() and not text[2].any()
    assert item["t5_text_mask"].reshape(3, 512).sum(1).tolist() == [0, 4, 0]
    with pytest.raises(DataError, match="has no folder left"):
        _dataset(folder)


def test_a_clip_that_breaks_later_gives_way_to_the_next_clip(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    strict, lenient = _dataset(folder), _dataset(folder, skip_bad_samples=True, most_bad_samples=2)
    (folder / "videos/right/drive_0.mp4").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"right/drive_0\.mp4"):
        strict[3]
    with caplog.at_level(logging.WARNING):
        item = lenient[3]
    assert item["video_name"]["video_path"].endswith("front/drive_1.mp4")
    assert item["video_name"]["start_frame_id"] == "0" and "right/drive_0.mp4" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_frames=6), "state_t=2"),
        (dict(camera_keys=["left", "left"]), "each once"),
        (dict(camera_keys=[]), "each once"),
        (dict(front_camera_key="fron"), "Did you mean front"),
        (dict(camera_to_view_id={"left": 0}), "no number to front, right"),
        (dict(video_size=(16, 30)), "multiples of 16"),
        (dict(start_frame_interval=0), "start_frame_interval=0"),
        (dict(camera_keys=["left", "font"], front_camera_key=None, camera_to_view_id=None), "has no folder font"),
    ],
)
def test_wrong_arguments_are_named_before_and_when_it_is_built(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        _dataset(folder, **options)
    arguments: dict[str, Any] = dict(
        dataset_dir=str(folder), num_frames=5, camera_keys=CAMERAS, video_size=(16, 32), state_t=2
    )
    assert any(message in problem for problem in problems(MultiviewDataset, **arguments | options))
    assert not problems(MultiviewDataset, **arguments)


def test_cameras_that_do_not_go_together_are_an_error(folder: Path) -> None:
    shorter, slower = folder / "videos/right/drive_0.mp4", folder / "videos/right/drive_1.mp4"
    write_clip(shorter, 7, size=(32, 80))
    assert len(_dataset(folder)) == 3 + 16 + 12, "clips count as long as the shortest"
    write_clip(shorter, 4, size=(32, 80))
    write_clip(slower, LENGTHS[1], rate=10)
    with pytest.raises(DataError, match=r"(?s)num_frames=5.*drive_1"):
        _dataset(folder)
    assert list(_dataset(folder, skip_bad_samples=True).stems) == ["drive_2"]
    slower.unlink()
    with pytest.raises(DataError, match="drive_1"):
        _dataset(folder)
