# SPDX-License-Identifier: Apache-2.0
"""Clips as latents: encoded once by the model's tokenizer, so that training reads small files in place of videos.

    latents/latents.json          the tokenizer, the size, the frames: what all files have in common
    latents/NAME.safetensors      "latents" [windows, C, T, h, w] and "starts" of videos/NAME.mp4, a checksum of each

A latent frame depends on all pixel frames before it in its window, so the windows of a clip are chosen when they are
written and not in training; a sample is one of them. The first latent frames of a window are the latents of its first
frames, so a model of fewer frames can use them too. The record holds the tokenizer's latents of a small test clip:
training refuses latents of another tokenizer.
"""

import functools
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cosmos_predict2.data.clip_dataset import ClipDataset
from cosmos_predict2.data.video.media import opened_video
from cosmos_predict2.data.video_folder import OF_FOLDER, CaptionedFolder, existing_folder, list_captioned, require_files
from cosmos_predict2.interfaces import VideoTokenizer
from cosmos_predict2.tokenizers.sizes import latent_frames
from imaginaire import foreign_json
from imaginaire.data.facts import DataFacts
from imaginaire.errors import ConfigError, DataError
from imaginaire.findings import CheckContext, Finding, error, errors

FOLDER = "latents"
LATENTS_KEY = "latents"
PROBE_KEY = "latent_probe"
SUFFIX = ".safetensors"
RECORD = "latents.json"
CHECKSUMS = "crc32"  # of each window, in the header of its file
READING = "reading"  # of the pixels, in the same place: 2 reads the last columns of clips of any width
FILES = (FOLDER, (SUFFIX,), "latents")
NUM_LOOKED_INTO = 8  # clips, before the start; the others are when they are drawn
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


class ClipLatents:
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
        if self.checksums is not None and self.checksums[which] != checksum(latents, start, self.fps):
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


def checksum(latents: Tensor, start: int, fps: float) -> int:
    """CRC-32 of a window: its bytes, their form, its start and rate."""
    about = f"{latents.dtype} {list(latents.shape)} {start} {fps!r}"
    return zlib.crc32(latents.contiguous().view(torch.uint8).numpy().data, zlib.crc32(about.encode()))


class LatentDataset(ClipDataset):
    """The clips that have latents and a text embedding; an item is one of a clip's cached windows, drawn at random.

    Items have the keys of the clips' own data set, but ``latents`` float32 [C, T, h, w] in place of ``video``, and
    ``latent_probe``, which identifies the tokenizer. With ``num_frames`` below that of the cache an item is the
    beginning of a window. The draw is from NumPy's global generator, which the loader seeds per sample. The clips
    themselves need not be there; one that is must be the one that was encoded.
    """

    source: CaptionedFolder

    def __init__(
        self,
        dataset_dir: str,
        num_frames: int | None = None,
        *,
        skip_bad_samples: bool = False,
        most_bad_samples: int = 16,
        num_tokens: int = 512,
        text_encoder: str | None = None,
    ) -> None:
        self.dataset_dir, self.record = _opened(dataset_dir)
        if problem := _length_problem(num_frames, self.record):
            raise ConfigError(problem)
        self._probe = torch.tensor(self.record.probe)
        text: dict[str, Any] = dict(text_encoder=text_encoder, num_tokens=num_tokens)
        super().__init__(
            CaptionedFolder(dataset_dir, *FILES, skip_bad=skip_bad_samples, **text),
            num_frames or self.record.num_frames,
            self.record.size,
            sampling="random",
            skip_bad_samples=skip_bad_samples,
            most_bad_samples=most_bad_samples,
        )

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """Findings that need the latents of a few clips opened at most."""
        try:
            folder, record = _opened(arguments.get("dataset_dir", ""))
            yield from errors(context.key, [_length_problem(arguments.get("num_frames"), record)])
            text: dict[str, Any] = {name: arguments.get(name) for name in ("text_encoder", "num_tokens")}
            stems = list_captioned(folder, *FILES, **text).stems
            skip = arguments.get("skip_bad_samples", False)
            for stem in () if skip else stems[:: -(-len(stems) // NUM_LOOKED_INTO)]:
                with open_latents(folder / FOLDER / f"{stem}{SUFFIX}") as clip:
                    clip.require_video(folder / "videos")
        except DataError as problem:
            yield error(context.key, str(problem))

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        def rate() -> float:
            folder, _ = _opened(arguments["dataset_dir"])
            first = next(iter(require_files(folder / FOLDER, (SUFFIX,), FOLDER).values()))
            with open_latents(first) as clip:
                return clip.fps

        return DataFacts(kind=OF_FOLDER, has_actions=False, read_rate=rate)

    def _item(self, i: int) -> dict[str, Any]:
        path = self.source.path(i)
        with open_latents(path) as clip:
            video = clip.require_video(self.dataset_dir / "videos")
            latents, start = clip.window(int(numpy.random.randint(clip.num_windows)))
        if latents.shape[1] != (expected := latent_frames(self.record.num_frames)):
            raise DataError(
                f"{path} has windows of {latents.shape[1]} latent frames, but {RECORD} has"
                f" num_frames={self.record.num_frames}: {expected}. Delete {path.parent} and write the latents again."
            )
        item = self.described(i, start + numpy.arange(self.num_frames), self.record.size, clip.fps)
        item["video_name"] |= {"video_path": str(video), "start_frame": start}
        return {LATENTS_KEY: latents[:, : latent_frames(self.num_frames)], PROBE_KEY: self._probe, **item}


def _opened(dataset_dir: str) -> tuple[Path, LatentRecord]:
    how = f"Write them: python -m scripts.cache_latents --data {dataset_dir}"
    if not (Path(dataset_dir) / FOLDER).is_dir() and (Path(dataset_dir) / "videos").is_dir():
        raise DataError(f"{dataset_dir} has no folder {FOLDER}. {how}")
    folder = existing_folder(dataset_dir, FOLDER)
    record = read_record(folder / FOLDER)
    if record is None:
        raise DataError(f"{folder / FOLDER} has no record of its tokenizer. Delete it. {how}")
    return folder, record


def _length_problem(num_frames: int | None, record: LatentRecord) -> str | None:
    if num_frames is None or (1 <= num_frames <= record.num_frames and num_frames % 4 == 1):
        return None
    return (
        f"num_frames={num_frames}, but the cached latents are of windows of {record.num_frames} frames: use 1 + 4k,"
        f" {record.num_frames} at most, or cache longer windows."
    )
