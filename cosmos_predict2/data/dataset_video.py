# SPDX-License-Identifier: Apache-2.0
"""Training clips from a folder of videos with text embeddings."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor
from torch.utils.data import Dataset as MapDataset

from cosmos_predict2.data.bad_samples import BadSamples
from cosmos_predict2.data.caption_files import CaptionFiles
from cosmos_predict2.data.sizes import swapped_size
from cosmos_predict2.data.video import clips
from cosmos_predict2.data.video.media import VIDEO_SUFFIXES, probe_video
from cosmos_predict2.data.video_folder import (
    NO_ENCODER,
    VideoFolder,
    existing_folder,
    frame_item,
    media_by_stem,
    open_embeddings,
    size_problem,
    text_item,
    with_embedding,
)
from cosmos_predict2.data.windows import FrameRule
from imaginaire.errors import ConfigError, DataError, UserError, near
from imaginaire.training.model import Note


class Dataset(MapDataset[dict[str, Any]]):
    """One sample per clip: ``num_frames`` frames, drawn when it is asked for, scaled to ``video_size`` (height, width).

    fps, stride, sampling: which frames, see `FrameRule`; draws come from NumPy's global generator, which the loader
    seeds per sample. crop: ``stretch`` scales to the size whatever the shape, as the published training does;
    ``center`` keeps the shape and cuts off what is over (generation with the run's weights then treats its input
    alike). A bad clip is an error that names it, or with ``skip_bad_samples`` replaced by the next good one;
    `video_name` says which clip a sample is of.
    text_encoder: which one the embeddings must be of (None: any); ``none`` where the model encodes captions itself,
    metas/NAME.txt, or with caption_format ``json`` those of captions/NAME.json that are called ``prompt_type``.
    """

    data_kind = "a folder of clips or pictures"

    def __init__(
        self,
        dataset_dir: str,
        num_frames: int,
        video_size: Sequence[int],
        *,
        fps: float | None = None,
        stride: int = 1,
        sampling: str = "random",
        crop: str = "stretch",
        skip_bad_samples: bool = False,
        most_bad_samples: int = 16,
        decoder: str = "auto",
        num_threads: int = 1,
        num_tokens: int = 512,
        text_encoder: str | None = None,
        caption_format: str = "text",
        prompt_type: str = "long",
    ) -> None:
        if problem := size_problem("video_size", video_size) or _crop_problem(crop):
            raise ConfigError(problem)
        self.rule = FrameRule(num_frames=num_frames, fps=fps, stride=stride, sampling=sampling)
        self.video_size = (int(video_size[0]), int(video_size[1]))
        self.crop = crop
        self._decoder = clips.choose_decoder(decoder)
        self._num_threads = num_threads
        self._bad = BadSamples(skip_bad_samples, most_bad_samples)
        self.folder = VideoFolder(
            dataset_dir,
            rule=self.rule,
            skip_bad=skip_bad_samples,
            text_encoder=text_encoder,
            num_tokens=num_tokens,
            caption_format=caption_format,
            prompt_type=prompt_type,
        )

    @classmethod
    def preflight(
        cls,
        dataset_dir: str = "",
        num_frames: int = 1,
        video_size: Any = (16, 16),
        *,
        fps: float | None = None,
        stride: int = 1,
        sampling: str = "random",
        crop: str = "stretch",
        decoder: str = "auto",
        text_encoder: str | None = None,
        num_tokens: int | None = None,
        caption_format: str = "text",
        **_: Any,
    ) -> Iterator[str]:
        """What can be known to be wrong from the header of one clip."""
        yield from filter(None, (size_problem("video_size", video_size), _crop_problem(crop)))
        try:
            FrameRule(num_frames=num_frames, fps=fps, stride=stride, sampling=sampling)
        except ConfigError as error:
            yield str(error)
        try:
            clips.choose_decoder(decoder)
        except ConfigError as error:
            yield str(error)
        try:
            folder = existing_folder(dataset_dir, "videos")
            files = media_by_stem(folder / "videos", VIDEO_SUFFIXES)
            yield from _size_notes(folder / "videos" / next(iter(files.values())), video_size)
            if text_encoder != NO_ENCODER:
                embeddings = open_embeddings(folder, text_encoder, num_tokens)
                with_embedding(files, embeddings.stems(), embeddings.folder, "clips")
            if text_encoder == NO_ENCODER or caption_format != "text":
                CaptionFiles(folder, caption_format).of(files)
        except UserError as error:
            yield str(error)

    @classmethod
    def declared_rate(cls, dataset_dir: str = "", *, fps: float | None = None, stride: int = 1, **_: Any) -> float:
        """Frames per second of an item, told by the header of the first clip."""
        if fps is not None:
            return float(fps)
        place = existing_folder(dataset_dir, "videos") / "videos"
        return clips.probe(place / next(iter(media_by_stem(place, VIDEO_SUFFIXES).values())))[1] / stride

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._bad.read(index, len(self), self._item)

    def _item(self, index: int) -> dict[str, Any]:
        path = self.folder.video_path(index)
        video, fps = self._frames(path)
        found = self.folder.embedding(index)
        caption = self.folder.caption(index)
        return {
            "video": video,
            "video_name": {"video_path": str(path), "t5_embedding_path": found[2] if found else ""},
            **(text_item(*found[:2]) if found else {}),
            "fps": fps,
            "num_frames": self.rule.num_frames,
            **frame_item(self.video_size),
            **({} if caption is None else {"ai_caption": caption}),
        }

    def _frames(self, path: Path) -> tuple[Tensor, float]:
        """uint8 [3, num_frames, height, width] and the rate of these frames."""
        with clips.open_clip(path, decoder=self._decoder, num_threads=self._num_threads) as clip:
            try:
                frames = self.rule.choose(clip.num_frames, clip.fps, numpy.random.randint)
            except DataError as error:
                raise DataError(f"{path} has {error}") from error
            return clip.read(frames, self._fit), self.rule.item_fps(frames, clip.fps)

    def _fit(self, frames: Tensor) -> Tensor:
        return clips.CROPS[self.crop](frames, self.video_size)


def _size_notes(path: Path, video_size: Any) -> Iterator[Note]:
    """A word on a size across which the clips lie, told by the first of them."""
    try:
        found = probe_video(path)
        note = swapped_size("video_size", tuple(video_size), (found.height, found.width), str(path))
    except (DataError, TypeError, ValueError):
        return  # what is wrong with the clip or the size is said elsewhere
    if note is not None:
        yield Note(note)


def _crop_problem(crop: str) -> str | None:
    return None if crop in clips.CROPS else f"There is no crop '{crop}'.{near(crop, clips.CROPS)}"
