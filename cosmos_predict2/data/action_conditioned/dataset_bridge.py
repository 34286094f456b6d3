# SPDX-License-Identifier: Apache-2.0
"""Bridge and whatever is written in its layout: clips of a robot with actions computed from its recorded poses.

BRIDGE/annotation/{train,val,test}/NAME.json    see recordings.py
BRIDGE/videos/{train,val,test}/NAME/rgb.mp4
BRIDGE/annotation/{train,val,test}/NAME.npy     embeddings of the captions, read with load_t5_embeddings only
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attrs
import numpy
import torch
from numpy.typing import NDArray

from cosmos_predict2.actions.statistics import declared_transform
from cosmos_predict2.actions.transforms import (
    ACTION_SCALE,
    Accumulate,
    ActionTransform,
    Floats,
    pose_differences,
    relative_pose,
    rotation_size,
)
from cosmos_predict2.data.action_conditioned.recordings import (
    BridgeRecordings,
    annotation_files,
    read_annotation,
    read_recordings,
    recording_of,
)
from cosmos_predict2.data.clip_dataset import (
    ACTION_FPS,
    ClipDataset,
    GivenTransform,
    Source,
    Text,
    opened_views,
    require_state,
    shape_problems,
    state_range,
)
from cosmos_predict2.data.video.clips import Clip, open_clip, probe
from cosmos_predict2.data.views import cameras_in
from cosmos_predict2.text.embeddings.pickles import padded
from imaginaire.data.facts import DataFacts, known, with_defaults
from imaginaire.errors import ConfigError, DataError, near, raised_as
from imaginaire.findings import CheckContext, Finding, error, errors, refusals

MODES = ("train", "val", "test")
NUM_DEBUG = 10
POSE = "pose"

_DESTROYS = (
    "normalize=True would bring the video to [-1, 1], and the public code then stores it in bytes, which destroys it:"
    " the model normalises by itself. Remove normalize."
)
_NO_LATENTS = "pre_encode=True is not there: latents are made by the model. Remove pre_encode."


class ActionConditionedDataset(ClipDataset):
    """Every window of ``num_frames`` frames, ``sequence_interval`` apart, of every recording, by file and start.

    Items have actions relative to the frame before; ``accumulate_action``
    makes them relative to the first frame (True), or to a base that moves up every n frames (such as 4). In training
    a window begins at every frame, otherwise at every ``val_start_frame_interval``-th. ``cam_id`` chooses the camera,
    or several that are views of one picture, "0+1" (`data.views`), each of ``video_size``; without it one of
    ``cam_ids`` is drawn for each item in training, and they take turns otherwise.

    Position and angles are multiplied by ``action_scale`` (20), the gripper by ``gripper_rescale_factor``; or all of
    them by ``action_transform``, where "statistics" or "quantiles" fits one to all recordings (`fitted_transform`).

    ``state`` "pose" adds position, angles and gripper at each frame to the samples.

    ``num_action_per_chunk`` and ``fps_downsample_ratio`` are the newer names of num_frames - 1 and sequence_interval.
    """

    def __init__(
        self,
        train_annotation_path: str = "",
        val_annotation_path: str = "",
        test_annotation_path: str = "",
        video_path: str = "",
        sequence_interval: int = 1,
        num_frames: int = 13,
        cam_ids: Sequence[int] = (0,),
        accumulate_action: bool | Accumulate = False,
        video_size: Sequence[int] = (480, 640),
        val_start_frame_interval: int = 1,
        debug: bool = False,
        normalize: bool = False,
        pre_encode: bool = False,
        do_evaluate: bool = False,
        load_t5_embeddings: bool = False,
        load_action: bool = True,
        mode: str = "train",
        *,
        num_action_per_chunk: int | None = None,
        fps_downsample_ratio: int | None = None,
        cam_id: int | str | None = None,
        state_key: str = "state",
        gripper_key: str = "continuous_gripper_state",
        gripper_rescale_factor: float = 1.0,
        action_scale: float = ACTION_SCALE,
        action_transform: ActionTransform | Mapping[str, Any] | str | None = None,
        quaternion: bool = False,
        rot6d: str | None = None,
        is_rollout: bool | None = None,
        state: str = "",
        fps: float = ACTION_FPS,
        num_tokens: int = 512,
        text_width: int = 1024,
        skip_bad_samples: bool = False,
        most_bad_samples: int = 16,
        decoder: str = "auto",
        num_threads: int = 1,
    ) -> None:
        num_frames, stride = _frames(num_frames, sequence_interval, num_action_per_chunk, fps_downsample_ratio)
        cameras, num_views = _cameras(cam_ids, cam_id)
        problems = [*_problems(normalize, pre_encode, mode, cameras), *shape_problems(num_frames, video_size)]
        if stride < 1 or val_start_frame_interval < 1:
            problems.append(
                f"sequence_interval={stride}, val_start_frame_interval={val_start_frame_interval}: at least 1"
            )
        if problems:
            raise ConfigError("; ".join(problems))
        folders = {"train": train_annotation_path, "val": val_annotation_path, "test": test_annotation_path}
        form = _form(accumulate_action, quaternion, rot6d)
        given = _transform(action_transform, action_scale, gripper_rescale_factor, form)
        most = NUM_DEBUG if debug else None
        recordings = read_recordings(
            Path(folders[mode]),
            state_key=state_key,
            gripper_key=gripper_key,
            camera_ids=cameras,
            is_rollout=is_rollout,
            skip_bad=skip_bad_samples,
            most=most,
        )
        super().__init__(
            BridgeSource(
                recordings,
                Path(video_path),
                form if load_action else None,
                (num_tokens, text_width) if load_t5_embeddings else None,
                dict(decoder=decoder, num_threads=num_threads),
                require_state(state, POSE),
                num_views,
            ),
            num_frames,
            video_size,
            stride=stride,
            start_interval=1 if mode == "train" else val_start_frame_interval,
            action_transform=given or action_transform,
            fps=fps,
            num_tokens=num_tokens,
            text_width=text_width,
            is_training=mode == "train" and not do_evaluate,
            most_windows=most,
            skip_bad_samples=skip_bad_samples,
            most_bad_samples=most_bad_samples,
        )

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """Findings about the arguments; the annotations are not read."""
        options, key = with_defaults(cls, arguments), context.key
        mode, videos = options["mode"], options["video_path"]
        cameras, _ = _cameras(options["cam_ids"], options["cam_id"])
        yield from errors(key, _problems(options["normalize"], options["pre_encode"], mode, cameras))
        names = ("num_frames", "sequence_interval", "num_action_per_chunk", "fps_downsample_ratio")
        try:
            num_frames, _ = _frames(*(options[name] for name in names))
            yield from errors(key, shape_problems(num_frames, options["video_size"]))
            _transform_of(options)
        except ConfigError as problem:
            yield error(key, str(problem))
        if mode in MODES:
            place = f"{mode}_annotation_path"
            yield from refusals(f"{key}.{place}", lambda: annotation_files(Path(options[place])))
        if not Path(videos).is_dir():
            yield error(f"{key}.video_path", f"the folder {videos} does not exist")

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        options = with_defaults(cls, arguments)

        def rate() -> float:
            """Frame rate by the header of the first video."""
            first = annotation_files(Path(options[f"{options['mode']}_annotation_path"]))[0]
            camera = _cameras(options["cam_ids"], options["cam_id"])[0][0]
            keys = (options["state_key"], options["gripper_key"], (camera,))
            recording = recording_of(first, read_annotation(first), *keys)
            stride = options["fps_downsample_ratio"] or options["sequence_interval"]
            return probe(Path(options["video_path"]) / recording.videos[0])[1] / stride

        def states() -> list[list[float]]:
            folder = Path(options[f"{options['mode']}_annotation_path"])
            recordings = read_recordings(folder, state_key=options["state_key"], gripper_key=options["gripper_key"])
            return state_range([recordings.states], str(folder))

        return DataFacts(
            kind="recordings in Bridge's layout",
            has_actions=options["load_action"],
            transform=known(lambda: _transform_of(options)) if options["load_action"] else None,
            action_dim=known(lambda: 4 + rotation_size(options["quaternion"], options["rot6d"])),
            read_rate=rate,
            read_state_range=states if options["state"] else None,
        )


@dataclass(frozen=True)
class BridgeSource(Source):
    """Recordings in Bridge's layout, below a folder of videos; actions are the differences of their poses."""

    recordings: BridgeRecordings
    videos: Path
    form: Mapping[str, Any] | None  # accumulate, quaternion and rot6d of its actions; None: without them
    text_shape: tuple[int, int] | None  # (tokens, width) of the embedding beside each annotation; None: not read
    decoding: Mapping[str, Any]  # decoder and num_threads
    with_state: bool = False
    num_views: int = 1  # of a picture: all cameras, where there are several

    def __str__(self) -> str:
        return str(self.recordings.folder)

    @property
    def lengths(self) -> NDArray[numpy.int64]:  # type: ignore[override]
        return self.recordings.lengths

    @property
    def num_cameras(self) -> int:  # type: ignore[override]
        return self.recordings.num_cameras // self.num_views

    @property
    def action_form(self) -> Mapping[str, Any] | None:  # type: ignore[override]
        return None if self.form is None else {"kind": "relative_pose", **self.form}

    def __len__(self) -> int:
        return len(self.recordings)

    def open(self, i: int, camera: int = 0) -> AbstractContextManager[Clip]:
        if self.num_views == 1:
            return self._view(i, camera)
        return opened_views([self._view(i, k) for k in range(self.num_views)], str(self.recordings.path(i)))

    def _view(self, i: int, camera: int) -> AbstractContextManager[Clip]:
        return open_clip(self.videos / self.recordings.video(i, camera), **self.decoding)

    def names(self, i: int, camera: int) -> dict[str, str]:
        video = str(self.videos / self.recordings.video(i, camera))
        annotation = str(self.recordings.path(i))
        return {"video_path": video, "annotation_file": annotation, "__key__": self.recordings.keys[i]}

    def actions(self, i: int, frames: NDArray[numpy.int64]) -> Floats:
        assert self.form is not None
        poses = self.recordings.poses(i)[frames]
        with raised_as(DataError, self.recordings.path(i), DataError):
            return pose_differences(poses[:, :6], poses[:, 6], **self.form)

    def states(self, i: int, frames: NDArray[numpy.int64]) -> Floats | None:
        return self.recordings.poses(i)[frames] if self.with_state else None

    def text(self, i: int, frame: int) -> Text:
        caption = self.recordings.captions[i]
        if self.text_shape is None:
            return Text(caption)
        path = self.recordings.path(i).with_suffix(".npy")
        cure = "load_t5_embeddings=True needs one beside every annotation; without it the text is zeros."
        with raised_as(DataError, f"{path} is not an embedding that can be read", OSError, ValueError, cure=cure):
            rows = torch.from_numpy(numpy.atleast_2d(numpy.load(path, allow_pickle=False).squeeze())).float()
        num_tokens, width = self.text_shape
        if rows.ndim != 2 or rows.shape[1] != width or not torch.isfinite(rows).all():
            raise DataError(
                f"{path} has the shape {list(rows.shape)}; finite numbers [tokens, {width}] are needed (text_width)."
            )
        rows = rows[:num_tokens]
        mask = torch.zeros(num_tokens, dtype=torch.int64)
        mask[: len(rows)] = (rows != 0).any(dim=1)
        return Text(caption, (padded(rows, num_tokens), mask), str(path))


