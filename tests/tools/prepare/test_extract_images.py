# SPDX-License-Identifier: Apache-2.0
"""Clips become pictures: which frames, under which names, and what an interruption leaves."""

from pathlib import Path

import pytest
import torch

from cosmos_predict2.data.video import media
from cosmos_predict2.tools.prepare import image_extraction
from scripts import extract_images_from_videos as script
from tests.data.video_files import remux
from tests.programs import call


def _clip(path: Path, num_frames: int) -> None:
    """Frame i has the grey level 8 i."""
    levels = (torch.arange(num_frames) * 8).to(torch.uint8).view(1, -1, 1, 1)
    media.write_video(path, levels.expand(3, num_frames, 16, 32).contiguous(), 10)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, num_frames in (("one", 13), ("two", 6)):
        _clip(tmp_path / "in" / "videos" / f"{name}.mp4", num_frames)
    return tmp_path / "in"


def _run(source: Path, out: Path, *more: str) -> int:
    return call(script, "--input_dataset_dir", source, "--output_dataset_dir", out, "--workers", 0, *more)


def _names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "images").iterdir())


@pytest.mark.parametrize("stride", [1, 5, 30])
def test_picture_k_is_frame_k_times_stride(source: Path, tmp_path: Path, stride: int) -> None:
    assert _run(source, tmp_path / "out", "--stride", str(stride)) == 0
    wanted = [f"{name}_{k:08d}.jpg" for name, n in (("one", 13), ("two", 6)) for k in range(-(-n // stride))]
    assert _names(tmp_path / "out") == wanted
    for name in wanted:
        picture = media.read_image(tmp_path / "out" / "images" / name).float()
        assert picture.shape == (3, 16, 32)
        assert abs(picture.mean() - 8 * stride * int(name[-12:-4])) < 4  # of 255: two codecs
    assert script.parser.get_default("stride") == 30


def test_what_was_interrupted_goes_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, write, written = tmp_path / "out", image_extraction.write_image, []

    def stop_at_the_fifth(path: Path, *rest: object) -> None:
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(path)
        write(path, *rest)

    monkeypatch.setattr(image_extraction, "write_image", stop_at_the_fifth)
    assert _run(source, out, "--stride", "5") == 130
    assert _names(out) == ["one_00000000.jpg", "one_00000001.jpg", "one_00000002.jpg", "two_00000001.jpg"]
    monkeypatch.setattr(image_extraction, "write_image", lambda path, *rest: (written.append(path), write(path, *rest)))
    (out / "images" / ".two_00000001.jpg.tmp-999999999").write_bytes(b"half")  # of a process that was killed
    assert _run(source, out, "--stride", "5") == 0
    assert not [path.name for path in (out / "images").iterdir() if path.name.startswith(".")]
    assert [path.name for path in written[4:]] == ["two_00000001.jpg", "two_00000000.jpg"]
    assert _run(source, out, "--stride", "5") == 0 and len(written) == 6


def test_pictures_of_another_stride_or_source_are_not_mixed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(source, tmp_path / "out", "--stride", "5") == 0
    assert _run(source, tmp_path / "out", "--stride", "4") == 2
    assert "stride 5 (now 4)" in capsys.readouterr().err
    other = tmp_path / "other"
    _clip(other / "videos" / "one.mp4", 4)
    assert _run(other, tmp_path / "out", "--stride", "5") == 2
    assert "input" in capsys.readouterr().err


def test_a_broken_clip_is_named_and_leaves_no_pictures(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "videos" / "broken.mp4").write_bytes(b"not a video")
    read = image_extraction.iterate_frames

    def cut_off(path: Path, every: int) -> object:
        for number, frame in enumerate(read(path, every)):
            if path.stem == "one" and number == 2:
                raise image_extraction.DataError(f"{path} is damaged at frame 10.")
            yield frame

    monkeypatch.setattr(image_extraction, "iterate_frames", cut_off)
    (source / "metas").mkdir()
    for name in ("one", "two", "broken"):
        (source / "metas" / f"{name}.txt").write_text(f"clip {name}")
    assert _run(source, tmp_path / "out", "--stride", "5", "--copy_captions") == 1
    assert "broken.mp4" in caplog.text and "one.mp4 is damaged" in caplog.text and "2 of 3 clips failed" in caplog.text
    assert _names(tmp_path / "out") == ["two_00000000.jpg", "two_00000001.jpg"]
    metas = {path.name: path.read_text() for path in (tmp_path / "out" / "metas").iterdir()}
    assert metas == {"two_00000000.txt": "clip two", "two_00000001.txt": "clip two"}


def test_captions_need_a_flag_and_must_all_be_there(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (source / "metas").mkdir()
    (source / "metas" / "one.txt").write_text("one")
    assert _run(source, tmp_path / "out", "--copy_captions") == 2
    assert "two.txt is not there" in capsys.readouterr().err
    with caplog.at_level("INFO"):
        assert _run(source, tmp_path / "out") == 0
    assert "--copy_captions" in caplog.text and not (tmp_path / "out" / "metas").exists()


def test_a_dry_run_writes_nothing_and_wrong_input_is_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run(source, tmp_path / "out", "--dry-run") == 0 and not (tmp_path / "out").exists()
    assert _run(source, tmp_path / "out", "--stride", "0") == 2
    assert _run(tmp_path / "absent", tmp_path / "out") == 2
    assert _run(source, source / "videos" / "one.mp4") == 2
    assert "one.mp4 is a file" in capsys.readouterr().err
    source.rename(tmp_path / "train")
    (tmp_path / "in").mkdir()
    (tmp_path / "train").rename(tmp_path / "in" / "train")
    assert _run(tmp_path / "in", tmp_path / "out") == 2
    assert "There is no folder" in capsys.readouterr().err
    monkeypatch.setattr("imaginaire.storage.free_bytes", lambda path: 10)
    assert _run(tmp_path / "in" / "train", tmp_path / "out") == 2
    assert "Make room" in capsys.readouterr().err


def test_a_clip_that_ends_early_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    whole, path = tmp_path / "whole.mp4", tmp_path / "in" / "videos" / "short.mp4"
    path.parent.mkdir(parents=True)
    video = torch.randint(0, 256, (3, 24, 48, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    media.write_video(tmp_path / "noise.mp4", video, 10)
    # its index comes first, so that a part of it can be read
    remux(tmp_path / "noise.mp4", whole, options={"movflags": "faststart"})
    path.write_bytes(whole.read_bytes()[: int(0.6 * whole.stat().st_size)])
    assert _run(tmp_path / "in", tmp_path / "out", "--stride", "2") == 1
    assert "short.mp4" in caplog.text + capsys.readouterr().err
    assert not list((tmp_path / "out").rglob("*.jpg"))
