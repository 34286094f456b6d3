# SPDX-License-Identifier: Apache-2.0
"""Recordings of a robot in the Bridge layout: one JSON file each, with a state per frame and the paths of its videos.

    ANNOTATIONS/NAME.json   {"state": [[x, y, z, roll, pitch, yaw, ...], ...], "continuous_gripper_state": [...],
                             "videos": [{"video_path": "videos/train/NAME/rgb.mp4"}, ...], "episode_id": "NAME", ...}

A folder of them is read once, into a few arrays that worker processes share without copying.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from cosmos_predict2.actions.transforms import Floats, check_poses
from cosmos_predict2.data.samples import PackedStrings
from imaginaire import foreign_json
from imaginaire.errors import DataError, near, raised_as

log = logging.getLogger(__name__)

THREADS = 16  # the files are small: reading them is waiting for the disk


@dataclass(frozen=True, slots=True)
class BridgeAnnotation:
    """One annotation file."""

    name: str  # of the file, without folder
    key: str
    caption: str
    videos: tuple[str, ...]  # one for each camera that is wanted
    poses: Floats  # [N, 7]: a pose and the gripper's state for each frame


@dataclass(frozen=True)
class BridgeRecordings:
    """All recordings of a folder, in the order of their names."""

    folder: Path
    names: PackedStrings
    keys: PackedStrings
    captions: PackedStrings
    videos: PackedStrings  # num_cameras for each recording
    num_cameras: int
    first: numpy.ndarray  # [n + 1] rows of ``states``
    states: Floats

    def __len__(self) -> int:
        return len(self.names)

    def poses(self, i: int) -> Floats:
        """[N, 7] of recording i."""
        return self.states[self.first[i] : self.first[i + 1]]

    def video(self, i: int, camera: int) -> str:
        return self.videos[i * self.num_cameras + camera]

    def path(self, i: int) -> Path:
        return self.folder / self.names[i]

    @property
    def lengths(self) -> numpy.ndarray:
        """Frames of each recording."""
        return numpy.diff(self.first)


def annotation_files(folder: Path) -> list[Path]:
    """The JSON files of an annotation folder, one at least."""
    if not folder.is_dir():
        raise DataError(f"The annotation folder {folder} does not exist.")
    files = sorted(folder.glob("*.json"))
    if not files:
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise DataError(f"{folder} holds no annotation (*.json); it has {names}.")
    return files


def read_recordings(
    folder: Path,
    *,
    state_key: str = "state",
    gripper_key: str = "continuous_gripper_state",
    camera_ids: Sequence[int] = (0,),
    is_rollout: bool | None = None,
    skip_bad: bool = False,
    most: int | None = None,
) -> BridgeRecordings:
    """All annotations of a folder, or the first ``most``.

    ``is_rollout`` takes only those that are (or are not) marked as a policy's own in ``episode_metadata.is_eval``. A
    broken file is an error, or with ``skip_bad`` excluded and counted in the log.
    """
    start = time.monotonic()
    files = annotation_files(folder)

    def read(path: Path) -> BridgeAnnotation | DataError | None:
        try:
            annotation = read_annotation(path)
            if is_rollout is not None and bool(_metadata(annotation).get("is_eval")) != is_rollout:
                return None
            return recording_of(path, annotation, state_key, gripper_key, camera_ids)
        except DataError as error:
            return error

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(read, files[:most]))
    broken = [item for item in found if isinstance(item, DataError)]
    if broken and not skip_bad:
        more = f" (and {len(broken) - 1} more broken annotations)" if len(broken) > 1 else ""
        raise DataError(f"{broken[0]}{more}")
    if broken:
        log.warning(
            "%d of %d annotations in %s are excluded; the first: %s", len(broken), len(files), folder, broken[0]
        )
    kept = [item for item in found if isinstance(item, BridgeAnnotation)]
    if not kept:
        which = {None: "", True: " that is a rollout", False: " that is not a rollout"}[is_rollout]
        raise DataError(f"{folder} has no usable annotation{which}, of {len(files)} files.")
    log.info("read %d annotations from %s (%.1f s)", len(kept), folder, time.monotonic() - start)
    return BridgeRecordings(
        folder=folder,
        names=PackedStrings(item.name for item in kept),
        keys=PackedStrings(item.key for item in kept),
        captions=PackedStrings(item.caption for item in kept),
        videos=PackedStrings(video for item in kept for video in item.videos),
        num_cameras=len(camera_ids),
        first=numpy.cumsum([0, *(len(item.poses) for item in kept)]),
        states=numpy.concatenate([item.poses for item in kept]),
    )


def recording_of(
    path: Path,
    annotation: dict[str, Any],
    state_key: str = "state",
    gripper_key: str = "continuous_gripper_state",
    camera_ids: Sequence[int] = (0,),
) -> BridgeAnnotation:
    """The recording of an annotation file with this content."""
    with raised_as(DataError, path, DataError):
        keys = (state_key, gripper_key)
        poses, gripper = check_poses(*(field_of(annotation, key, "See state_key and gripper_key.") for key in keys))
        videos = tuple(video_of(annotation, camera, "See cam_ids.") for camera in camera_ids)
    names = [annotation.get(key) for key in ("episode_id", "original_path")]
    names += [_metadata(annotation).get(key) for key in ("episode_id", "segment_id")]
    key = next((str(name) for name in names if name not in (None, "")), path.stem)
    return BridgeAnnotation(
        name=path.name,
        key=key,
        caption=_caption(annotation),
        videos=videos,
        poses=numpy.concatenate([poses, gripper[:, None]], axis=1),
    )


def read_annotation(path: Path) -> dict[str, Any]:
    with raised_as(DataError, f"{path} is not an annotation that can be read", OSError, ValueError):
        return foreign_json.load_object(path)


def _metadata(annotation: dict[str, Any]) -> dict[str, Any]:
    found = annotation.get("episode_metadata")
    return found if isinstance(found, dict) else {}


def field_of(annotation: dict[str, Any], key: str, cure: str) -> Any:
    """The entry of this name; DataError with the cure where there is none."""
    if key not in annotation:
        raise DataError(f"it has no '{key}'.{near(key, annotation)} {cure}")
    return annotation[key]


def video_of(annotation: dict[str, Any], camera: int, cure: str) -> str:
    """The name of a camera's video; DataError with the cure where there is none."""
    videos = annotation.get("videos")
    if not isinstance(videos, list) or not -len(videos) <= camera < len(videos):
        count = f"{len(videos)} videos" if isinstance(videos, list) else "no list 'videos'"
        raise DataError(f"camera {camera} is asked for, but it has {count}. {cure}")
    video = videos[camera]
    name = video.get("video_path") if isinstance(video, dict) else video
    if not isinstance(name, str) or not name:
        raise DataError(f"video {camera} has no 'video_path'. {cure}")
    return name


def _caption(annotation: dict[str, Any]) -> str:
    texts = annotation.get("texts")
    if isinstance(texts, list) and texts:
        return str(texts[0])
    return str(annotation.get("caption") or annotation.get("language_instruction") or "")
