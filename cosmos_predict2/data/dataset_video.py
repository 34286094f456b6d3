# SPDX-License-Identifier: Apache-2.0
"""Training clips from a folder of videos with text embeddings."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor
from torch.utils.data import Dataset as MapDataset

from cosmos_predict2.data.samples import BadSamples, FrameRule, frame_item
from cosmos_predict2.data.sizes import size_problem, swapped_size
from cosmos_predict2.data.video import clips
from cosmos_predict2.data.video.media import VIDEO_SUFFIXES, probe_video
from cosmos_predict2.data.video_folder import (
    CaptionedFolder,
    existing_folder,
    list_captioned,
    media_by_stem,
)
from imaginaire.errors import ConfigError, DataError, UserError, near
from imaginaire.findings import CheckContext, Finding, error, errors, warning


class Dataset(MapDataset[dict[str, Any]]):
    """One sample per clip: ``num_frames`` frames, drawn when it is asked for, scaled to ``video_size`` (height, width).

    fps, stride, sampling: which frames, see `FrameRule`; draws come from NumPy's global generator, which the loader
    seeds per sample. crop: ``stretch`` scales to the size whatever the shape, as the published training does;
    ``center`` keeps the shape and cuts off what is over (generation with the run's weights then treats its input
    alike). A bad clip is an error that names it, or with ``skip_bad_samples`` replaced by the next good one;
    `video_name` names the clip.
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
        self.folder = CaptionedFolder(
            dataset_dir,
            rule=self.rule,
            skip_bad=skip_bad_samples,
            text_encoder=text_encoder,
            num_tokens=num_tokens,
            caption_format=caption_format,
            prompt_type=prompt_type,
        )

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """What can be known to be wrong from the header of one clip."""
        size, key = arguments.get("video_size", (16, 16)), context.key
        crop = arguments.get("crop", "stretch")
        yield from errors(key, (size_problem("video_size", size), _crop_problem(crop)))
        names = ("num_frames", "fps", "stride", "sampling")
        try:
            FrameRule(**{"num_frames": 1} | {name: arguments[name] for name in names if name in arguments})
        except ConfigError as problem:
            yield error(key, str(problem))
        try:
            clips.choose_decoder(arguments.get("decoder", "auto"))
        except ConfigError as problem:
            yield error(key, str(problem))
        text: dict[str, Any] = {name: arguments.get(name) for name in ("text_encoder", "num_tokens")}
        try:
            form = arguments.get("caption_format", "text")
            found = list_captioned(arguments.get("dataset_dir", ""), **text, caption_format=form)
            if note := _size_note(found.folder / next(iter(found.files.values())), size):
                yield warning(key, note)
        except UserError as problem:
            yield error(key, str(problem))

    @classmethod
    def declared_rate(cls, dataset_dir: str = "", *, fps: float | None = None, stride: int = 1, **_: Any) -> float:
        """Frames per second of an item, by the header of the first clip."""
        if fps is not None:
            return float(fps)
        place = existing_folder(dataset_dir, "videos") / "videos"
        return clips.probe(place / next(iter(media_by_stem(place, VIDEO_SUFFIXES).values())))[1] / stride

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._bad.read(index, len(self), self._item)

    def _item(self, index: int) -> dict[str, Any]:
        path = self.folder.path(index)
        video, fps = self._frames(path)
        text, embedding_path = self.folder.text(index)
        return {
            "video": video,
            "video_name": {"video_path": str(path), "t5_embedding_path": embedding_path},
            **text,
            "fps": fps,
            "num_frames": self.rule.num_frames,
            **frame_item(self.video_size),
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


def _size_note(path: Path, video_size: Any) -> str | None:
    """What is odd about a size whose sides are swapped, compared with the first clip's."""
    try:
        found = probe_video(path)
        return swapped_size("video_size", tuple(video_size), (found.height, found.width), str(path))
    except (DataError, TypeError, ValueError):
        return None  # the faults of clip and size have findings of their own


def _crop_problem(crop: str) -> str | None:
    return None if crop in clips.CROPS else f"There is no crop '{crop}'.{near(crop, clips.CROPS)}"
