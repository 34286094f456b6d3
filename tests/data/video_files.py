# SPDX-License-Identifier: Apache-2.0
"""Small videos with the structures that make seeking hard, and folders of them."""

from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch

from cosmos_predict2.data.video import media
from cosmos_predict2.text.embeddings import pickles

TICKS = 600  # per second


def moving_pictures(num_frames: int, height: int = 32, width: int = 48) -> np.ndarray:
    """uint8 [F, H, W, 3]: a bright bar moves over a slow gradient, so that every frame differs from every other."""
    x, y = np.arange(width), np.arange(height)[:, None]
    frames = []
    for i in range(num_frames):
        bar = 150 * np.exp(-(((x - (i * 1.7) % width) / 3) ** 2))
        frames.append(np.stack([np.broadcast_to(bar, (height, width)), y * 2 + 0 * x + i % 50, x + 0 * y], -1))
    return np.clip(np.stack(frames), 0, 255).astype(np.uint8)


def write_stream(
    path: Path,
    num_frames: int = 40,
    *,
    codec: str = "libx264",
    options: Mapping[str, str] | None = None,
    times: Any = None,
    rate: int = 20,
    rotation: int = 0,
    size: tuple[int, int] = (32, 48),
    pictures: np.ndarray | None = None,
    container_options: Mapping[str, str] | None = None,
) -> None:
    """A video of one stream. ``times``: when each frame is shown, in 1/600 s."""
    times = [i * TICKS // rate for i in range(num_frames)] if times is None else times
    pictures = moving_pictures(num_frames, *size) if pictures is None else pictures
    with av.open(str(path), "w", options=dict(container_options or {})) as container:
        stream = container.add_stream(codec, rate=rate, options=dict(options or {}))
        stream.height, stream.width = pictures.shape[1:3]
        stream.pix_fmt = "yuv420p" if codec != "mjpeg" else "yuvj420p"
        stream.codec_context.time_base = Fraction(1, TICKS)
        if rotation:
            stream.set_display_rotation(rotation)
        for picture, time in zip(pictures, times, strict=True):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, TICKS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def remux(
    source: Path,
    target: Path,
    *,
    shift: int = 0,
    options: Mapping[str, str] | None = None,
    first: int = 0,
    without_times: bool = False,
) -> None:
    """The same packets in another file, ``shift`` frames later, from packet ``first`` on."""
    with av.open(str(source)) as old, av.open(str(target), "w", options=dict(options or {})) as new:
        stream = old.streams.video[0]
        copy = new.add_stream_from_template(stream)
        ticks = round(shift / stream.average_rate / stream.time_base)
        for i, packet in enumerate(old.demux(stream)):
            if packet.dts is None or i < first:
                continue
            shown = packet.dts if without_times else packet.pts
            packet.pts, packet.dts, packet.stream = shown + ticks, packet.dts + ticks, copy
            new.mux(packet)


def same(a: Any, b: Any) -> bool:
    """True for equal samples, or entries of samples."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def all_frames(path: Path) -> torch.Tensor:
    """uint8 [3, F, H, W]: what a plain decoding of the whole file shows."""
    return media.read_video(path)[0]


def write_clip(path: Path, num_frames: int = 20, *, size: tuple[int, int] = (32, 48), rate: int = 20) -> None:
    """A clip with three keyframes or so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_stream(path, num_frames, options={"g": "8"}, size=size, rate=rate)


def write_embeddings(folder: Path, stems: Iterable[str], num_tokens: int = 7, width: int = 24) -> None:
    """An embedding [num_tokens, width] per stem, each of other numbers, in the published form."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, stem in enumerate(stems):
        numbers = torch.arange(1, num_tokens * width + 1).reshape(num_tokens, width) / 64 + i
        pickles.write(folder / f"{stem}.pickle", numbers)


def video_folder(folder: Path, lengths: Mapping[str, int], *, captions: bool = True, **options: Any) -> Path:
    """A folder of clips so many frames long, with embeddings and captions."""
    for stem, num_frames in lengths.items():
        write_clip(folder / "videos" / f"{stem}.mp4", num_frames, **options)
    write_embeddings(folder / "t5_xxl", lengths)
    if captions:
        (folder / "metas").mkdir()
        for stem in lengths:
            (folder / "metas" / f"{stem}.txt").write_text(f"what {stem} shows\n")
    return folder
