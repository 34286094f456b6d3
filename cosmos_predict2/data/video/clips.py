# SPDX-License-Identifier: Apache-2.0
"""Chosen frames of a clip, exactly those that a decoding of all of it would give, without decoding all of it.

A clip is read in two steps. Its packets are listed, which decodes nothing: their times in order number the frames. Then
the decoder starts at the keyframe before the first wanted frame, and of the frames in between it skips those that
no other needs. Where the times do not number the frames (containers without them, streams that begin inside a group of
pictures) or the frames that come out are not the expected ones, the clip is decoded from its beginning.

PyAV is the decoder; decord and torchcodec are used by name where they are installed.
"""

import importlib
import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cosmos_predict2.data.video import media
from imaginaire import storage
from imaginaire.errors import ConfigError, DataError, near, raised_as
from imaginaire.storage.object_store import StrPath

DECODERS = ("pyav", "decord", "torchcodec")
SEEK_COST = 8  # frames that can be decoded in the time of a seek, about
# FFmpeg's names of the containers that state when a frame is shown; mp4 and webm are of them.
TIMED_CONTAINERS = ("mov", "matroska")
WITHOUT_A_FRAME = ("vp8",)  # codecs with packets that show nothing
SKIPPABLE = ("h264",)  # codecs whose frames record whether another is made from them
MOST_TABLES = 32  # clips whose packet times are kept: for data sets of a few long clips

Fit = Callable[[Tensor], Tensor]
Planes = Sequence[np.ndarray]  # uint8 [H, W] of red, green and blue


class Clip(Protocol):
    """An open clip."""

    num_frames: int
    fps: float

    def read(self, frames: Sequence[int], fit: Fit | None = None) -> Tensor:
        """uint8 [3, F, H, W], one per entry of ``frames``; ``fit`` brings [3, 1, H, W] to another size on the way."""
        ...


@contextmanager
def open_clip(path: StrPath, *, decoder: str = "auto", num_threads: int = 1) -> Iterator[Clip]:
    """The clip, open for reading. ``num_threads`` decode; workers of a loader should have one each."""
    name = choose_decoder(decoder)
    if num_threads < 1:
        raise ConfigError(f"num_threads={num_threads}; a decoder needs 1 at least.")
    if name == "pyav":
        with opened(path, num_threads) as container:
            yield _PyavClip(path, container, num_threads)
        return
    clip = (_decord_clip if name == "decord" else _torchcodec_clip)(path, num_threads)
    try:
        yield clip
    finally:
        clip.close()


def read_frames(path: StrPath, indices: Sequence[int], *, decoder: str = "auto", fit: Fit | None = None) -> Tensor:
    """uint8 [3, F, H, W]: the frames of these numbers, in the size of the file or in that which ``fit`` gives them."""
    with open_clip(path, decoder=decoder) as clip:
        return clip.read(indices, fit)


def probe(path: StrPath) -> tuple[int, float]:
    """(number of frames, frames per second), from the file's header where that is enough."""
    with media.opened_video(path) as container:
        stream = container.streams.video[0]
        num_frames = num_frames_by_header(container, stream)
        if num_frames is None:
            num_frames = packet_table(path, container).num_frames
        return num_frames, media.frame_rate(stream, path)


def choose_decoder(name: str) -> str:
    """One of DECODERS; ``auto`` is pyav."""
    if name == "auto":
        return "pyav"
    if name not in DECODERS:
        raise ConfigError(f"There is no decoder '{name}'.{near(name, [*DECODERS, 'auto'])}")
    if name != "pyav" and importlib.util.find_spec(name) is None:
        raise ConfigError(f"'{name}' is not installed. Install it (pip install {name}), or use decoder=pyav.")
    return name


