# SPDX-License-Identifier: Apache-2.0
"""Reading training clips: bare PyAV, bare decord where it is installed, and ours, from the same files in turns.

    python -m benchmarks.data [--quick]

Prints clips per second and processor seconds per clip, for 93 and for 13 frames, one thread each. "Bare" is the least
code that gives the frames as RGB: open, seek to the keyframe before, decode, convert. The data set adds the choice of
frames, the planes in the order that networks take, embedding, mask and the rest of a sample; with another size than
the file's it also scales, which is compared with bare decoding and the same scaling.
"""

import statistics
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import machine
from cosmos_predict2.data.dataset_video import Dataset
from cosmos_predict2.data.video import media
from cosmos_predict2.data.video.clips import read_frames, stretch
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.encode import embed_captions

CLIP_FRAMES = 150  # 5 s at 30 frames per second, as AgiBot clips are cut
SIZE = (480, 640)
OTHER_SIZE = (432, 768)


def main() -> None:
    arguments = machine.parser(__doc__, "quick").parse_args()
    num_clips, turns = (2, 2) if arguments.quick else (8, 5)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        paths = make_clips(folder, num_clips)
        print(f"{num_clips} clips of {CLIP_FRAMES} frames, {SIZE[0]}x{SIZE[1]}, H.264; one thread; {turns} turns")
        for num_frames in (93, 13):
            compare(folder, paths, num_frames, turns)


def compare(folder: Path, paths: list[Path], num_frames: int, turns: int) -> None:
    """Print a table of all readers for clips of so many frames from the middle of each file, against bare PyAV."""
    start = (CLIP_FRAMES - num_frames) // 2
    frames = range(start, start + num_frames)
    same = Dataset(str(folder), num_frames, SIZE, sampling="center")
    other = Dataset(str(folder), num_frames, OTHER_SIZE, sampling="center")
    readers: dict[str, Callable[[int], Any]] = {
        "PyAV, bare": lambda i: bare_pyav(paths[i], start, num_frames),
        "ours, frames": lambda i: read_frames(paths[i], frames),
        "ours, data set": lambda i: same[i]["video"],
        "PyAV, bare, then scaled": lambda i: stretch(bare_pyav(paths[i], start, num_frames), OTHER_SIZE),
        "ours, data set, scaled": lambda i: other[i]["video"],
    }
    if find_spec("decord") is not None:
        readers["decord, bare"] = lambda i: bare_decord(paths[i], frames)
    for i in range(len(paths)):
        expected = readers["PyAV, bare"](i)
        for name in ("ours, frames", "ours, data set"):
            if not torch.equal(readers[name](i), expected):
                raise SystemExit(f"{name} gives other frames than PyAV")
        if not torch.equal(readers["ours, data set, scaled"](i), readers["PyAV, bare, then scaled"](i)):
            raise SystemExit("the data set scales other frames than PyAV gives")
    passes = {name: lambda read=read: [read(i) for i in range(len(paths))] for name, read in readers.items()}
    found = machine.in_turns(passes, turns, warm_up=0)
    print(f"\n{num_frames} frames: clips/s, processor ms per clip (median of the turns), against bare PyAV")
    for name in readers:
        base = "PyAV, bare, then scaled" if "scaled" in name else "PyAV, bare"
        ratio = found.ratio(name, base, of_core=True)
        rate, core = len(paths) / found.median(name), statistics.median(found.core[name]) / len(paths)
        print(f"  {name:24} {rate:7.2f} {1000 * core:9.1f}   {ratio:5.2f} times {base}", flush=True)


def bare_pyav(path: Path, start: int, num_frames: int) -> Tensor:
    """uint8 [3, F, H, W]: a view, so that turning the axes costs nothing."""
    import av

    pixels = []
    # PyAV 17 and later convert with a thread per core by default
    options = {"threads": 1} if int(av.__version__.split(".")[0]) >= 17 else {}
    convert = av.video.reformatter.VideoReformatter().reformat
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        first = round(start / stream.average_rate / stream.time_base)
        container.seek(first, stream=stream)
        for frame in container.decode(stream):
            if frame.pts >= first:
                pixels.append(convert(frame, format="rgb24", **options).to_ndarray())
            if len(pixels) == num_frames:
                break
    return torch.from_numpy(np.stack(pixels)).permute(3, 0, 1, 2)


def bare_decord(path: Path, frames: range) -> Tensor:
    import decord

    reader = decord.VideoReader(str(path), num_threads=1)
    pixels = reader.get_batch(list(frames)).asnumpy()
    reader.seek(0)
    return torch.from_numpy(pixels).permute(3, 0, 1, 2)


def make_clips(folder: Path, num_clips: int) -> list[Path]:
    """A folder of videos with embeddings."""
    paths = [folder / "videos" / f"clip_{k:03d}.mp4" for k in range(num_clips)]
    draws = np.random.default_rng(0)
    for path in paths:
        media.write_video(path, panning(draws), 30)
    captions = {path.stem: f"a camera pans over picture {k}" for k, path in enumerate(paths)}
    embed_captions(folder / "t5_xxl", captions, BytesEncoder())
    return paths


def panning(draws: np.random.Generator) -> Tensor:
    """A textured picture that moves past, with camera noise: about as hard to code as a real clip."""
    height, width = SIZE
    coarse = torch.from_numpy(draws.random((1, 3, 40, 60), np.float32))
    fine = torch.from_numpy(draws.random((1, 3, 200, 300), np.float32))
    tall, wide = height + CLIP_FRAMES, width + 2 * CLIP_FRAMES
    parts = [torch.nn.functional.interpolate(x, (tall, wide), mode="bicubic")[0] for x in (coarse, fine)]
    picture = ((parts[0] + parts[1]) * 110 + 15).clamp(0, 255)
    video = torch.empty(3, CLIP_FRAMES, height, width, dtype=torch.uint8)
    for f in range(CLIP_FRAMES):
        window = picture[:, f : f + height, 2 * f : 2 * f + width]
        noise = torch.from_numpy(draws.normal(0, 2, (3, height, width)).astype(np.float32))
        video[:, f] = (window + noise).clamp(0, 255).to(torch.uint8)
    return video


if __name__ == "__main__":
    main()
