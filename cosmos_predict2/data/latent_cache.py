# SPDX-License-Identifier: Apache-2.0
"""Clips as latents: encoded once by the model's tokenizer, so that training reads small files in place of videos.

    latents/latents.json          the tokenizer, the size, the frames: what all files have in common
    latents/NAME.safetensors      "latents" [windows, C, T, h, w] and "starts" of videos/NAME.mp4, a checksum of each

A latent frame depends on all pixel frames before it in its window, so the windows of a clip are chosen here and not in
training; a sample is one of them. The first latent frames of a window are the latents of its first frames, so a model
of fewer frames can use them too. The record holds the tokenizer's latents of a small test clip: training refuses
latents of another tokenizer.
"""

import functools
import json
import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.utils.data import Dataset

from cosmos_predict2.data.jobs import Outcome
from cosmos_predict2.data.samples import FrameRule
from cosmos_predict2.data.sizes import size_problem
from cosmos_predict2.data.video import clips
from cosmos_predict2.data.video.clips import CROPS
from cosmos_predict2.data.video.media import VIDEO_SUFFIXES, opened_video
from cosmos_predict2.data.video_folder import existing_folder, media_by_stem
from cosmos_predict2.interfaces import VideoTokenizer
from imaginaire import foreign_json, storage
from imaginaire.data.workers import load
from imaginaire.errors import ConfigError, DataError, UserError
from imaginaire.progress import Progress

log = logging.getLogger(__name__)

FOLDER = "latents"
LATENTS_KEY = "latents"
PROBE_KEY = "latent_probe"
SUFFIX = ".safetensors"
RECORD = "latents.json"
CHECKSUMS = "crc32"  # of each window, in the header of its file
READING = "reading"  # of the pixels, in the same place: 2 reads the last columns of clips of any width
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_ALIKE = 0.05  # relative; the same weights in bfloat16 differ by less, other weights by about 1


@dataclass(frozen=True, kw_only=True)
class LatentRecord:
    """Settings that all latents of a folder share."""

    tokenizer: str  # class, for messages
    probe: list[float]  # its latents of the test clip
    num_frames: int
    size: tuple[int, int]
    windows_per_clip: int
    fps: float | None
    stride: int
    crop: str
    dtype: str

    def difference(self, other: "LatentRecord") -> str | None:
        """The first thing that keeps latents of the two apart, in words."""
        if not is_same_tokenizer(torch.tensor(self.probe), torch.tensor(other.probe)):
            return f"another tokenizer or other weights ({self.tokenizer}, now {other.tokenizer})"
        names = [field.name for field in fields(self) if field.name not in ("tokenizer", "probe")]
        mine, theirs = asdict(self), asdict(other)
        return next((f"{n}={mine[n]}, now {theirs[n]}" for n in names if mine[n] != theirs[n]), None)


@torch.no_grad()
def probe(tokenizer: VideoTokenizer) -> Tensor:
    """float32 [C * 2 * 2 * 2]: what a tokenizer makes of a fixed clip of 5 frames with 16 x 16 pixels."""
    frame, row, column = torch.meshgrid(*(torch.arange(float(n)) for n in (5, 16, 16)), indexing="ij")
    waves = [
        torch.sin(a * row + b * column + c * frame) for a, b, c in ((0.9, 0.2, 0.5), (0.3, 0.7, 1.1), (1.3, 1.1, 0))
    ]
    return tokenizer.encode(torch.stack(waves)[None]).float().flatten().cpu()


def is_same_tokenizer(a: Tensor, b: Tensor) -> bool:
    """True for two probes of the same weights, to the rounding of half precision."""
    return a.shape == b.shape and float((a - b).norm()) <= _ALIKE * float(a.norm())


def check_tokenizer(tokenizer: VideoTokenizer, batch: Mapping[str, Any]) -> None:
    """Raise unless the cached latents of a batch are what this tokenizer would make."""
    if PROBE_KEY not in batch:
        raise DataError(f"The batch has '{LATENTS_KEY}' without '{PROBE_KEY}', which identifies their tokenizer.")
    if not all(is_same_tokenizer(own, probe(tokenizer)) for own in batch[PROBE_KEY].cpu()):
        raise DataError(
            f"The cached latents of this batch are not those of the model's tokenizer ({type(tokenizer).__name__}, or"
            f" its weights). Delete the data set's {FOLDER}/ and write them with this one: python -m"
            " scripts.cache_latents."
        )


