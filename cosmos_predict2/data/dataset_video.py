# SPDX-License-Identifier: Apache-2.0
"""Training clips from a folder of videos with text embeddings."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cosmos_predict2.data.clip_dataset import ClipDataset, clip_problems
from cosmos_predict2.data.samples import FrameRule
from cosmos_predict2.data.video import clips
from cosmos_predict2.data.video.media import VIDEO_SUFFIXES, probe_video
from cosmos_predict2.data.video_folder import OF_FOLDER, CaptionedFolder, existing_folder, list_captioned, require_files
from cosmos_predict2.tokenizers.sizes import swapped_size
from imaginaire.data.facts import DataFacts
from imaginaire.errors import ConfigError, DataError, UserError
from imaginaire.findings import CheckContext, Finding, error, errors, warning


class Dataset(ClipDataset):
    """One sample per clip: ``num_frames`` frames, drawn when it is asked for, scaled to ``video_size`` (height, width).

    fps, stride, sampling, crop: which frames, and how they are scaled, see `FrameRule` and `ClipDataset`. A bad clip is
    an error that names it, or with ``skip_bad_samples`` replaced by the next good one; `video_name` names the clip.
    text_encoder: which one the embeddings must be of (None: any); ``none`` where the model encodes captions itself,
    metas/NAME.txt, or with caption_format ``json`` those of captions/NAME.json that are called ``prompt_type``.
    """

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
        if problem := next(clip_problems(dict(video_size=video_size, crop=crop)), None):
            raise ConfigError(problem)
        source = CaptionedFolder(
            dataset_dir,
            rule=FrameRule(num_frames=num_frames, fps=fps, stride=stride, sampling=sampling),
            skip_bad=skip_bad_samples,
            text_encoder=text_encoder,
            num_tokens=num_tokens,
            caption_format=caption_format,
            prompt_type=prompt_type,
            decoder=clips.choose_decoder(decoder),
            num_threads=num_threads,
        )
        super().__init__(
            source,
            num_frames,
            video_size,
            sampling=sampling,
            stride=stride,
            frame_rate=fps,
            crop=crop,
            skip_bad_samples=skip_bad_samples,
            most_bad_samples=most_bad_samples,
        )

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """Findings that need the header of one clip at most."""
        size, key = arguments.get("video_size", (16, 16)), context.key
        yield from errors(key, clip_problems(arguments))
        text: dict[str, Any] = {name: arguments.get(name) for name in ("text_encoder", "num_tokens")}
        try:
            form = arguments.get("caption_format", "text")
            found = list_captioned(arguments.get("dataset_dir", ""), **text, caption_format=form)
            if note := _size_note(next(iter(found.files.values())), size):
                yield warning(key, note)
        except UserError as problem:
            yield error(key, str(problem))

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        def rate() -> float:
            if (fps := arguments.get("fps")) is not None:
                return float(fps)
            place = existing_folder(arguments["dataset_dir"], "videos") / "videos"
            first = next(iter(require_files(place, VIDEO_SUFFIXES, "clips").values()))
            return clips.probe(first)[1] / int(arguments.get("stride", 1))

        return DataFacts(kind=OF_FOLDER, has_actions=False, read_rate=rate)


def _size_note(path: Path, video_size: Any) -> str | None:
    """A note about a size with swapped sides, compared with the first clip's."""
    try:
        found = probe_video(path)
        return swapped_size(tuple(video_size), (found.height, found.width), str(path))
    except (DataError, TypeError, ValueError):
        return None  # the faults of clip and size have findings of their own