def _cameras(cam_ids: Sequence[int], cam_id: int | str | None) -> tuple[tuple[int, ...], int]:
    """The numbers of the cameras, and how many of them are views of one picture."""
    if not isinstance(cam_id, str):
        return (tuple(cam_ids) if cam_id is None else (cam_id,)), 1
    try:
        numbers = tuple(int(name) for name in cameras_in(cam_id))
    except ValueError as error:
        raise ConfigError(f"cam_id='{cam_id}': numbers of cameras with + between them, 0+1.") from error
    return numbers, len(numbers)


def _frames(num_frames: int, interval: int, chunk: int | None, ratio: int | None) -> tuple[int, int]:
    """Number of frames and stride, from the older or the newer names."""
    if chunk is not None:
        if num_frames not in (13, chunk + 1):  # 13 is the default
            raise ConfigError(f"num_frames={num_frames} and num_action_per_chunk={chunk}: give one of them.")
        num_frames = chunk + 1
    if ratio is not None:
        if interval not in (1, ratio):
            raise ConfigError(f"sequence_interval={interval} and fps_downsample_ratio={ratio}: give one of them.")
        interval = ratio
    return num_frames, interval


def _form(accumulate: bool | Accumulate, quaternion: bool, rot6d: str | None) -> dict[str, Any]:
    if isinstance(accumulate, bool):
        accumulate = "window" if accumulate else None
    return {"accumulate": accumulate, "quaternion": quaternion, "rot6d": rot6d}


