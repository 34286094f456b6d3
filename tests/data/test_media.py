# SPDX-License-Identifier: Apache-2.0
"""Pictures and videos: what is written is what is read, and whatever is wrong with a file is reported."""

import ctypes
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cosmos_predict2.data.video import media
from cosmos_predict2.toy_world.episodes import make_episodes
from imaginaire.errors import DataError
from tests.data.video_files import remux

M_PERTURB = -6  # of glibc's malloc.h


def _clip(num_frames: int = 5, height: int = 48, width: int = 64) -> torch.Tensor:
    """Each frame one colour ramp, brighter from frame to frame: survives compression, identifies frames."""
    ramp = torch.linspace(0, 100, width).expand(3, num_frames, height, width).clone()
    ramp[0] += 60
    return (ramp + torch.arange(num_frames).view(1, -1, 1, 1) * 15).clamp(0, 255).to(torch.uint8)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.float() - b.float()).abs().mean().item()


@pytest.mark.parametrize("fps", [10, 16.0, 29.97, 23.976, 12.5, Fraction(30000, 1001)])
def test_a_video_keeps_frames_rate_and_colours(tmp_path: Path, fps: float) -> None:
    clip = _clip()
    media.write_video(tmp_path / "clip.mp4", clip, fps)
    video, rate = media.read_video(tmp_path / "clip.mp4")
    assert video.dtype == torch.uint8 and video.shape == clip.shape
    assert rate == pytest.approx(float(fps), abs=1e-4)
    assert _difference(video, clip) < 2
    assert media.probe_video(tmp_path / "clip.mp4") == media.VideoInfo(5, rate, 48, 64)


def test_the_same_frames_are_the_same_file(tmp_path: Path) -> None:
    """Whatever lies in memory that nobody has written: glibc fills it with a byte."""
    made = make_episodes(12, 0)
    clips = [torch.from_numpy(made.render(i)).permute(3, 0, 1, 2) for i in range(12)]
    fill = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    written = []
    try:
        for byte in (1, 170):
            fill(M_PERTURB, byte)
            for clip in clips:
                media.write_video(tmp_path / "clip.mp4", clip, 10)
                written.append((tmp_path / "clip.mp4").read_bytes())
    finally:
        fill(M_PERTURB, 0)
    for i in range(12):
        assert written[i] == written[12 + i], i


@pytest.mark.parametrize("colour", [(205, 200, 190), (215, 40, 40), (40, 80, 220), (40, 160, 70), (255, 255, 255)])
@pytest.mark.parametrize("height", [48, 720])
def test_colours_survive_at_every_size(tmp_path: Path, colour: tuple[int, int, int], height: int) -> None:
    clip = torch.tensor(colour, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 2, height, 32)
    media.write_video(tmp_path / "clip.mp4", clip, 10)
    video, _ = media.read_video(tmp_path / "clip.mp4")
    assert (video.float() - clip.float()).abs().max() <= 4


@pytest.mark.parametrize(("height", "width"), [(47, 64), (48, 63), (17, 15)])
def test_an_odd_side_gets_one_more_row_or_column(tmp_path: Path, height: int, width: int) -> None:
    clip = _clip(3, height, width)
    media.write_video(tmp_path / "clip.mp4", clip, 10)
    video, _ = media.read_video(tmp_path / "clip.mp4")
    assert video.shape == (3, 3, height + height % 2, width + width % 2)
    assert _difference(video[..., :height, :width], clip) < 3


def test_first_and_last_frames(tmp_path: Path) -> None:
    media.write_video(tmp_path / "clip.mp4", _clip(9), 10)
    whole, _ = media.read_video(tmp_path / "clip.mp4")
    first, _ = media.read_video(tmp_path / "clip.mp4", first=2)
    last, _ = media.read_video(tmp_path / "clip.mp4", last=5)
    assert torch.equal(first, whole[:, :2])
    assert torch.equal(last, whole[:, -5:])
    with pytest.raises(DataError, match=r"clip\.mp4"):
        media.read_video(tmp_path / "clip.mp4", last=10)


