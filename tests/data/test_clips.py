# SPDX-License-Identifier: Apache-2.0
"""Frames by number: exactly those of a full decoding, whatever the stream's structure; damage is an error."""

import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cosmos_predict2.data.video import clips, media
from imaginaire.errors import ConfigError, DataError
from tests.data.video_files import TICKS, all_frames, moving_pictures, remux, write_stream

NUM_FRAMES = 40
UNEVEN = [int(t) for t in np.cumsum(np.random.default_rng(0).integers(10, 90, NUM_FRAMES))]
LATE = [3000 + 30 * i for i in range(NUM_FRAMES)]
NOISE = np.random.default_rng(0).integers(0, 256, (NUM_FRAMES, 32, 48, 3), dtype=np.uint8)
GROUPS = {"g": "10", "bf": "3", "sc_threshold": "0"}

# name -> how it is written. The name's first part is what makes it hard.
STREAMS: dict[str, Callable[[Path], None]] = {
    "one_group.mp4": partial(write_stream),
    "groups.mp4": partial(write_stream, options=GROUPS),
    "open_groups.mp4": partial(write_stream, options=GROUPS | {"x264-params": "open-gop=1"}),
    "pyramid.mkv": partial(write_stream, options={"g": "12", "bf": "4", "x264-params": "b-pyramid=normal:open-gop=1"}),
    "no_b_frames.mp4": partial(write_stream, options={"g": "10", "bf": "0"}),
    "uneven_times.mp4": partial(write_stream, times=UNEVEN, options={"g": "10"}),
    "late_start.mp4": partial(write_stream, times=LATE, options={"g": "10"}),
    "late_start.mkv": partial(write_stream, times=LATE, options={"g": "10"}),
    "turned.mp4": partial(write_stream, rotation=90, options={"g": "10"}),
    "upside_down.mp4": partial(write_stream, rotation=180, options={"g": "10"}),
    "fragments.mp4": partial(
        write_stream, options={"g": "10"}, container_options={"movflags": "frag_keyframe+empty_moov"}
    ),
    "high_definition.mp4": partial(
        write_stream, num_frames=24, options={"g": "10", "preset": "ultrafast"}, size=(720, 64)
    ),
    "noise.mp4": partial(write_stream, pictures=NOISE, options={"g": "10"}),  # the encoder puts no frame out of order
    "odd_planes.mkv": partial(write_stream, codec="ffv1", size=(33, 47)),
    "mpeg4.mp4": partial(write_stream, codec="mpeg4", options={"bf": "2", "g": "10"}),
    "vp9.webm": partial(write_stream, codec="libvpx-vp9", options={"g": "10", "deadline": "realtime", "cpu-used": "8"}),
    # where the times of packets do not number the frames, or a keyframe is none
    "refresh.mp4": partial(write_stream, options={"g": "10", "x264-params": "intra-refresh=1"}),
    "guessed_times.avi": partial(write_stream, options={"g": "10"}),
    "mpeg4.avi": partial(write_stream, codec="mpeg4", options={"bf": "2", "g": "10"}),
    "pictures.avi": partial(write_stream, codec="mjpeg"),
    "hidden_frames.webm": partial(
        write_stream, codec="libvpx", options={"auto-alt-ref": "1", "lag-in-frames": "16", "g": "10"}
    ),
}
BY_PACKETS = ("edit_list.mp4", "cut_in_group.mp4", "cut_in_group.mkv", "cut_at_open_group.mp4", "order_of_storage.mp4")


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor]]:
    """Path and all frames of a stream by its name; written when it is first asked for."""
    folder = tmp_path_factory.mktemp("streams")
    known: dict[str, tuple[Path, Tensor]] = {}

    def stream(name: str) -> tuple[Path, Tensor]:
        if name not in known:
            path = folder / name
            if name in STREAMS:
                STREAMS[name](path)
            else:
                _by_packets(path, folder / f"source_{name}")
            known[name] = path, all_frames(path)
        return known[name]

    return stream


def _by_packets(path: Path, source: Path) -> None:
    """Streams that only come of copying packets."""
    if path.name.startswith("edit_list"):  # the first seven frames are there, and not shown
        write_stream(source, options={"g": "20", "bf": "2"})
        remux(source, path, shift=-7, options={"avoid_negative_ts": "disabled", "use_editlist": "1"})
    elif path.name.startswith("cut_in_group"):
        write_stream(source, options={"g": "20", "bf": "2"})
        remux(source, path, first=5)
    elif path.name.startswith("order_of_storage"):  # a writer without the times at which frames are shown
        write_stream(source, options=GROUPS)
        remux(source, path, without_times=True)
    else:  # the packets after the keyframe are of frames that are shown before it
        write_stream(source, options=GROUPS | {"x264-params": "open-gop=1"})
        remux(source, path, first=10)


