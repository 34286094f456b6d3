# SPDX-License-Identifier: Apache-2.0
"""Training clips that several cameras recorded at the same time.

DIR/videos/CAMERA/NAME.mp4       the clips, the same names for every camera
DIR/t5_xxl/CAMERA/NAME.pickle    an embedding per clip, of the front camera alone or of every one
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cosmos_predict2.data.samples import BadSamples, PackedStrings, frame_item, place_of, text_item
from cosmos_predict2.data.sizes import pixel_frames, size_problem
from cosmos_predict2.data.video import clips
from cosmos_predict2.data.video.media import VIDEO_SUFFIXES
from cosmos_predict2.data.video_folder import (
    exclude,
    existing_folder,
    in_threads,
    media_by_stem,
    opened_embeddings,
    probed,
    with_embedding,
)
from cosmos_predict2.text.embeddings.folder import EmbeddingFolder, find_embedding_dir
from imaginaire.errors import ConfigError, DataError, near
from imaginaire.findings import CheckContext, Finding, error, errors

RATES_DIFFER = 1.1  # times; what containers state is off by a frame in a clip, and 29.97 is 30
VALIDATION_PART = 0.1  # of the clips, and one more: the last ones by name


class MultiviewDataset(Dataset[dict[str, Any]]):
    """One sample per start frame: ``num_frames`` frames, ``sequence_interval`` apart, of every camera.

    The cameras' frames follow one another in ``video`` uint8 [3, V * num_frames, H, W], in the order of
    ``camera_keys``; ``camera_to_view_id`` are their numbers in the model. The last tenth of the clips is
    for validation. With ``front_view_caption_only`` the other cameras' text is zeros with a mask of zeros. Clips of
    cameras that ran for different times count as long as the shortest.
    """

    data_kind = "clips of several cameras"

    def __init__(
        self,
        dataset_dir: str,
        sequence_interval: int,
        num_frames: int,
        camera_keys: Sequence[str],
        video_size: Sequence[int],
        start_frame_interval: int = 1,
        state_t: int = 8,
        camera_to_view_id: Mapping[str, int] | None = None,
        front_camera_key: str | None = None,
        front_view_caption_only: bool = False,
        is_train: bool = True,
        *,
        skip_bad_samples: bool = False,
        most_bad_samples: int = 16,
        decoder: str = "auto",
        num_threads: int = 1,
        num_tokens: int = 512,
        text_encoder: str | None = None,
    ) -> None:
        shape = (num_frames, sequence_interval, start_frame_interval, state_t, video_size)
        for problem in _problems(camera_keys, camera_to_view_id, front_camera_key, *shape):
            raise ConfigError(problem)
        self.cameras = [str(key) for key in camera_keys]
        self.front = front_camera_key or self.cameras[0]
        self.view_ids = _view_ids(self.cameras, camera_to_view_id)
        self.captioned = [self.front] if front_view_caption_only else self.cameras
        self.num_frames, self.sequence_interval, self.state_t = num_frames, sequence_interval, state_t
        self.video_size = (int(video_size[0]), int(video_size[1]))
        self._every = start_frame_interval
        self._decoder = clips.choose_decoder(decoder)
        self._num_threads = num_threads
        self._num_tokens = num_tokens
        self._bad = BadSamples(skip_bad_samples, most_bad_samples)
        self.dataset_dir = existing_folder(dataset_dir, "videos")
        self.embeddings = _open_embeddings(self.dataset_dir, self.captioned, text_encoder)
        files = _files(self.dataset_dir, self.cameras)
        stems = self._split(list(files), is_train)
        self._index(stems, files, skip_bad_samples)

    def _split(self, stems: list[str], is_train: bool) -> list[str]:
        """The clips of the training or of the validation part that have their embeddings."""
        num_validation = min(len(stems), int(VALIDATION_PART * len(stems)) + 1)
        chosen = stems[: len(stems) - num_validation] if is_train else stems[len(stems) - num_validation :]
        if not chosen:
            raise DataError(
                f"{self.dataset_dir / 'videos' / self.cameras[0]} has {len(stems)} clip, which is for validation"
                " (the last tenth and one more): there is none to train on."
            )
        for embeddings in self.embeddings.values():
            chosen = with_embedding(chosen, embeddings, "clips", is_logged=True)
        return chosen

    def _index(self, stems: Sequence[str], files: Mapping[str, Mapping[str, str]], skip_bad: bool) -> None:
        """Count the samples of every clip, from the headers of its files."""
        needed = (self.num_frames - 1) * self.sequence_interval + 1
        paths = [self._path(camera, files[stem][camera]) for stem in stems for camera in self.cameras]
        found = in_threads(probed, paths)
        kept: list[str] = []
        counts: list[int] = []
        faults: list[str] = []
        for i, stem in enumerate(stems):
            views = found[i * len(self.cameras) : (i + 1) * len(self.cameras)]
            broken = [view for view in views if isinstance(view, str)]
            shortest = min((view[0] for view in views if not isinstance(view, str)), default=0)
            if broken:
                faults += broken[:1]
            elif rates := _differing_rates(views):
                faults.append(f"{stem}: its cameras have different rates ({rates} frames per second).")
            elif shortest < needed:
                faults.append(
                    f"{stem} has {shortest} frames, but num_frames={self.num_frames} with"
                    f" sequence_interval={self.sequence_interval} needs {needed}."
                )
            else:
                kept.append(stem)
                counts.append(-(-(shortest - needed + 1) // self._every))
        exclude(faults, len(stems), skip_bad, "clips")
        self.stems = PackedStrings(kept)
        self._file_names = PackedStrings([files[stem][camera] for stem in kept for camera in self.cameras])
        self._ends = numpy.cumsum(counts)  # of each clip's samples

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """What can be known to be wrong without opening a clip."""
        cameras, front = arguments.get("camera_keys", ()), arguments.get("front_camera_key")
        defaults = dict(num_frames=29, sequence_interval=1, start_frame_interval=1, state_t=8, video_size=(16, 16))
        sizes = {name: arguments.get(name, value) for name, value in defaults.items()}
        if found := [*_problems(cameras, arguments.get("camera_to_view_id"), front, **sizes)]:
            yield from errors(context.key, found)
            return
        is_front_only = arguments.get("front_view_caption_only", False)
        try:
            folder = existing_folder(arguments.get("dataset_dir", ""), "videos")
            _files(folder, cameras)
            _open_embeddings(folder, [front or cameras[0]] if is_front_only else cameras, arguments.get("text_encoder"))
        except DataError as problem:
            yield error(context.key, str(problem))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = place_of(index, len(self))
        own = int(numpy.searchsorted(self._ends, index, side="right"))
        start = (index - (int(self._ends[own - 1]) if own else 0)) * self._every
        # What breaks one sample of a clip mostly breaks them all: the next is the first of the next clip.
        return self._bad.read(own, len(self.stems), lambda clip: self._item(clip, start if clip == own else 0))

    def _item(self, clip: int, start: int) -> dict[str, Any]:
        frames = [start + k * self.sequence_interval for k in range(self.num_frames)]
        views, rates = zip(*(self._read(clip, place, frames) for place in range(len(self.cameras))), strict=True)
        text = [self._text(camera, self.stems[clip]) for camera in self.cameras]
        widest = max(embedding.shape[1] for embedding, _, _ in text)
        front = self.cameras.index(self.front)
        return {
            "video": torch.cat(views, dim=1),
            "video_name": {
                "video_path": str(self._video(clip, front)),
                "t5_embedding_path": text[front][2],
                "start_frame_id": str(start),
            },
            **text_item(
                torch.cat([embedding.expand(-1, widest) for embedding, _, _ in text]),
                torch.cat([mask for _, mask, _ in text]),
            ),
            "fps": rates[front] / self.sequence_interval,
            "num_frames": self.num_frames,
            **frame_item(self.video_size),
            "sample_n_views": torch.tensor(len(self.cameras)),
            "view_indices": self.view_ids.repeat_interleave(self.num_frames),
            "latent_view_indices_B_T": self.view_ids.repeat_interleave(self.state_t),
            "ref_cam_view_idx_sample_position": torch.tensor([-1]),
        }

    def _read(self, clip: int, place: int, frames: Sequence[int]) -> tuple[Tensor, float]:
        """uint8 [3, num_frames, H, W] of one camera, and its rate."""
        path = self._video(clip, place)
        with clips.open_clip(path, decoder=self._decoder, num_threads=self._num_threads) as opened:
            return opened.read(frames, lambda picture: clips.stretch(picture, self.video_size)), opened.fps

    def _text(self, camera: str, stem: str) -> tuple[Tensor, Tensor, str]:
        if camera in self.embeddings:
            embeddings = self.embeddings[camera]
            return *embeddings.read(stem, self._num_tokens), str(embeddings.find(stem) or "")
        nothing = torch.zeros(self._num_tokens, 1)  # as wide as the others when they are put together
        return nothing, torch.zeros(self._num_tokens, dtype=torch.int64), ""

    def _video(self, clip: int, place: int) -> Path:
        return self._path(self.cameras[place], self._file_names[clip * len(self.cameras) + place])

    def _path(self, camera: str, name: str) -> Path:
        return self.dataset_dir / "videos" / camera / name


def _files(dataset_dir: Path, cameras: Sequence[str]) -> dict[str, dict[str, str]]:
    """Per stem of the first camera the file of every camera."""
    by_camera = {
        camera: media_by_stem(existing_folder(dataset_dir / "videos", camera) / camera, VIDEO_SUFFIXES)
        for camera in cameras
    }
    first = by_camera[cameras[0]]
    for camera, files in by_camera.items():
        if differing := sorted(first.keys() ^ files.keys()):
            stem = differing[0]
            there, absent = (cameras[0], camera) if stem in first else (camera, cameras[0])
            raise DataError(
                f"{dataset_dir / 'videos'}: {len(differing)} clips are not there for every camera: {there} has {stem},"
                f" {absent} has not."
            )
    return {stem: {camera: by_camera[camera][stem] for camera in cameras} for stem in first}


def _open_embeddings(dataset_dir: Path, cameras: Sequence[str], text_encoder: str | None) -> dict[str, EmbeddingFolder]:
    folder = find_embedding_dir(dataset_dir)
    if folder is None:
        raise DataError(f"{dataset_dir} has no text embeddings: t5_xxl/CAMERA/NAME.pickle for {', '.join(cameras)}.")
    return {camera: opened_embeddings(existing_folder(folder, camera) / camera, text_encoder) for camera in cameras}


def _differing_rates(views: Sequence[tuple[int, float] | str]) -> str:
    """The rates of a clip's cameras where they differ: its frames would be of different times. Else nothing."""
    rates = [view[1] for view in views if not isinstance(view, str)]
    return "" if max(rates) <= min(rates) * RATES_DIFFER else ", ".join(f"{rate:g}" for rate in rates)