@pytest.mark.parametrize("name", ["a.png", "a.PNG", "a.jpg", "a.JPEG", "a.webp", "a.WebP"])
def test_pictures_of_every_suffix_in_any_case(tmp_path: Path, name: str) -> None:
    picture = _clip()[:, 0]
    media.write_image(tmp_path / name, picture)
    assert _difference(media.read_image(tmp_path / name), picture) < 3


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "CMYK", "1", "I;16"])
def test_every_kind_of_pixel_becomes_rgb(tmp_path: Path, mode: str) -> None:
    grey = np.full((6, 4), 255, np.uint8)
    picture = (
        Image.fromarray(np.full((6, 4), 65535, np.uint16)) if mode == "I;16" else Image.fromarray(grey).convert(mode)
    )
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    picture.save(path)
    read = media.read_image(path)
    assert read.shape == (3, 6, 4) and read.dtype == torch.uint8
    assert read.min() >= 250
    Image.new("RGBA", (4, 4), (200, 100, 50, 0)).save(tmp_path / "a.png")
    assert not media.read_image(tmp_path / "a.png").any(), "transparency lies over black"


def test_a_turned_photograph_is_upright(tmp_path: Path) -> None:
    pixels = np.zeros((10, 20, 3), np.uint8)
    pixels[:, :5] = 255  # white at the left of the sensor
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    read = media.read_image(tmp_path / "a.png")
    assert read.shape == (3, 20, 10)
    assert read[:, :5].min() == 255 and read[:, 5:].max() == 0


@pytest.mark.parametrize("name", ["a.png", "a.mp4"])
@pytest.mark.parametrize("content", [b"", b"no media at all", b"\x89PNG\r\n\x1a\nbroken"])
def test_an_undecodable_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    read = media.read_image if name.endswith("png") else media.read_video
    with pytest.raises(DataError, match=rf"{name} is not a (picture|video) that can be decoded"):
        read(tmp_path / name)


def test_every_so_manieth_frame_is_that_of_the_whole_clip(tmp_path: Path) -> None:
    media.write_video(tmp_path / "a.mp4", _clip(11), 10)
    whole, _ = media.read_video(tmp_path / "a.mp4")
    some = torch.stack(list(media.iterate_frames(tmp_path / "a.mp4", 4)), dim=1)
    assert torch.equal(some, whole[:, ::4])