@pytest.mark.parametrize("name", [*STREAMS, *BY_PACKETS])
def test_frames_are_those_of_a_full_decoding(streams: Callable[[str], tuple[Path, Tensor]], name: str) -> None:
    path, every = streams(name)
    count = every.shape[1]
    if name.startswith("edit_list"):
        assert count == NUM_FRAMES - 7
    with clips.open_clip(path) as clip:
        assert clip.num_frames == count
        for start in range(0, count - 5, 4):  # one open clip, read many times, forwards ...
            window = list(range(start, start + 6))
            assert torch.equal(clip.read(window), every[:, window]), f"frames {window}"
        for wanted in ([count - 1], [0, count - 1], [5, 5, 6, count - 1], list(range(0, count, 7)), [count - 1, 0, 3]):
            assert torch.equal(clip.read(wanted), every[:, wanted]), f"frames {wanted}"  # ... and in any order
    assert clips.probe(path)[0] == count


@pytest.mark.parametrize(
    "name", ["groups.mp4", "open_groups.mp4", "uneven_times.mp4", "edit_list.mp4", "vp9.webm", "noise.mp4"]
)
def test_what_can_be_sought_is_not_decoded_from_its_beginning(
    streams: Callable[[str], tuple[Path, Tensor]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, every = streams(name)
    monkeypatch.setattr(clips, "decoded", _fail)
    last = every.shape[1] - 1
    assert torch.equal(clips.read_frames(path, [0, last]), every[:, [0, last]])


@pytest.mark.parametrize("name", ["guessed_times.avi", "mpeg4.avi", "hidden_frames.webm", "cut_in_group.mkv"])
def test_times_that_do_not_number_the_frames_are_not_used(
    streams: Callable[[str], tuple[Path, Tensor]], name: str
) -> None:
    path, _ = streams(name)
    with clips.opened(path, 1) as container:
        assert not clips.packet_table(path, container).is_exact


def test_packets_of_a_clip_are_listed_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "clip.mp4"
    write_stream(path)
    listed: list[object] = []
    read_table = clips._read_table
    monkeypatch.setattr(clips, "_read_table", lambda *a: listed.append(a) or read_table(*a))
    clips.read_frames(path, [0])
    clips.read_frames(path, [9])
    assert len(listed) == 1
    write_stream(path, 30)
    with clips.open_clip(path) as clip:
        assert clip.num_frames == 30 and len(listed) == 2
    for i in range(clips.MOST_TABLES + 3):
        path = tmp_path / f"{i}.mp4"
        path.write_bytes((tmp_path / "clip.mp4").read_bytes())
        clips.read_frames(path, [0])
    assert len(clips._tables) == clips.MOST_TABLES


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def header_first(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A clip whose header is at its beginning, so that a piece of it can be opened."""
    path = tmp_path_factory.mktemp("whole") / "whole.mp4"
    noise = np.random.default_rng(0).integers(0, 256, (60, 96, 128, 3), dtype=np.uint8)
    write_stream(
        path, 60, options={"g": "20", "sc_threshold": "0"}, pictures=noise, container_options={"movflags": "faststart"}
    )
    return path.read_bytes()


@pytest.mark.parametrize("part", [0.3, 0.6, 0.999])
def test_a_clip_that_is_cut_off_is_an_error_wherever_it_is_read(
    tmp_path: Path, header_first: bytes, part: float
) -> None:
    path = tmp_path / "cut.mp4"
    path.write_bytes(header_first[: int(len(header_first) * part)])
    for frame in (0, 59):
        with pytest.raises(DataError, match=r"cut\.mp4 is cut off.* [0-9]+ (frames|of its 60)"):
            clips.read_frames(path, [frame])


@pytest.mark.parametrize("how", ["flipped", "zeroed"])
def test_damage_is_an_error_for_the_frames_made_from_it_and_no_others(
    tmp_path: Path, header_first: bytes, how: str
) -> None:
    whole, path = tmp_path / "whole.mp4", tmp_path / "damaged.mp4"
    whole.write_bytes(header_first)
    content = bytearray(header_first)
    import av

    with av.open(str(whole)) as container:
        packet = [packet for packet in container.demux(video=0) if packet.size][25]  # inside the second group of 20
        place, size = packet.pos, packet.size
    if how == "zeroed":
        content[place : place + size] = bytes(size)
    else:
        for i in range(place + size // 4, place + size // 2):
            content[i] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged\.mp4.* frame [0-9]+"):
        clips.read_frames(path, range(20, 40))
    with pytest.raises(DataError, match=r"damaged\.mp4.* frame [0-9]+"):
        clips.read_frames(path, [38])  # whole itself, and made from the damaged one
    first = clips.read_frames(path, range(20))
    assert torch.equal(first, clips.read_frames(whole, range(20)))
    assert torch.equal(clips.read_frames(path, range(40, 60)), clips.read_frames(whole, range(40, 60)))


def test_frames_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    write_stream(path)
    with pytest.raises(DataError, match=r"a\.mp4"):
        clips.read_frames(path, [38, 39, 40])
    with pytest.raises(DataError, match="-1 to -1"):
        clips.read_frames(path, [-1])
    with pytest.raises(DataError, match="no frame is asked for"):
        clips.read_frames(path, [])


# ---- planes and sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["yuv420p", "yuvj420p", "yuv422p", "yuv444p", "yuv420p10le", "nv12", "gray", "rgb24"])
@pytest.mark.parametrize("size", [(32, 48), (33, 47), (720, 16), (48, 200), (48, 854)])
def test_planes_are_the_pixels_that_one_step_gives(form: str, size: tuple[int, int]) -> None:
    import av
    from av.video.reformatter import VideoReformatter

    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    frame = av.VideoFrame.from_ndarray(noise, format="rgb24").reformat(format=form)
    planes = media.rgb_planes(frame, VideoReformatter())
    assert np.array_equal(np.stack(planes, -1), media.rgb_pixels(frame))


@pytest.mark.parametrize("size", [(32, 48), (16, 16), (64, 80), (16, 96)])
def test_stretch_is_the_published_rule(size: tuple[int, int]) -> None:
    frames = torch.from_numpy(moving_pictures(3)).permute(3, 0, 1, 2)
    numbers = frames.permute(1, 0, 2, 3).float() / 255
    scaled = F.interpolate(numbers, size=size, mode="bilinear", antialias=True)
    expected = (scaled * 255).clamp(0, 255).to(torch.uint8).permute(1, 0, 2, 3)  # a cast cuts off
    assert torch.equal(clips.stretch(frames, size), expected)


def test_scaling_on_the_way_is_scaling_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    write_stream(path)
    frames = [3, 9, 9, 20]
    scaled = clips.read_frames(path, frames, fit=lambda picture: clips.stretch(picture, (48, 32)))
    assert torch.equal(scaled, clips.stretch(clips.read_frames(path, frames), (48, 32)))
    assert scaled.is_contiguous() and scaled.dtype == torch.uint8


# ---- decoders --------------------------------------------------------------------------------------------------------


def test_a_decoder_is_chosen_by_name() -> None:
    assert clips.choose_decoder("auto") == clips.choose_decoder("pyav") == "pyav"
    with pytest.raises(ConfigError, match="Did you mean decord"):
        clips.choose_decoder("decor")
    with pytest.raises(ConfigError, match="num_threads=0"), clips.open_clip("a.mp4", num_threads=0):
        pass


@pytest.mark.parametrize("name", ["decord", "torchcodec"])
def test_a_decoder_that_is_not_installed_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        clips.choose_decoder(name)


class _Reader:
    """The interface of both packages, on top of PyAV; counts the readers that are held."""

    held = 0

    def __init__(self, path: str, **options: object) -> None:
        _Reader.held += 1
        self.video = media.read_video(path)[0].permute(1, 2, 3, 0)
        self.metadata = types.SimpleNamespace(num_frames=len(self.video), average_fps=20.0)

    def __del__(self) -> None:
        _Reader.held -= 1

    def __len__(self) -> int:
        return len(self.video)

    def get_avg_fps(self) -> float:
        return 20.0

    def get_batch(self, frames: list[int]) -> types.SimpleNamespace:
        return types.SimpleNamespace(asnumpy=lambda: self.video[frames].numpy())

    def get_frames_at(self, frames: list[int]) -> types.SimpleNamespace:
        return types.SimpleNamespace(data=self.video[frames])

    def seek(self, position: int) -> None:
        assert position == 0


@pytest.mark.parametrize("name", ["decord", "torchcodec"])
def test_other_decoders_give_the_same_form_and_keep_nothing(
    name: str, streams: Callable[[str], tuple[Path, Tensor]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(clips.importlib.util, "find_spec", lambda _: True)
    module = types.SimpleNamespace(VideoReader=_Reader, VideoDecoder=_Reader)
    monkeypatch.setitem(sys.modules, "decord", module)
    monkeypatch.setitem(sys.modules, "torchcodec", types.SimpleNamespace(decoders=module))
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", module)
    path, every = streams("groups.mp4")
    for _ in range(3):
        wanted = [4, 9, 9, 2]
        assert torch.equal(clips.read_frames(path, wanted, decoder=name), every[:, wanted])
        assert _Reader.held == 0
    (tmp_path / "bad.mp4").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"bad\.mp4"):
        clips.read_frames(tmp_path / "bad.mp4", [0], decoder=name)


@pytest.mark.parametrize("name", ["decord", "torchcodec"])
def test_the_installed_decoder_gives_the_same_frames(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed", exc_type=Exception)  # type: ignore[arg-type]
    write_stream(tmp_path / "a.mp4", size=(64, 64), options={"g": "10"})
    wanted = [4, 9, 9, 30]
    read = clips.read_frames(tmp_path / "a.mp4", wanted, decoder=name)
    assert (read.float() - all_frames(tmp_path / "a.mp4")[:, wanted].float()).abs().mean() < 2


def _fail(*_: object) -> None:
    raise AssertionError("decoded from the beginning")


assert TICKS % 20 == 0, "frames at 20 per second fall on whole ticks"