def _view_ids(cameras: Sequence[str], camera_to_view_id: Mapping[str, int] | None) -> Tensor:
    numbers = {camera: i for i, camera in enumerate(cameras)} if camera_to_view_id is None else camera_to_view_id
    return torch.tensor([int(numbers[camera]) for camera in cameras])


def _problems(
    cameras: Sequence[str],
    camera_to_view_id: Mapping[str, int] | None,
    front: str | None,
    num_frames: int,
    sequence_interval: int,
    start_frame_interval: int,
    state_t: int,
    video_size: Any,
) -> Iterator[str]:
    """What is wrong with the arguments."""
    if problem := size_problem("video_size", video_size):
        yield problem
    counts = dict(
        num_frames=num_frames,
        sequence_interval=sequence_interval,
        start_frame_interval=start_frame_interval,
        state_t=state_t,
    )
    wrong = [f"{name}={value}" for name, value in counts.items() if not isinstance(value, int) or value < 1]
    if wrong:
        yield f"{', '.join(wrong)}: whole numbers, 1 or more."
    elif num_frames != pixel_frames(state_t):
        yield f"num_frames={num_frames}, but state_t={state_t} latent frames are {pixel_frames(state_t)} frames."
    if not cameras or len(set(cameras)) != len(cameras):
        yield f"camera_keys={list(cameras)}: the cameras' folders under videos/, each once."
    if front is not None and front not in cameras:
        yield f"front_camera_key: there is no camera '{front}'.{near(front, cameras)}"
    if camera_to_view_id is not None and (unknown := [name for name in cameras if name not in camera_to_view_id]):
        yield f"camera_to_view_id gives no number to {', '.join(unknown)}."
