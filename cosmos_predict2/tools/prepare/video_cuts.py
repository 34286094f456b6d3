# SPDX-License-Identifier: Apache-2.0
"""A piece of a video as a file of its own, without encoding it again where its frames stand alone."""

import io
from pathlib import Path
from typing import Any

import numpy

from cosmos_predict2.data.video.clips import packet_table
from cosmos_predict2.data.video.media import opened_video
from imaginaire import storage


def copy_cut(source: Path, target: Path, first: int, count: int) -> bool:
    """Write frames ``first`` ... ``first + count - 1`` of ``source`` as they are; False where that cannot be done.

    It can where the first of them is a keyframe and their packets are together in the file, as in videos that were put
    together from shorter ones. A target in the way is replaced, and appears complete or not at all.
    """
    with opened_video(source) as container:
        table = packet_table(source, container)
        if not table.is_exact or not 0 <= first < first + count <= table.num_frames:
            return False
        times = table.times[first : first + count]
        if times[0] not in table.keys:
            return False
        packets = _packets(container, times)
        if packets is None:
            return False
        content = _written(container.streams.video[0], packets, int(times[0]))
    if content is None:
        return False
    storage.write_atomically(target, lambda file: file.write(content))
    return True


def _packets(container: Any, times: numpy.ndarray) -> list[Any] | None:
    """The packets of frames shown at these times, in the order of the file; None where others are among them."""
    stream = container.streams.video[0]
    wanted = {int(time) for time in times}
    container.seek(int(times[0]), stream=stream, backward=True)
    packets: list[Any] = []
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if not packets and packet.pts != times[0]:
            continue  # a seek may end before its keyframe
        if packet.pts not in wanted:
            return None
        packets.append(packet)
        wanted.remove(packet.pts)
        if not wanted:
            return packets
    return None


def _written(stream: Any, packets: list[Any], start: int) -> memoryview | None:
    """An mp4 with these packets, the first of which is shown at once; None for codecs that an mp4 cannot hold."""
    import av

    content = io.BytesIO()
    try:
        with av.open(content, "w", format="mp4") as container:
            # opaque: without an encoder for it, which there need not be
            copy = container.add_stream_from_template(stream, opaque=True)
            for packet in packets:
                packet.pts -= start
                packet.dts = packet.dts - start if packet.dts is not None else None
                packet.stream = copy
                container.mux(packet)
    except (av.FFmpegError, ValueError):
        return None
    return content.getbuffer()