def read_record(folder: Path) -> LatentRecord | None:
    """The record of a folder of latents; None where there is none."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        content = foreign_json.load(path)
        return LatentRecord(**{**content, "size": tuple(content["size"])})
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}). Delete {folder} and write the latents again.") from error


def window_starts(num_starts: int, count: int) -> list[int]:
    """``count`` starts from 0 to ``num_starts`` - 1, evenly apart (one: the middle); all, if there are fewer."""
    if count >= num_starts:
        return list(range(num_starts))
    if count == 1:
        return [(num_starts - 1) // 2]
    return [round(i * (num_starts - 1) / (count - 1)) for i in range(count)]


@dataclass(frozen=True, slots=True)
class _Window:
    stem: str
    path: Path
    start: int
    frames: tuple[int, ...]
    fps: float


def cache_latents(
    dataset_dir: Path | str,
    tokenizer: VideoTokenizer,
    *,
    num_frames: int,
    size: tuple[int, int],
    windows_per_clip: int = 4,
    fps: float | None = None,
    stride: int = 1,
    crop: str = "stretch",
    dtype: str = "float16",
    decoder: str = "auto",
    shard: tuple[int, int] = (0, 1),
    workers: int = 0,
    device: torch.device | str = "cpu",
    dry_run: bool = False,
) -> Outcome[str]:
    """Write the latents of every clip that has none yet; the stems of those written, and what failed.

    ``workers`` processes decode ahead of the tokenizer. ``shard`` (i, n) does every n-th clip from the i-th on, for n
    processes at a time.
    """
    if windows_per_clip < 1 or not 0 <= shard[0] < shard[1]:
        raise ConfigError(f"windows_per_clip={windows_per_clip} and shard={shard}: need at least 1, and i of n.")
    if dtype not in DTYPES or crop not in CROPS:
        raise ConfigError(f"Latents are stored as {', '.join(DTYPES)}, clips scaled by {', '.join(CROPS)}.")
    if problem := size_problem("size", size):
        raise ConfigError(problem)
    rule = FrameRule(num_frames=num_frames, fps=fps, stride=stride, sampling="first")
    decoder = clips.choose_decoder(decoder)
    dataset_dir = existing_folder(dataset_dir, "videos")
    folder = dataset_dir / FOLDER
    tokenizer.to(device)
    record = LatentRecord(
        tokenizer=type(tokenizer).__name__,
        probe=[round(x, 6) for x in probe(tokenizer).tolist()],
        num_frames=num_frames,
        size=size,
        windows_per_clip=windows_per_clip,
        fps=fps,
        stride=stride,
        crop=crop,
        dtype=dtype,
    )
    num_latent_frames = tokenizer.get_latent_num_frames(num_frames)
    if (known := read_record(folder)) is not None and (found := known.difference(record)) is not None:
        raise DataError(f"{folder} holds latents with {found}. Delete the folder, or ask for the same.")

    files = media_by_stem(dataset_dir / "videos", VIDEO_SUFFIXES)
    videos = [dataset_dir / "videos" / name for name in files.values()][shard[0] :: shard[1]]
    todo = [path for path in videos if not _is_done(folder / f"{path.stem}{SUFFIX}", path)]
    log.info("latents: %d of %d clips are to be encoded", len(todo), len(videos))
    if dry_run or not todo:
        return Outcome()
    factor = tokenizer.spatial_compression_factor
    each = tokenizer.latent_ch * num_latent_frames * math.prod(side // factor for side in size)
    needed = each * DTYPES[dtype].itemsize * windows_per_clip * len(todo)
    storage.require_space(dataset_dir, needed, f"the latents of {len(todo)} clips")
    storage.makedirs(folder)
    storage.remove_stale_temporaries(folder)
    if known is None:
        content = json.dumps(asdict(record), indent=1).encode()
        storage.write_atomically(folder / RECORD, lambda file: file.write(content))
    outcome: Outcome[str] = Outcome()
    windows = list(_windows(todo, rule, windows_per_clip, outcome))
    decoded = _Decoded(windows, functools.partial(CROPS[crop], size=size), decoder)
    places = [[(i, i)] for i in range(len(windows))]
    reader = load(decoded, places, 0, "latents", {"num_workers": workers, "collate_fn": _only})
    pairs = groupby(zip(windows, reader, strict=True), key=lambda pair: pair[0].stem)
    with Progress("latents", len(todo), unit="clip", done=len(outcome.faults)) as bar:
        for stem, windows_of_clip in pairs:
            if (fault := _write_clip(folder, windows_of_clip, tokenizer, DTYPES[dtype], device)) is None:
                outcome.results.append(stem)
            else:
                outcome.faults.append(fault)
            bar.update()
    return outcome


@torch.no_grad()
def _write_clip(
    folder: Path,
    pairs: Iterable[tuple[_Window, Tensor | str]],
    tokenizer: VideoTokenizer,
    dtype: torch.dtype,
    device: torch.device | str,
) -> str | None:
    """Encode and write one clip from its windows with their frames; the first fault instead, if there is one."""
    latents: list[Tensor] = []
    starts: list[int] = []
    fault = window = None
    for window, frames in pairs:
        if isinstance(frames, str):
            fault = fault or frames
        elif fault is None:
            pixels = frames[None].to(device).float() / 127.5 - 1
            latents.append(tokenizer.encode(pixels)[0].cpu().to(dtype))
            starts.append(window.start)
    if fault is None and window is not None:
        _write(folder, window, torch.stack(latents), starts)
    return fault


class ClipLatents:
    """The open latents of one clip."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        metadata = file.metadata()
        self.fps = float(metadata["fps"])
        self._video, self._video_bytes = metadata["video"], int(metadata["video_bytes"])
        self.checksums = foreign_json.loads(metadata.get(CHECKSUMS, "null"))  # none in caches of earlier versions
        self.reads_any_width = int(metadata.get(READING, 1)) >= 2
        self.num_windows = int(file.get_slice("latents").get_shape()[0])
        if self.num_windows < 1:
            raise ValueError("no window")

    def window(self, which: int) -> tuple[Tensor, int]:
        """float32 [C, T, h, w], and its first frame in the clip; an error where they are not what was written."""
        latents, start = self._file.get_slice("latents")[which], int(self._file.get_tensor("starts")[which])
        if self.checksums is not None and self.checksums[which] != _checksum(latents, start, self.fps):
            raise DataError(
                f"{self._path} is damaged: window {which} is not what was written. Delete it and encode it again:"
                " python -m scripts.cache_latents."
            )
        return latents.float(), start

    def require_video(self, folder: Path) -> Path:
        """The clip that this was made from; an error if another lies in its place. It may have been removed."""
        video = folder / self._video
        if video.is_file() and video.stat().st_size != self._video_bytes:
            raise DataError(
                f"{self._path} was made from a video of {self._video_bytes} bytes, but {video} has"
                f" {video.stat().st_size}: it has changed. Encode it again: python -m scripts.cache_latents."
            )
        if not self.reads_any_width and video.is_file() and _has_lost_columns(video):
            raise DataError(
                f"{self._path} was made by an earlier version, which read wrong pixels in the last columns of clips"
                f" whose width is no multiple of 16, as of {video}. Run the command that made these latents once more,"
                " python -m scripts.cache_latents: it encodes such clips again and keeps the others."
            )
        return video


