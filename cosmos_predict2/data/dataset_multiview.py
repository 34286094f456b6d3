# SPDX-License-Identifier: Apache-2.0
"""Training clips of several cameras, each with a folder of its own, as the guide of Waymo has them.

DIR/videos/CAMERA/NAME.mp4      one clip of each camera, of equal frames
DIR/t5_xxl/CAMERA/NAME.pickle   the embedding of its text
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy
import torch

from cosmos_predict2.data.clip_dataset import ClipDataset, Source, Text, clip_problems, no_text, opened_views
from cosmos_predict2.data.video import clips
from cosmos_predict2.data.video.media import VIDEO_SUFFIXES
from cosmos_predict2.data.video_folder import exclude, existing_folder, in_threads, require_files
from cosmos_predict2.text.embeddings.folder import FOLDER_NAMES, EmbeddingFolder, find_embedding_dir
from cosmos_predict2.text.embeddings.pickles import NUM_TOKENS
from imaginaire.data.facts import DataFacts
from imaginaire.errors import ConfigError, DataError, near
from imaginaire.findings import CheckContext, Finding, errors, refusals

log = logging.getLogger(__name__)


class MultiviewDataset(ClipDataset):
    """Every window of ``num_frames`` frames, ``sequence_interval`` apart, of the clips of ``camera_keys``.

    The views lie below each other in this order (`data.views`), each scaled to ``video_size`` (height, width), and
    their texts follow each other, [V * num_tokens, width]; with ``front_view_caption_only`` that of
    ``front_camera_key`` alone, and zeros. ``camera_to_view_id`` is compared with the network's ``view_ids``. Training
    leaves the last tenth of the clips, and one, to validation. ``state_t`` is of published configurations: the model
    knows its own. A clip that a camera lacks is an error, or with ``skip_bad_samples`` excluded with a warning.
    """

    def __init__(
        self,
        dataset_dir: str,
        sequence_interval: int,
        num_frames: int,
        camera_keys: Sequence[str],
        video_size: Sequence[int],
        start_frame_interval: int = 1,
        state_t: int | None = None,
        camera_to_view_id: Mapping[str, int] | None = None,
        front_camera_key: str | None = None,
        front_view_caption_only: bool = False,
        is_train: bool = True,
        *,
        num_tokens: int = NUM_TOKENS,
        text_encoder: str | None = None,
        crop: str = "stretch",
        decoder: str = "auto",
        skip_bad_samples: bool = False,
        most_bad_samples: int = 16,
    ) -> None:
        if problem := next(clip_problems(dict(video_size=video_size, crop=crop, num_frames=num_frames)), None):
            raise ConfigError(problem)
        folders = camera_folders(dataset_dir, camera_keys, front_camera_key, front_view_caption_only)
        source = CameraClips(folders, num_tokens, text_encoder, decoder, skip_bad=skip_bad_samples)
        held_out = int(0.1 * len(source)) + 1
        recordings = numpy.arange(len(source))[:-held_out] if is_train else numpy.arange(len(source))[-held_out:]
        if not len(recordings):
            raise DataError(f"{dataset_dir} has one clip, which is kept for validation: record another one.")
        super().__init__(
            source,
            num_frames,
            video_size,
            stride=sequence_interval,
            start_interval=start_frame_interval,
            crop=crop,
            is_training=is_train,
            recordings=recordings,
            skip_bad_samples=skip_bad_samples,
            most_bad_samples=most_bad_samples,
        )

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """Findings that need no clip opened."""
        yield from errors(context.key, clip_problems(arguments))
        names = ("dataset_dir", "camera_keys", "front_camera_key", "front_view_caption_only")
        yield from refusals(context.key, lambda: camera_folders(**{name: arguments.get(name) for name in names}))

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        def rate() -> float:
            folder = Path(arguments["dataset_dir"], "videos", arguments["camera_keys"][0])
            first = next(iter(require_files(folder, VIDEO_SUFFIXES, "clips").values()))
            return clips.probe(first)[1] / int(arguments.get("sequence_interval", 1))

        return DataFacts(kind="folders of clips, one for each camera", has_actions=False, read_rate=rate)


def camera_folders(
    dataset_dir: Any, camera_keys: Any, front_camera_key: str | None = None, front_view_caption_only: bool | None = None
) -> dict[Path, Path | None]:
    """The folder of each camera's clips, and of its embeddings; None: its texts are zeros."""
    root, keys = existing_folder(dataset_dir, "videos"), list(camera_keys or ())
    front = front_camera_key or next(iter(keys), "")
    if front not in keys or len(set(keys)) < len(keys):
        raise ConfigError(f"camera_keys={keys}: different cameras, and front_camera_key={front_camera_key} among them.")
    texts = find_embedding_dir(root)
    found: dict[Path, Path | None] = {}
    for key in keys:
        if not (folder := root / "videos" / key).is_dir():
            raise DataError(f"There is no folder {folder}.{near(key, [path.name for path in folder.parent.iterdir()])}")
        found[folder] = None
        if key == front or not front_view_caption_only:
            found[folder] = (texts or root / FOLDER_NAMES[0]) / key
            if not (texts and (texts / key).is_dir()):
                command = f"python -m scripts.get_t5_embeddings_from_waymo --data {root}"
                raise DataError(f"There is no folder {found[folder]} with text embeddings. Write it: {command}")
    return found


class CameraClips(Source):
    def __init__(
        self,
        folders: Mapping[Path, Path | None],
        num_tokens: int,
        text_encoder: str | None,
        decoder: str,
        *,
        skip_bad: bool,
    ) -> None:
        self._files = [require_files(folder, VIDEO_SUFFIXES, "clips") for folder in folders]
        self._root = next(iter(folders)).parent.parent
        self._texts = [None if folder is None else EmbeddingFolder(folder) for folder in folders.values()]
        for texts in self._texts:
            if texts is not None and text_encoder is not None:
                texts.require_encoder(text_encoder, num_tokens)
        self._width = next(texts.width for texts in self._texts if texts is not None)
        self._num_tokens, self._decoder = num_tokens, clips.choose_decoder(decoder)
        stems = sorted(set().union(*self._files))
        cameras = [(folder.name, files) for folder, files in zip(folders, self._files, strict=True)]
        lacks = {stem: [name for name, files in cameras if stem not in files] for stem in stems}
        faults = [f"{stem}: there is none of {', '.join(names)}" for stem, names in lacks.items() if names]
        exclude(faults, len(stems), skip_bad, "clips")
        self.stems = [stem for stem in stems if not lacks[stem]]
        probed = in_threads(clips.probe, [self._files[0][stem] for stem in self.stems])
        self.lengths = [count for count, _ in probed]
        log.info("%s: %d clips of %d cameras", self, len(self.stems), len(self._files))

    def __str__(self) -> str:
        return str(self._root)

    def __len__(self) -> int:
        return len(self.stems)

    def open(self, i: int, camera: int = 0) -> AbstractContextManager[clips.Clip]:
        views = [clips.open_clip(files[self.stems[i]], decoder=self._decoder) for files in self._files]
        return opened_views(views, f"{self}: {self.stems[i]}")

    def names(self, i: int, camera: int) -> dict[str, str]:
        return {"video_path": str(self._files[0][self.stems[i]])}

    def text(self, i: int, frame: int) -> Text:
        zeros, unread = no_text(self._num_tokens, self._width)
        parts = [
            (zeros, 0 * unread) if texts is None else texts.read(self.stems[i], self._num_tokens)
            for texts in self._texts
        ]
        return Text(None, (torch.cat([rows for rows, _ in parts]), torch.cat([mask for _, mask in parts])))
