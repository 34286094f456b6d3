# SPDX-License-Identifier: Apache-2.0
"""Training samples from a folder of cached latents: those of the folder's clips, without a clip being decoded."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from cosmos_predict2.data.clip_dataset import ClipDataset
from cosmos_predict2.data.latent_cache import (
    FOLDER,
    LATENTS_KEY,
    PROBE_KEY,
    RECORD,
    SUFFIX,
    LatentRecord,
    open_latents,
    read_record,
)
from cosmos_predict2.data.sizes import latent_frames
from cosmos_predict2.data.video_folder import (
    OF_FOLDER,
    CaptionedFolder,
    existing_folder,
    list_captioned,
    media_by_stem,
)
from imaginaire.data.facts import DataFacts
from imaginaire.errors import ConfigError, DataError
from imaginaire.findings import CheckContext, Finding, error, errors

FILES = (FOLDER, (SUFFIX,), "latents")
NUM_LOOKED_INTO = 8  # clips, before the start; the others are when they are drawn


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
            first = next(iter(media_by_stem(folder / FOLDER, (SUFFIX,)).values()))
            with open_latents(folder / FOLDER / first) as clip:
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
    """Problem of the requested length, if any."""
    if num_frames is None or (1 <= num_frames <= record.num_frames and num_frames % 4 == 1):
        return None
    return (
        f"num_frames={num_frames}, but the cached latents are of windows of {record.num_frames} frames: use 1 + 4k,"
        f" {record.num_frames} at most, or cache longer windows."
    )
