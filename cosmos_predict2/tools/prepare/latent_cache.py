# SPDX-License-Identifier: Apache-2.0
"""Writes the cached latents of a folder's clips, which `LatentDataset` reads."""

import functools
import json
import logging
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from torch.utils.data import Dataset

from cosmos_predict2.data.dataset_latents import (
    CHECKSUMS,
    FOLDER,
    READING,
    RECORD,
    SUFFIX,
    LatentRecord,
    checksum,
    open_latents,
    probe,
    read_record,
)
from cosmos_predict2.data.samples import FrameRule
from cosmos_predict2.data.video import clips
from cosmos_predict2.data.video.media import VIDEO_SUFFIXES
from cosmos_predict2.data.video_folder import existing_folder, require_files
from cosmos_predict2.interfaces import VideoTokenizer
from cosmos_predict2.tokenizers.sizes import size_problem
from cosmos_predict2.tools.jobs import Outcome
from imaginaire import storage
from imaginaire.data.workers import load
from imaginaire.errors import ConfigError, DataError, UserError
from imaginaire.log import Progress

log = logging.getLogger(__name__)

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


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
    if dtype not in DTYPES or crop not in clips.CROPS:
        raise ConfigError(f"Latents are stored as {', '.join(DTYPES)}, clips scaled by {', '.join(clips.CROPS)}.")
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

    files = require_files(dataset_dir / "videos", VIDEO_SUFFIXES, "clips")
    videos = list(files.values())[shard[0] :: shard[1]]
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
        storage.write_text(folder / RECORD, json.dumps(asdict(record), indent=1))
    outcome: Outcome[str] = Outcome()
    windows = list(_windows(todo, rule, windows_per_clip, outcome))
    decoded = _Decoded(windows, functools.partial(clips.CROPS[crop], size=size), decoder)
    places = [[(i, i)] for i in range(len(windows))]
    reader = load(decoded, places, 0, "latents", {"num_workers": workers, "collate_fn": operator.itemgetter(0)})
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
        checksums = [checksum(each, start, window.fps) for each, start in zip(latents, starts, strict=True)]
        metadata = {"fps": repr(window.fps), "video": window.path.name, "video_bytes": str(window.path.stat().st_size)}
        metadata |= {CHECKSUMS: json.dumps(checksums), READING: "2"}
        content = save({"latents": torch.stack(latents), "starts": torch.tensor(starts)}, metadata)
        storage.write_bytes(folder / f"{window.stem}{SUFFIX}", content)
    return fault


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


def _is_done(path: Path, video: Path) -> bool:
    try:
        with open_latents(path) as latents:
            return latents.require_video(video.parent) == video
    except DataError:
        return False  # not there, damaged, or of another version of the clip
