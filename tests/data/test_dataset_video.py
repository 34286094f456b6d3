# SPDX-License-Identifier: Apache-2.0
"""A folder of clips as training samples: the sample's form, which frames it has, and every fault of the folder."""

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.data.dataset_video import Dataset
from cosmos_predict2.data.video import clips
from cosmos_predict2.data.video.media import resize_and_crop
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings import folder as embedding_folder
from cosmos_predict2.text.embeddings import pickles
from cosmos_predict2.text.embeddings.encode import embed_captions
from cosmos_predict2.text.embeddings.folder import EncoderRecord, read_embedding, write_record
from imaginaire.data.facts import facts_of
from imaginaire.errors import ConfigError, DataError
from imaginaire.findings import Finding
from tests.data.video_files import all_frames, video_folder, write_clip, write_embeddings
from tests.findings import checked, problems

LENGTHS = {"a": 20, "b": 25, "c": 13}
SIZE = (16, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return video_folder(tmp_path_factory.mktemp("folder"), LENGTHS)


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    """A folder for a test to damage."""
    return Path(shutil.copytree(folder, tmp_path, dirs_exist_ok=True))


def _dataset(folder: Path, **options: Any) -> Dataset:
    return Dataset(str(folder), 13, SIZE, **options)


def test_a_sample_has_the_published_form(folder: Path) -> None:
    dataset = _dataset(folder)
    assert len(dataset) == 3
    node = dict(_target_=Dataset, dataset_dir=str(folder), num_frames=13, video_size=SIZE)
    assert [facts_of({**node, **own}).rate for own in ({}, dict(stride=2), dict(fps=5.0))] == [20, 10, 5]
    assert facts_of({**node, "dataset_dir": "elsewhere"}).rate is None
    for i, stem in enumerate(LENGTHS):
        item = dataset[i]
        assert item["video_name"] == {
            "video_path": str(folder / f"videos/{stem}.mp4"),
            "t5_embedding_path": str(folder / f"t5_xxl/{stem}.pickle"),
        }
        assert torch.equal(
            item["t5_text_embeddings"], pickles.padded(read_embedding(folder / f"t5_xxl/{stem}.pickle"), 512)
        )
        assert item["t5_text_mask"].tolist() == [1] * 7 + [0] * 505
        assert item["fps"] == 20.0
        assert item["ai_caption"] == f"what {stem} shows"
    assert sorted(item) == [
        "ai_caption", "fps", "image_size", "num_frames", "padding_mask", "t5_text_embeddings", "t5_text_mask", "video",
        "video_name",
    ]  # fmt: skip


def test_frames_are_a_window_of_the_clip_scaled_by_the_published_rule(folder: Path) -> None:
    whole = clips.stretch(all_frames(folder / "videos/b.mp4"), SIZE)
    dataset = _dataset(folder)
    starts = set()
    numpy.random.seed(0)
    for _ in range(60):
        video = dataset[1]["video"]
        starts.update(s for s in range(13) if torch.equal(video, whole[:, s : s + 13]))
    assert starts == set(range(13))
    assert torch.equal(dataset[2]["video"], clips.stretch(all_frames(folder / "videos/c.mp4"), SIZE))


@pytest.mark.parametrize(
    ("options", "frames", "fps"),
    [
        (dict(sampling="first"), [0, 1, 2, 3, 4], 20.0),
        (dict(sampling="center"), [10, 11, 12, 13, 14], 20.0),
        (dict(sampling="first", stride=3), [0, 3, 6, 9, 12], 20 / 3),
        (dict(sampling="first", fps=10), [0, 2, 4, 6, 8], 10.0),
        (dict(sampling="first", fps=40), [0, 1, 1, 2, 2], 40.0),
        (dict(sampling="uniform"), [0, 6, 12, 18, 24], 20 * 4 / 24),
    ],
)
def test_frames_by_rule(folder: Path, options: dict[str, Any], frames: list[int], fps: float) -> None:
    whole = all_frames(folder / "videos/b.mp4")
    item = Dataset(str(folder), 5, (32, 48), **options)[1]
    assert torch.equal(item["video"], whole[:, frames])
    assert item["fps"] == pytest.approx(fps)


def test_the_shape_can_be_kept(folder: Path) -> None:
    item = Dataset(str(folder), 13, (32, 32), crop="center")[2]
    assert torch.equal(item["video"], resize_and_crop(all_frames(folder / "videos/c.mp4"), (32, 32)))


@pytest.mark.parametrize("name", ["text_embedding", "t5_xxl"])
@pytest.mark.parametrize("form", ["pickle", "safetensors"])
def test_other_names_and_forms_of_embeddings(tmp_path: Path, name: str, form: str) -> None:
    write_clip(tmp_path / "videos/a.MP4", 13)
    encoder = BytesEncoder(16, 8)
    embed_captions(tmp_path / name, {"a": "an arm"}, encoder, form=form)
    item = Dataset(str(tmp_path), 13, SIZE, num_tokens=16, text_encoder="bytes")[0]
    assert torch.allclose(item["t5_text_embeddings"], encoder.encode(["an arm"])[0], atol=1e-3)
    assert item["t5_text_embeddings"].shape == (16, 8) and "ai_caption" not in item
    with pytest.raises(DataError, match="t5 was asked for"):
        Dataset(str(tmp_path), 13, SIZE, text_encoder="t5")


def test_a_size_across_the_clips_is_reported_before_training(folder: Path) -> None:
    def notes(size: list[int]) -> list[Finding]:
        return checked(Dataset, dataset_dir=str(folder), num_frames=13, video_size=size)

    (note,) = notes([48, 32])
    assert note.level == "warning" and "was [32, 48] meant?" in note.text
    assert notes([32, 48]) == notes([32, 32]) == []


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_clips_without_an_embedding_are_excluded_with_a_warning(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    (own / "t5_xxl/b.pickle").unlink()
    with caplog.at_level(logging.WARNING):
        dataset = _dataset(own)
    assert [Path(dataset[i]["video_name"]["video_path"]).stem for i in range(len(dataset))] == ["a", "c"]
    assert "1 of 3 clips have no embedding" in caplog.text and ": b" in caplog.text


def test_without_all_captions_there_is_no_caption(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    (own / "metas/b.txt").unlink()
    with caplog.at_level(logging.WARNING):
        assert "ai_caption" not in _dataset(own)[0]
    assert "1 of 3 have no caption" in caplog.text and "ai_caption: b" in caplog.text


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder)
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: _emptied(f / "t5_xxl"), "get_t5_embeddings"),
        (
            lambda f: write_embeddings(_emptied(f / "t5_xxl"), ["x", "y"]),
            r"None of the 3 clips.* has x, y, the clips are a, b, c",
        ),
        (lambda f: (f / "t5_xxl").rename(f / "t5"), "t5_xxl"),
        (lambda f: (f / "videos/a.mkv").touch(), r"a\.mkv"),
        (lambda f: _emptied(f / "videos"), r"\.mp4"),
        (
            lambda f: shutil.move(f / "videos", _emptied(f / "metas").rename(f / "train")),
            r"has no folder videos, but train/videos\. Give .*train\.",
        ),
        (lambda f: (f / "videos").rename(f / "video"), r"has no folder videos\. It has: .*video"),
    ],
)
def test_a_folder_that_cannot_be_used_is_reported_early(
    own: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(own)
    with pytest.raises(DataError, match=message):
        _dataset(own)
    (problem,) = problems(Dataset, dataset_dir=str(own), num_frames=13, video_size=SIZE)
    assert re.search(message, problem)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "gr1").mkdir()
    with pytest.raises(DataError, match=rf"There is no folder .*gr2\. {tmp_path} has: gr1"):
        _dataset(tmp_path / "gr2")
    with pytest.raises(DataError, match="remote"):
        Dataset("s3://bucket/data", 13, SIZE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(video_size=(30, 32)), "video_size="),
        (dict(video_size=32), "video_size=32"),
        (dict(video_size=None), "video_size=None"),
        (dict(num_frames=0), "num_frames=0"),
        (dict(sampling="centre"), "Did you mean center"),
        (dict(crop="centre"), "Did you mean center"),
        (dict(fps=10, stride=2), "set one of them"),
        (dict(decoder="opencv"), "'opencv'"),
    ],
)
def test_wrong_arguments_are_named_before_and_when_it_is_built(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    arguments: dict[str, Any] = dict(dataset_dir=str(folder), num_frames=13, video_size=SIZE) | options
    with pytest.raises(ConfigError, match=message):
        Dataset(**arguments)
    (problem,) = problems(Dataset, **arguments)
    assert re.search(message, problem)


def test_short_and_broken_clips_are_an_error_before_training(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_clip(own / "videos/a.mp4", 12)
    (own / "videos/b.mp4").write_bytes(b"no video")
    with pytest.raises(
        DataError,
        match=r"(?s)2 of 3 clips cannot be used:.*a\.mp4 has 12 frames.* needs 13\..*b\.mp4.*skip_bad_samples",
    ):
        _dataset(own)
    with caplog.at_level(logging.WARNING):
        dataset = _dataset(own, skip_bad_samples=True)
    assert len(dataset) == 1 and "a.mp4" in caplog.text and "b.mp4" in caplog.text
    write_clip(own / "videos/c.mp4", 3)
    with pytest.raises(DataError, match="3 of 3 clips cannot be used"):
        _dataset(own, skip_bad_samples=True)


def test_rates_at_which_frames_repeat_or_that_differ_are_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = video_folder(tmp_path, {"a": 20, "b": 20}, rate=24)
    (folder / "videos/a.mp4").unlink()
    write_clip(folder / "videos/a.mp4", 20, rate=15)

    def warnings(**options: Any) -> list[str]:
        caplog.clear()
        Dataset(str(folder), 5, SIZE, **options)[0]
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    (repeats,) = warnings(fps=60)
    assert repeats.startswith(f"fps=60, but {folder}/videos/a.mp4 has 15 frames per second: its frames repeat")
    assert "Set fps=15 at most" in repeats
    (mixed,) = warnings()
    assert f"different rates, from 15 ({folder}/videos/a.mp4) to 24 frames per second ({folder}/videos/b.mp4)" in mixed
    assert warnings(fps=15) == warnings(fps=10) == warnings(sampling="uniform") == []
    write_clip(folder / "videos/a.mp4", 20, rate=24)
    assert warnings() == warnings(fps=24) == []


def _malicious(path: Path) -> None:
    path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("videos/b.mp4", lambda path: path.unlink()),
        ("videos/b.mp4", lambda path: write_clip(path, 5)),
        ("videos/b.mp4", lambda path: path.write_bytes(b"")),
        ("t5_xxl/b.pickle", _malicious),
        ("t5_xxl/b.pickle", lambda path: path.unlink()),
        ("t5_xxl/b.pickle", lambda path: path.write_bytes(b"\x80")),
        ("metas/b.txt", lambda path: path.write_bytes(b"\xff\xfe")),
        ("metas/b.txt", lambda path: path.write_text(" \n")),
    ],
)
def test_a_file_that_breaks_later_is_named_or_skipped(
    own: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    strict, lenient = _dataset(own), _dataset(own, skip_bad_samples=True)
    damage(own / name)
    with pytest.raises(DataError, match=r"(b\.mp4|b\.pickle|'b'|b\.txt).*skip_bad_samples=True"):
        strict[1]
    with caplog.at_level(logging.WARNING):
        item = lenient[1]
    assert item["video_name"]["video_path"].endswith("c.mp4")
    assert "skipped sample 1 (1 so far)" in caplog.text and "b" in caplog.text


@pytest.mark.parametrize("has_record", [True, False])
def test_what_is_known_of_all_embeddings_is_read_before_workers_start(
    own: Path, has_record: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_record:
        write_record(own / "t5_xxl", EncoderRecord("bytes-24", 24, 7, {}))
    dataset = _dataset(own)

    def fail(*_: object) -> None:
        raise AssertionError("each worker would read and hold it")

    for name in ("read_record", "embedding_files"):
        monkeypatch.setattr(embedding_folder, name, fail)
    assert dataset[0]["t5_text_embeddings"].shape[1] == 24


def test_a_changed_caption_is_reported_when_training_opens_the_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    video_folder(tmp_path, {"a": 5, "b": 5})
    shutil.rmtree(tmp_path / "t5_xxl")
    captions = {stem: (tmp_path / "metas" / f"{stem}.txt").read_text().strip() for stem in "ab"}
    embed_captions(tmp_path / "t5_xxl", captions, BytesEncoder(8, 16))
    Dataset(str(tmp_path), 5, (32, 48))
    assert "changed" not in caplog.text
    (tmp_path / "metas" / "b.txt").write_text("something else")
    Dataset(str(tmp_path), 5, (32, 48))
    assert "1 captions in" in caplog.text and "(b)" in caplog.text
    (tmp_path / "metas" / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"a\.txt"):
        Dataset(str(tmp_path), 5, (32, 48))
    assert Dataset(str(tmp_path), 5, (32, 48), skip_bad_samples=True)[0]["video_name"]["video_path"].endswith("b.mp4")