def _transform_of(options: Mapping[str, Any]) -> ActionTransform | None:
    """The transform of the actions of a data set with these arguments; None where it depends on the files."""
    form = _form(options["accumulate_action"], options["quaternion"], options["rot6d"])
    return _transform(options["action_transform"], options["action_scale"], options["gripper_rescale_factor"], form)


def _transform(
    given: GivenTransform, scale: float, gripper_scale: float, form: Mapping[str, Any]
) -> ActionTransform | None:
    """The given transform, or the published one as a proposal; None where it is fitted to the data."""
    is_scaled = (scale, gripper_scale) != (ACTION_SCALE, 1.0)
    published = relative_pose(scale, gripper_scale, **form)
    if given is None:
        return attrs.evolve(published, proposed=not is_scaled)
    if is_scaled:
        raise ConfigError("action_transform has the scales too: remove action_scale and gripper_rescale_factor.")
    transform = declared_transform(given)
    if transform is not None and transform.raw_form != published.raw_form:
        raise ConfigError(
            f"action_transform is {transform}, but poses with accumulate_action={form['accumulate']} and"
            f" quaternion={form['quaternion']}, rot6d={form['rot6d']} give actions such as {published}."
        )
    return transform


def _problems(normalize: bool, pre_encode: bool, mode: str, cameras: Sequence[int]) -> Iterator[str]:
    if normalize:
        yield _DESTROYS
    if pre_encode:
        yield _NO_LATENTS
    if mode not in MODES:
        yield f"There is no mode '{mode}'.{near(str(mode), MODES)}"
    if not cameras:
        yield "cam_ids is empty; one camera at least"