def test_a_scan_decodes_all_and_finds_what_is_cut_off_or_damaged(tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (3, 30, 48, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    media.write_video(tmp_path / "a.mp4", noise, 10)
    assert media.scan_video(tmp_path / "a.mp4") == media.probe_video(tmp_path / "a.mp4")
    remux(tmp_path / "a.mp4", tmp_path / "index_first.mp4", options={"movflags": "faststart"})
    content = (tmp_path / "index_first.mp4").read_bytes()
    assert media.scan_video(tmp_path / "index_first.mp4").num_frames == 30
    (tmp_path / "cut.mp4").write_bytes(content[: len(content) * 2 // 3])
    assert media.probe_video(tmp_path / "cut.mp4").num_frames == 30  # its head still promises all of them
    with pytest.raises(DataError, match=r"cut\.mp4"):
        media.scan_video(tmp_path / "cut.mp4")
    middle = len(content) // 2
    (tmp_path / "damaged.mp4").write_bytes(content[:middle] + bytes(3000) + content[middle + 3000 :])
    with pytest.raises(DataError, match=r"damaged\.mp4"):
        media.scan_video(tmp_path / "damaged.mp4")
    with pytest.raises(DataError, match=r"damaged\.mp4"):
        media.read_video(tmp_path / "damaged.mp4")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (media.read_image, "none.png"),
        (media.probe_video, "none.mp4"),
        (media.read_video, "folder.mp4"),
        (media.read_image, "a.gif"),
        (media.kind_of, "a.txt"),
        (media.kind_of, "folder"),
        (media.check_writable, "file/clip.mp4"),
        (media.check_writable, "folder.mp4"),
        (media.check_writable, "clip.txt"),
    ],
)
def test_missing_wrong_and_foreign_files_are_named(call: Callable[[Path], object], name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=str(tmp_path / name)):
        call(tmp_path / name)


def test_kinds_of_files_and_a_place_to_write(tmp_path: Path) -> None:
    assert media.kind_of("A.JPG") == "image" and media.kind_of("b.MP4") == "video"
    media.check_writable(tmp_path / "new/folder/clip.mp4")
    assert not list((tmp_path / "new/folder").iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clip.mp4"
    media.write_video(path, _clip(2), 10)
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DataError, match=r"clip\.mp4"):
        media.write_video(path, _clip(3), 10)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["clip.mp4"]


def test_impossible_rates_and_empty_clips_are_refused(tmp_path: Path) -> None:
    for fps in (0, -1, float("nan"), 1e-9):
        with pytest.raises(DataError, match="frames per second"):
            media.write_video(tmp_path / "clip.mp4", _clip(1), fps)
    with pytest.raises(DataError, match="0 frames"):
        media.write_video(tmp_path / "clip.mp4", _clip(0), 10)


@pytest.mark.parametrize("have", [(480, 640), (48, 64), (100, 700), (703, 1281), (704, 1280), (31, 17)])
@pytest.mark.parametrize("want", [(704, 1280), (48, 48)])
def test_resize_and_crop_covers_and_keeps_the_centre(have: tuple[int, int], want: tuple[int, int]) -> None:
    rows = torch.linspace(0, 255, have[0]).view(1, 1, -1, 1).expand(3, 1, *have)
    out = media.resize_and_crop(rows.to(torch.uint8), want)
    assert out.shape == (3, 1, *want) and out.dtype == torch.uint8
    assert abs(out.float().mean() - 127.5) < 6, "not the centre"


def test_resize_matches_pillow(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    ours = media.resize(torch.from_numpy(pixels).permute(2, 0, 1), (24, 36))
    theirs = np.array(Image.fromarray(pixels).resize((36, 24), Image.Resampling.BILINEAR))
    assert (ours.permute(1, 2, 0).int() - torch.from_numpy(theirs).int()).abs().max() <= 1


@pytest.mark.parametrize(("height", "width"), [(5000, 1), (1, 5000), (4999, 3)])
def test_a_very_long_picture_is_cut_before_it_is_scaled(
    height: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled, resize = [], media.resize
    monkeypatch.setattr(media, "resize", lambda frames, size: scaled.append(size) or resize(frames, size))
    picture = torch.zeros(3, height, width, dtype=torch.uint8)
    picture[:, height // 2 - height // 500 : height // 2 + height // 500 + 1] = 200
    assert media.resize_and_crop(picture, (32, 48))[:, 16, 24].eq(200).all()  # its centre is still the centre
    assert max(scaled[0]) <= 48 * 32


def test_resize_of_a_side_that_fits_changes_nothing() -> None:
    clip = torch.randint(0, 256, (3, 2, 48, 48), dtype=torch.uint8)
    assert torch.equal(media.resize_and_crop(clip, (48, 48)), clip)
    assert torch.equal(media.resize_and_crop(clip, (32, 48)), clip[..., 8:40, :])


def test_a_contact_sheet_shows_every_clip(tmp_path: Path) -> None:
    clips = [torch.full((3, 13, 48, 48), value, dtype=torch.uint8) for value in (50, 120)]
    sheet = media.contact_sheet(clips, ["generated", "true"], columns=4)
    assert sheet.dtype == torch.uint8 and sheet.shape[0] == 3
    for value in (50, 120):
        # The letters are grey at their edges and add a few pixels.
        assert 0 <= (sheet == value).all(dim=0).sum() - 4 * 144 * 144 < 50
    large = media.contact_sheet([torch.zeros(3, 5, 704, 1280, dtype=torch.uint8)], ["one"])
    assert large.shape[2] < 5 * 150 + 100
