# SPDX-License-Identifier: Apache-2.0
"""First frames and actions of a rollout, from a robot's recording and its video, or an episode of a LeRobot data set.

    {"state": [[x, y, z, roll, pitch, yaw], ...], "continuous_gripper_state": [...], "action": [[...], ...],
     "videos": [{"video_path": "videos/test/NAME/rgb.mp4"}], ...}

Actions are computed from the recorded states, as they are for training, or taken from the rows of ``action``; which of
them is logged with every episode, and they always go through the transform that the weights were trained with. Those of
a LeRobot data set are read as training reads them.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from cosmos_predict2.actions.transforms import (
    ActionTransform,
    Floats,
    actions_from_field,
    check_poses,
    combined_actions,
    pose_differences,
)
from cosmos_predict2.checkpoints.card import mappings
from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.action_conditioned.recordings import field_of, read_annotation, video_of
from cosmos_predict2.data.lerobot.info import VAL_FRACTION, choose_episodes, sets_below
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.video import media
from cosmos_predict2.data.video.clips import open_clip, probe, read_frames, stretch
from cosmos_predict2.data.views import cameras_in
from cosmos_predict2.pipelines.evaluation_data import require_same_actions, warn_of_other_range
from cosmos_predict2.pipelines.recorded_run import own_arguments
from cosmos_predict2.world_model.options import LoadActions, Reading
from imaginaire.errors import DataError, near, raised_as

log = logging.getLogger(__name__)

ACTION_KEYS = ("action", "actions", "toy_actions")
KEY_FLAGS = "See --state_key, --gripper_key and --action_key."


@dataclass(frozen=True)
class ActionInput:
    """One recording from its chosen first frame on."""

    first_frames_C_F_H_W: Tensor  # uint8
    actions_L_D: Tensor  # as the network sees them
    source: str  # where they were taken from, in words
    video: str
    frames: list[int]  # the numbers of the true frames, 1 + L of them
    read: Callable[[list[int]], Tensor] | None = None  # true frames by their numbers, where no file of its own has them
    fps: float = 10.0  # of the frames

    @property
    def has_truth(self) -> bool:
        """True where the video goes on behind the frames that the rollout begins with."""
        if self.read is not None:
            return len(self.frames) > self.first_frames_C_F_H_W.shape[1]
        if media.kind_of(self.video) == "image":
            return False
        num_given = self.first_frames_C_F_H_W.shape[1]
        return len(self.frames) > num_given and probe(self.video)[0] > self.frames[num_given]

    def true_frames(self, num_frames: int) -> Tensor:
        """uint8 [3, F, H, W], the first so many frames of the recording, or as many as its video has."""
        if self.read is not None:
            return self.read(self.frames[:num_frames])
        have, _ = probe(self.video)
        wanted = [frame for frame in self.frames[:num_frames] if frame < have]
        size = (self.first_frames_C_F_H_W.shape[2], self.first_frames_C_F_H_W.shape[3])
        return read_frames(self.video, wanted, fit=lambda frame: stretch(frame, size))


class RawActions(NamedTuple):
    """Actions of a recording before their transform."""

    rows: Floats  # [L, d]
    source: str  # where they come from
    frames: numpy.ndarray  # the numbers of the frames along which they lead
    counted: str  # the length of the recording, and what it was counted by
    lengths: tuple[int, ...]  # how many frames its video may have


def read_episode(annotation_path: str, reading: Reading, video: str = "", root: str = "") -> ActionInput:
    """The episode of an annotation; its video is the one given, or the one that it names.

    Raises for whatever is wrong with the files, with their names.
    """
    path = Path(annotation_path)
    annotation = read_annotation(path)
    with raised_as(DataError, annotation_path, DataError):
        video = video or _named_video(annotation, path, reading.camera, root)
        if reading.load is not None:
            return _episode_of_own_code(reading.load, annotation, video, reading)
        raw = raw_actions(annotation, reading)
        actions = torch.from_numpy(reading.transform.apply(raw.rows)).float()
    given = _first_frames(video, raw, reading, annotation_path)
    return ActionInput(given, actions, raw.source, video, raw.frames.tolist(), fps=_rate(video, reading))


def raw_actions(annotation: dict[str, Any], reading: Reading) -> RawActions:
    """The actions that an annotation has, or that follow from its poses, along the chosen frames."""
    transform = reading.transform
    source = reading.source
    if source == "auto":
        has_states = reading.state_key in annotation and reading.gripper_key in annotation
        source = "state" if transform.kind == "relative_pose" and has_states else "action"
    if source == "state":
        keys = (reading.state_key, reading.gripper_key)
        poses, gripper = check_poses(*(field_of(annotation, key, KEY_FLAGS) for key in keys))
        frames = chosen_frames(len(poses), reading)
        words = f"differences of '{reading.state_key}', gripper of '{reading.gripper_key}'"
        counted = f"{len(poses)} rows of '{reading.state_key}'"
        return RawActions(_differences(poses[frames], gripper[frames], reading), words, frames, counted, (len(poses),))
    key, rows = _rows(annotation, reading)
    # A row leads from each frame to the next; some recordings have one for their last frame, too.
    length = (f"{len(rows)} rows of '{key}'", (len(rows) + 1, len(rows)))
    if transform.kind == "controller":
        frames = chosen_frames(len(rows) + 1, reading)
        return RawActions(combined_actions(rows, frames, reading.combine or "sum"), f"rows of '{key}'", frames, *length)
    if transform.accumulate is not None or reading.stride > 1:
        raise DataError(
            f"'{key}' has the pose differences of neighbouring frames, but accumulate={transform.accumulate} of this"
            f" model or --fps_downsample_ratio {reading.stride} takes others: add --action_source state."
        )
    frames = chosen_frames(len(rows) + 1, reading)
    if reading.gripper_key in annotation:
        raw = actions_from_field(rows, annotation[reading.gripper_key], scale=1.0)
        words = f"rows of '{key}', gripper of '{reading.gripper_key}'"
        return RawActions(raw[frames[:-1]], words, frames, *length)
    if rows.shape[1] != transform.dim:
        raise DataError(f"'{key}' has {rows.shape[1]} numbers a row and there is no '{reading.gripper_key}'.")
    return RawActions(rows[frames[:-1]], f"rows of '{key}'", frames, *length)


def find_annotations(root: str, folder: str, start: int, end: int) -> list[str]:
    """The annotations ``start`` ... ``end`` - 1 of a folder, by name."""
    place = Path(root, folder)
    if not place.is_dir():
        below = [str(path.relative_to(root)) for path in sorted(Path(root).glob("annotation*/*")) if path.is_dir()]
        raise DataError(f"The folder {place} does not exist.{near(folder, below) if below else sets_below(Path(root))}")
    found = sorted(str(path) for path in place.glob("*.json"))
    if not found[start:end]:
        raise DataError(f"{place} has {len(found)} annotations (*.json); none is left from {start} to {end}.")
    return found[start:end]


def chosen_frames(count: int, reading: Reading, stride: int | None = None) -> numpy.ndarray:
    """The frames of a recording of ``count`` that are led along."""
    frames = numpy.arange(reading.start, count, stride or reading.stride)
    if reading.most_actions is not None:
        frames = frames[: 1 + reading.most_actions]
    if len(frames) < (least := max(2, reading.num_given)):
        raise DataError(
            f"it has {count} frames, of which {len(frames)} are left with --start_frame_idx {reading.start} and"
            f" --fps_downsample_ratio {stride or reading.stride}; {least} are needed at least."
        )
    return frames


def _differences(poses: Floats, gripper: Floats, reading: Reading) -> Floats:
    transform, size = reading.transform, reading.chunk_size
    how: dict[str, Any] = dict(quaternion=transform.quaternion, rot6d=transform.rot6d)
    if transform.accumulate is None:
        return pose_differences(poses, gripper, **how)
    # To the first frame of each window, as in training: here a window is a chunk.
    chunks = [slice(first, first + size + 1) for first in range(0, len(poses) - 1, size)]
    return numpy.concatenate(
        [pose_differences(poses[i], gripper[i], accumulate=transform.accumulate, **how) for i in chunks]
    )


def _rows(annotation: dict[str, Any], reading: Reading) -> tuple[str, Floats]:
    """The rows of actions and their name."""
    dim = reading.transform.dim
    keys = [reading.action_key] if reading.action_key else [key for key in ACTION_KEYS if key in annotation]
    tables = {key: _table(field_of(annotation, key, KEY_FLAGS), key) for key in keys}
    fitting = [key for key, table in tables.items() if table.shape[1] == dim]
    if reading.transform.kind == "relative_pose":  # its gripper may stand apart
        fitting += [key for key, table in tables.items() if table.shape[1] >= 6]
    if not fitting:
        found = ", ".join(f"'{key}' of {table.shape[1]} numbers" for key, table in tables.items()) or "none"
        raise DataError(
            f"the model takes actions of {dim} numbers; in the annotation there is {found}. See --action_key."
        )
    return fitting[0], tables[fitting[0]]


def _table(values: Any, key: str) -> Floats:
    with raised_as(DataError, f"'{key}' is not rows of equally many numbers", TypeError, ValueError):
        table = numpy.asarray(values, dtype=numpy.float64)
    if table.ndim != 2:
        raise DataError(f"'{key}' has the shape {list(table.shape)}; it needs rows of numbers.")
    if not (is_finite := numpy.isfinite(table)).all():
        row, column = (int(place) for place in numpy.argwhere(~is_finite)[0])
        raise DataError(f"'{key}' has {table[row, column]} in row {row}, column {column}; numbers must be finite.")
    return table


def _named_video(annotation: dict[str, Any], path: Path, camera: int, root: str) -> str:
    """The video that an annotation names, below the root or a folder that the annotation lies in."""
    name = video_of(annotation, camera, "Give --input_video or another --camera_id.")
    places = [Path(root)] if root else [*path.parents][:4]
    for place in places:
        if (place / name).is_file():
            return str(place / name)
    below = ", ".join(map(str, places))
    raise DataError(f"its video {name} is not below {below}. Give --input_video or --input_root.")


def _first_frames(video: str, raw: RawActions, reading: Reading, annotation: str) -> Tensor:
    """uint8 [3, F, H, W] in the wanted size, of a video that is of the same recording as the actions."""
    frames = raw.frames[: reading.num_given].tolist()
    if not Path(video).is_file():
        raise DataError(f"There is no input file {video}.")
    if media.kind_of(video) == "image":
        if len(frames) > 1:
            raise DataError(f"{video} is one picture, but a rollout is to begin with {len(frames)} frames.")
        found = media.read_image(video)[:, None]
    else:
        with open_clip(video) as clip:
            # No more than the frames to begin with is as good as a picture.
            if clip.num_frames not in (*raw.lengths, frames[-1] + 1):
                expected = " or ".join(map(str, raw.lengths))
                raise DataError(
                    f"{annotation} has {raw.counted}, which go with a video of {expected} frames, but {video} has"
                    f" {clip.num_frames}. Give the video of this recording, or its first frame, with --input_video."
                )
            found = clip.read(frames)
    size = reading.size or (found.shape[2], found.shape[3])
    require_sixteenths(video, size)
    return stretch(found, size)


def require_sixteenths(video: str, size: tuple[int, int]) -> None:
    """Raise for frames that are not of whole patches."""
    if any(side % 16 for side in size):
        raise DataError(
            f"{video} has frames of {size[0]}x{size[1]}, but height and width must be multiples of 16: give"
            " --resolution H,W, that of the training."
        )


def _rate(video: str, reading: Reading) -> float:
    """Frames per second of those that are taken of a video; of a picture the wanted rate."""
    is_video = Path(video).is_file() and media.kind_of(video) == "video"
    return probe(video)[1] / reading.stride if is_video else reading.fps


def _episode_of_own_code(load: LoadActions, annotation: dict[str, Any], video: str, reading: Reading) -> ActionInput:
    """The episode that the user's own code makes of an annotation: it gives {actions, initial_frame, ...}, with the
    actions already scaled."""
    found = load(annotation, video, reading.arguments)
    if absent := [key for key in ("actions", "initial_frame") if key not in found]:
        raise DataError(f"--action_load_fn gives no '{absent[0]}'; it gives {', '.join(found)}.")
    actions = torch.from_numpy(_table(found["actions"], "actions")).float()[: reading.most_actions]
    frame = torch.as_tensor(numpy.asarray(found["initial_frame"]))
    if frame.ndim != 3 or frame.shape[-1] != 3 or frame.dtype != torch.uint8 or reading.num_given > 1:
        raise DataError(
            f"--action_load_fn gives an initial_frame {list(frame.shape)} of {frame.dtype}: one frame uint8 [H, W, 3]."
        )
    given = frame.permute(2, 0, 1)[:, None]
    frames = reading.start + reading.stride * numpy.arange(1 + len(actions))
    size = reading.size or (given.shape[2], given.shape[3])
    video = str(found.get("video_path", video))
    return ActionInput(
        stretch(given, size), actions, "action_load_fn", video, frames.tolist(), fps=_rate(video, reading)
    )


# LeRobot --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LeRobotRecordings:
    """An open data set: which camera is shown, and which columns are the action."""

    data: LeRobotActionDataset

    @classmethod
    def open(
        cls, root: str, transform: ActionTransform, trained: Mapping[str, Any] | None = None, **given: Any
    ) -> "LeRobotRecordings":
        """The data set of a folder, read like ``trained``, that of the model's run; what is ``given`` goes first."""
        if transform.kind != "controller":
            raise DataError(f"{root} has commands of a controller, but this model was trained with {transform}.")
        own = {**own_arguments(LeRobotActionDataset, trained or {}, {}), **given}
        if "action_keys" in given:
            own = {key: value for key, value in own.items() if key not in ("embodiment", "units")}
        if "stride" in given:
            own.pop("frame_rate", None)
        source = LeRobotSource.open(root)
        parts = source.action_parts(own.get("action_keys"), own.get("embodiment"))
        if (width := source.width(parts)) != transform.dim:
            raise DataError(
                f"{root}: an action has {width} numbers, but this model was trained with {transform.dim}: --action_key."
            )
        # Every episode is there from its first frame on, and a broken one raises its own error.
        own |= dict(num_frames=2, start_interval=1, skip_bad_samples=True, skip_idle=False, outcome=None)
        data = LeRobotActionDataset(root, data_split="full", action_transform=transform, **own)
        require_same_actions(root, data, transform)
        warn_of_other_range(root, data, transform)
        return cls(data)

    def chosen(self, numbers: Sequence[int], trained: Mapping[str, Any] | None = None) -> list[int]:
        """These episodes, by the numbers that the files have; without numbers those that training holds out."""
        source = self.data.source.files
        known = source.episodes.numbers.tolist()
        if wrong := [number for number in numbers if number not in known]:
            raise DataError(f"--episodes {wrong[0]}: {source.info.root} has those from {min(known)} to {max(known)}.")
        if numbers:
            return list(numbers)
        share = (trained or {}).get("val_fraction", VAL_FRACTION)
        held_out = choose_episodes(source.info.splits, len(known), "val", share).tolist()
        if not held_out:
            log.warning("%s: no episode is held out of training; all %d are imagined", source.info.root, len(known))
            return known
        log.info("%s: %d of %d episodes, which training holds out", source.info.root, len(held_out), len(known))
        return [known[place] for place in held_out]

    def read(self, number: int, reading: Reading) -> ActionInput:
        """The episode of this number, from its chosen first frame on."""
        data, own, source = self.data, self.data.source, self.data.source.files
        place = source.episodes.numbers.tolist().index(number)
        name = f"{source.info.root}: {source.name(place)}"
        if place not in data.recordings:
            missing = ", ".join(map(str, source.missing_files(own.camera, [place])))
            raise DataError(f"{name}: its files are missing: {missing}.")
        with raised_as(DataError, name, DataError):
            frames = chosen_frames(int(source.episodes.lengths[place]), reading, stride=data.stride)
        fit = None if reading.size is None else partial(stretch, size=reading.size)
        first = source.frames(place, own.camera, frames[: reading.num_given].tolist(), fit=fit)
        size = (first.shape[2] // len(cameras_in(own.camera)), first.shape[3])  # of each view
        require_sixteenths(name, size)
        actions = data.action_transform.apply(own.actions(place, frames))
        columns = ", ".join(repr(part.column) for part in own.parts)
        how = own.combine if isinstance(own.combine, str) else ", ".join(own.combine)
        combined = f", {how} of every {data.stride} rows" if data.stride > 1 else ""
        return ActionInput(
            first,
            torch.from_numpy(numpy.asarray(actions)).float(),
            f"rows of {columns}{combined}, camera '{own.camera}'",
            str(source.file_of(place, own.camera)),
            frames.tolist(),
            lambda numbers: source.frames(place, own.camera, numbers, fit=partial(stretch, size=size)),
            source.info.fps / data.stride,
        )


def dataset_of_run(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The LeRobot data set that a run was trained on, as its config.yaml has it; nothing where there was none."""
    name = f".{LeRobotActionDataset.__name__}"
    nodes = mappings(tree.get("dataloader_train"))
    return next((node for node in nodes if str(node.get("_target_")).endswith(name)), {})