@contextmanager
def open_latents(path: Path) -> Iterator[ClipLatents]:
    """The latents of a clip, of which a window is read without the others."""
    try:
        with safe_open(path, "pt") as file:
            yield ClipLatents(path, file)
    except DataError:
        raise
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"{path} cannot be read as latents ({error}). Delete it and encode it again.") from error


@functools.cache
def _has_lost_columns(video: Path) -> bool:
    """True if the first reading of pixels left the last columns of a clip unwritten; of odd sizes it did not."""
    with opened_video(video) as container:
        stream = container.streams.video[0]
        return stream.height % 2 == stream.width % 2 == 0 and stream.width % 16 != 0


def _only(samples: list[Any]) -> Any:
    return samples[0]


def _windows(videos: Sequence[Path], rule: FrameRule, each: int, outcome: Outcome[str]) -> Iterator[_Window]:
    """The windows of all clips, clip by clip; clips that are too short or cannot be opened become faults."""
    for path in videos:
        try:
            total, native = clips.probe(path)
            if total < rule.frames_needed(native):
                raise DataError(f"{path} has {total} frames, but {rule.in_words(native)}.")
        except UserError as error:
            outcome.faults.append(str(error))
            continue
        offsets = rule.choose(total, native, lambda n: 0)
        for start in window_starts(total - rule.frames_needed(native) + 1, each):
            frames = tuple(start + offset for offset in offsets)
            yield _Window(path.stem, path, start, frames, rule.item_fps(offsets, native))


class _Decoded(Dataset[Any]):
    """uint8 [3, F, H, W] of each window, or a sentence on why there is none."""

    def __init__(self, windows: Sequence[_Window], fit: clips.Fit, decoder: str) -> None:
        self._windows = windows
        self._fit = fit
        self._decoder = decoder

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Tensor | str:
        window = self._windows[index]
        try:
            return clips.read_frames(window.path, window.frames, decoder=self._decoder, fit=self._fit)
        except UserError as error:
            return str(error)


def _write(folder: Path, window: _Window, latents: Tensor, starts: Sequence[int]) -> None:
    tensors = {"latents": latents.contiguous(), "starts": torch.tensor(starts)}
    metadata = {"fps": repr(window.fps), "video": window.path.name, "video_bytes": str(window.path.stat().st_size)}
    checksums = [_checksum(each, start, window.fps) for each, start in zip(latents, starts, strict=True)]
    metadata |= {CHECKSUMS: json.dumps(checksums), READING: "2"}
    content = save(tensors, metadata)
    storage.write_atomically(folder / f"{window.stem}{SUFFIX}", lambda file: file.write(content))


def _checksum(latents: Tensor, start: int, fps: float) -> int:
    """CRC-32 of a window: its bytes, their form, its start and rate."""
    about = f"{latents.dtype} {list(latents.shape)} {start} {fps!r}"
    return zlib.crc32(latents.contiguous().view(torch.uint8).numpy().data, zlib.crc32(about.encode()))


def _is_done(path: Path, video: Path) -> bool:
    try:
        with open_latents(path) as latents:
            return latents.require_video(video.parent) == video
    except DataError:
        return False  # not there, damaged, or of another version of the clip