def stretch(frames_3_F_H_W: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [3, F, *size]: scaled straight to (height, width), whatever the shape was.

    The rule of the published training code: bilinear with antialiasing on numbers from 0 to 1, then cut off, not
    rounded, to whole ones.
    """
    if tuple(frames_3_F_H_W.shape[-2:]) == tuple(size):
        return frames_3_F_H_W
    result = torch.empty(*frames_3_F_H_W.shape[:2], *size, dtype=torch.uint8)
    for i in range(frames_3_F_H_W.shape[1]):  # one at a time stays in the processor's cache
        result[:, i] = scaled(frames_3_F_H_W[:, i], size).mul_(255).clamp_(0, 255)
    return result


CROPS = {"stretch": stretch, "center": media.resize_and_crop}  # to the size straight, or keeping the shape


def scaled(image_3_H_W: Tensor, size: tuple[int, int]) -> Tensor:
    """float32 [3, *size], 0 to 1, of a uint8 picture: bilinear with antialiasing, whatever the shape was."""
    pixels = image_3_H_W.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    return F.interpolate(pixels[None], size=size, mode="bilinear", antialias=True)[0]


# ---- the packets of a file -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PacketTable:
    """Times at which frames are shown, in order, and those of the keyframes among them."""

    times: np.ndarray
    keys: np.ndarray
    num_frames: int
    is_exact: bool  # the i-th time is that of the i-th frame
    may_skip: bool  # the decoder can skip frames that no other needs, and the times are reliable


_tables: OrderedDict[tuple[str, int, int], PacketTable] = OrderedDict()


def packet_table(path: StrPath, container: Any) -> PacketTable:
    """The clip's packet times; they are kept for the clips that were read last."""
    local = storage.local_copy(path)
    status = local.stat()
    key = (str(local), status.st_size, status.st_mtime_ns)
    table = _tables.pop(key, None) or _read_table(path, container)
    _tables[key] = table  # the last one; several threads probe clips, and each step leaves the table whole
    while len(_tables) > MOST_TABLES:
        _tables.popitem(last=False)
    return table


def _read_table(path: StrPath, container: Any) -> PacketTable:
    stream = container.streams.video[0]
    codec = stream.codec_context
    times: list[int] = []
    keys: list[int] = []
    num_packets = 0
    is_exact = container.format.name.startswith(TIMED_CONTAINERS) and codec.name not in WITHOUT_A_FRAME
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if packet.is_corrupt:
            raise DataError(f"{path} is cut off or damaged after {num_packets} frames.")
        is_exact = is_exact and packet.pts is not None
        num_packets += 1
        if packet.pts is not None and not packet.is_discard:
            times.append(packet.pts)
            if packet.is_keyframe:
                keys.append(packet.pts)
        elif packet.is_keyframe and packet.pts is not None:
            keys.append(packet.pts)  # where an edit list cuts into a group of pictures, its keyframe is not shown
    entries = getattr(stream, "index_entries", None)  # PyAV 16 has it
    if "mov" in container.format.name and entries is not None and num_packets < len(entries):
        raise DataError(f"{path} is cut off: {num_packets} of its {len(entries)} frames are there.")
    ordered, ordered_keys = np.sort(np.array(times, np.int64)), np.sort(np.array(keys, np.int64))
    # Two frames at a time, or frames shown before the first keyframe, which cannot be decoded.
    if (np.diff(ordered) <= 0).any() or not keys or ordered[:1] < ordered_keys[0]:
        is_exact = False
    # Frames may change places, yet their times do not: either none does, or the writer knew the order of storage alone.
    is_doubtful = codec.has_b_frames and (np.diff(times) > 0).all()
    num_frames = len(times) if is_exact else sum(1 for _ in decoded(path, 1))
    if num_frames == 0:
        raise DataError(f"{path} holds no frame that can be decoded.")
    return PacketTable(ordered, ordered_keys, num_frames, is_exact, codec.name in SKIPPABLE and not is_doubtful)


def num_frames_by_header(container: Any, stream: Any) -> int | None:
    """Number of frames that are shown, where the header lists all of them."""
    entries = getattr(stream, "index_entries", None)
    if "mov" not in container.format.name or not entries or not stream.frames or not entries[0].is_keyframe:
        return None
    return sum(1 for entry in entries if not entry.is_discard) or None


def decoded(path: StrPath, num_threads: int) -> Iterator[Any]:
    """All frames of a clip. It is opened anew: not every container can go back to its very beginning."""
    from av import FFmpegError

    number = 0
    with opened(path, num_threads) as container:
        try:
            for frame in container.decode(container.streams.video[0]):
                yield frame
                number += 1
        except (FFmpegError, OSError) as error:
            raise DataError(f"{path}: frame {number} cannot be decoded: {error}") from error


@contextmanager
def opened(path: StrPath, num_threads: int) -> Iterator[Any]:
    """The container, whose video so many threads will decode."""
    with media.opened_video(path) as container:
        codec = container.streams.video[0].codec_context
        codec.thread_type = "AUTO" if num_threads > 1 else "NONE"
        codec.thread_count = num_threads
        yield container


# ---- PyAV ------------------------------------------------------------------------------------------------------------


class _Unexpected(Exception):
    """The decoder did not give the frames that the table promises after a seek."""


class _PyavClip:
    def __init__(self, path: StrPath, container: Any, num_threads: int) -> None:
        self._path = path
        self._container = container
        self._num_threads = num_threads
        self._stream = container.streams.video[0]
        self._table = packet_table(path, container)
        self.num_frames = self._table.num_frames
        self.fps = media.frame_rate(self._stream, path)

    def read(self, frames: Sequence[int], fit: Fit | None = None) -> Tensor:
        places = _places(frames, self.num_frames, self._path)
        if self._table.is_exact:
            try:
                return _filled(self._by_seeking(list(places)), places, fit, self._path)
            except _Unexpected:
                pass
        return _filled(self._from_the_beginning(list(places)), places, fit, self._path)

    def _by_seeking(self, wanted: list[int]) -> Iterator[Planes]:
        """The pictures of ascending frame numbers."""
        from av import FFmpegError

        pending = list(reversed(wanted))
        while pending:
            first = pending[-1]
            key_time = self._key_before(first)
            try:
                self._container.seek(int(key_time), stream=self._stream, backward=True)
                yield from self._run(pending, int(key_time))
            except (FFmpegError, OSError) as error:  # decoding all of it reports what is wrong
                raise _Unexpected from error
            if pending and pending[-1] == first:
                raise _Unexpected

    def _run(self, pending: list[int], key_time: int) -> Iterator[Planes]:
        """Pictures after a seek, until it is shorter to seek again; what was given is taken off ``pending``."""
        times = self._table.times
        wanted_times = {int(times[i]) for i in pending}
        codec = self._stream.codec_context
        position = int(np.searchsorted(times, key_time))
        reformatter = _reformatter()
        is_damaged = False
        try:
            for packet in self._container.demux(self._stream):
                if self._table.may_skip:
                    is_wanted = packet.pts is None or packet.pts in wanted_times
                    codec.skip_frame = "DEFAULT" if is_wanted else "NONREF"
                for frame in packet.decode():
                    if frame.pts is None:
                        raise _Unexpected
                    if frame.pts < key_time:
                        continue  # shown before the keyframe, and made from what was not decoded
                    is_damaged = frame.is_corrupt or (is_damaged and not frame.key_frame)
                    expected = times[pending[-1] if self._table.may_skip else position]
                    position += 1
                    if frame.pts > expected:
                        raise _Unexpected
                    if frame.pts < times[pending[-1]]:
                        continue
                    if is_damaged:
                        raise _Unexpected
                    yield media.rgb_planes(frame, reformatter, self._num_threads)
                    before = pending.pop()
                    if not pending or self._is_far(before, pending[-1]):
                        return
        finally:
            codec.skip_frame = "DEFAULT"

    def _is_far(self, here: int, there: int) -> bool:
        """True if seeking is shorter than decoding all frames up to the next."""
        if there - here <= SEEK_COST:
            return False
        key = int(np.searchsorted(self._table.times, self._key_before(there)))
        return key - here > SEEK_COST

    def _key_before(self, frame: int) -> int:
        keys = self._table.keys
        return int(keys[np.searchsorted(keys, self._table.times[frame], side="right") - 1])

    def _from_the_beginning(self, wanted: list[int]) -> Iterator[Planes]:
        pending = list(reversed(wanted))
        reformatter = _reformatter()
        is_damaged = False
        for number, frame in enumerate(decoded(self._path, self._num_threads)):
            is_damaged = frame.is_corrupt or (is_damaged and not frame.key_frame)
            if number != pending[-1]:
                continue
            if is_damaged:
                raise DataError(f"{self._path} is damaged at frame {number}, or at one that it is made from.")
            yield media.rgb_planes(frame, reformatter, self._num_threads)
            pending.pop()
            if not pending:
                return
        raise DataError(f"{self._path} ends before frame {pending[-1]}, which is wanted.")


def _reformatter() -> Any:
    from av.video.reformatter import VideoReformatter

    return VideoReformatter()


# ---- others ----------------------------------------------------------------------------------------------------------


@dataclass
class _ForeignClip:
    """A clip by another decoder; its reader is dropped after one sample, as some keep memory the longer they live."""

    path: StrPath
    num_frames: int
    fps: float
    pixels: Callable[[list[int]], np.ndarray]  # uint8 [F, H, W, 3] of frame numbers
    close: Callable[[], object] = lambda: None

    def read(self, frames: Sequence[int], fit: Fit | None = None) -> Tensor:
        places = _places(frames, self.num_frames, self.path)
        with _explained(self.path):
            pixels = self.pixels(list(places))
        planes = ([picture[..., channel] for channel in range(3)] for picture in pixels)
        return _filled(planes, places, fit, self.path)


def _decord_clip(path: StrPath, num_threads: int) -> _ForeignClip:
    decord = _loaded("decord")
    with _explained(path):
        reader = decord.VideoReader(str(storage.local_copy(path)), num_threads=num_threads)
        return _ForeignClip(
            path,
            len(reader),
            float(reader.get_avg_fps()),
            lambda frames: reader.get_batch(frames).asnumpy(),
            lambda: reader.seek(0),  # without it the frames that it holds in advance are never freed
        )


def _torchcodec_clip(path: StrPath, num_threads: int) -> _ForeignClip:
    decoders = _loaded("torchcodec.decoders")
    with _explained(path):
        options = {"dimension_order": "NHWC", "num_ffmpeg_threads": num_threads}
        reader = decoders.VideoDecoder(str(storage.local_copy(path)), **options)
        num_frames, fps = int(reader.metadata.num_frames or 0), float(reader.metadata.average_fps or 0)
        return _ForeignClip(path, num_frames, fps, lambda frames: reader.get_frames_at(frames).data.numpy())


def _loaded(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # the last two: of libraries that it does not find
        name = module.partition(".")[0]
        raise ConfigError(f"{name} is installed, but cannot be loaded: {error} Use decoder=pyav.") from error


def _explained(path: StrPath) -> AbstractContextManager[None]:
    """Each decoder has errors of its own: any of them is about this file."""
    return raised_as(DataError, f"{path} is not a video that can be decoded", Exception)


# ---- what all decoders share -----------------------------------------------------------------------------------------


def _places(frames: Sequence[int], num_frames: int, path: StrPath) -> dict[int, list[int]]:
    """Places of each frame in the result, by ascending frame number."""
    if not len(frames):
        raise DataError(f"{path}: no frame is asked for.")
    places: dict[int, list[int]] = {}
    for frame, place in sorted((int(frame), place) for place, frame in enumerate(frames)):
        places.setdefault(frame, []).append(place)
    first, last = next(iter(places)), next(reversed(places))
    if first < 0 or last >= num_frames:
        raise DataError(f"{path} has {num_frames} frames (0 to {num_frames - 1}), but {first} to {last} are wanted.")
    return places


def _filled(pictures: Iterator[Planes], places: dict[int, list[int]], fit: Fit | None, path: StrPath) -> Tensor:
    """uint8 [3, F, H, W] of pictures that come in the order of ``places``.

    Its planes are filled picture by picture: to put the whole clip together first and to turn it then would take the
    memory twice, and longer than much of the decoding.
    """
    num_places = sum(map(len, places.values()))
    target: np.ndarray | None = None
    for (number, where), planes in zip(places.items(), pictures, strict=True):
        if fit is not None:
            planes = list(fit(torch.from_numpy(np.stack(planes))[:, None])[:, 0].numpy())
        height, width = planes[0].shape
        if target is None:  # NumPy asks for large pages, torch does not: a fifth of the time for 93 frames
            target = np.empty((3, num_places, height, width), np.uint8)
        if target.shape[-2:] != (height, width):
            before = "x".join(map(str, target.shape[-2:]))
            raise DataError(f"{path}: frame {number} has {height}x{width} pixels, those before it {before}.")
        for place in where:
            for channel, plane in enumerate(planes):
                target[channel, place] = plane
    assert target is not None, "places are never empty"
    return torch.from_numpy(target)
