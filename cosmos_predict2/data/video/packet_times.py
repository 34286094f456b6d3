# SPDX-License-Identifier: Apache-2.0
"""Which frames a video file has and when each is shown, read from its packets without decoding one."""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cosmos_predict2.data.video import media
from imaginaire import storage
from imaginaire.errors import DataError
from imaginaire.storage.object_store import StrPath

# FFmpeg's names of the containers that state when a frame is shown; mp4 and webm are of them.
TIMED_CONTAINERS = ("mov", "matroska")
WITHOUT_A_FRAME = ("vp8",)  # codecs with packets that show nothing
TELL_WHO_NEEDS_THEM = ("h264",)  # codecs whose frames say whether another is made from them
MOST_TABLES = 32  # clips whose packet times are kept: for data sets of a few long clips


@dataclass(frozen=True, slots=True)
class PacketTable:
    """Times at which frames are shown, in order, and those of the keyframes among them."""

    times: np.ndarray
    keys: np.ndarray
    num_frames: int
    is_exact: bool  # the i-th time is that of the i-th frame
    may_skip: bool  # the decoder knows which frames no other needs, and the times are beyond doubt


_tables: OrderedDict[tuple[str, int, int], PacketTable] = OrderedDict()


def packet_table(path: StrPath, container: Any) -> PacketTable:
    """The clip's packet times; they are kept for the clips that were read last."""
    local = storage.local_copy(path)
    status = local.stat()
    key = (str(local), status.st_size, status.st_mtime_ns)
    table = _tables.get(key)
    if table is None:
        table = _tables[key] = _read_table(path, container)
        while len(_tables) > MOST_TABLES:
            _tables.popitem(last=False)
    _tables.move_to_end(key)
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
    return PacketTable(
        ordered, ordered_keys, num_frames, is_exact, codec.name in TELL_WHO_NEEDS_THEM and not is_doubtful
    )


def num_frames_by_header(container: Any, stream: Any) -> int | None:
    """Frames that will be shown, where the header lists all of them."""
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
