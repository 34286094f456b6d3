# SPDX-License-Identifier: Apache-2.0
"""Whole episodes of recordings, whatever their layout: some pictures, the actions, the gripper, the task.

LeRobot data sets, recordings in Bridge's layout, LIBERO's files and states of the toy world. Nothing is read before it
is asked for, but the index.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray

from cosmos_predict2.actions.transforms import pose_differences
from cosmos_predict2.data.action_conditioned import dataset_libero
from cosmos_predict2.data.action_conditioned.recordings import Recordings, read_recordings
from cosmos_predict2.data.dataset_forms import annotation_folders, form_of
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.toy.videos import PATTERN, read_states
from cosmos_predict2.data.video.clips import read_frames
from cosmos_predict2.toy_world.scene import CLOSED, GOAL
from imaginaire.errors import DataError

Pictures = NDArray[numpy.uint8]
Numbers = NDArray[numpy.float64]
LIBERO_CAMERA = "agentview_rgb"

_STATE = "observation.state"


@dataclass(frozen=True)
class RecordedEpisode:
    """Row k of ``actions`` leads from picture k to picture k + 1; ``gripper`` has a number for each picture."""

    name: str
    path: str
    task: str
    num_frames: int
    pictures: Callable[[Sequence[int]], Pictures]  # uint8 [F, H, W, 3], in the size of the recording
    actions: Callable[[], Numbers]  # [num_frames - 1 or more, d], unscaled
    gripper: Callable[[], Numbers]  # [num_frames]
    known: Callable[[int], dict[str, Numbers]]  # at a picture: "state" of the robot, "goal" of the toy world


def open_episodes(
    folder: Path, *, camera: str | None = None, action_keys: Sequence[str] | None = None, gripper_dim: int = -1
) -> Sequence[RecordedEpisode]:
    """The episodes of a folder, in their order.

    ``camera`` is a name, of Bridge's layout a number; ``gripper_dim`` says which number of a LeRobot or LIBERO action
    is the gripper's.
    """
    for toy_folder in (folder, folder / "train"):
        if any(toy_folder.glob(PATTERN)):
            return list(_toy(toy_folder))
    if folder.is_dir() and any(folder.glob(f"*/*{dataset_libero.SUFFIX}")):
        return list(_libero(folder, camera or LIBERO_CAMERA, gripper_dim))
    form = form_of(folder)
    if form == "lerobot":
        return list(_lerobot(folder, camera, action_keys, gripper_dim))
    if form == "bridge":
        return list(_bridge(folder, camera))
    raise DataError(
        f"{folder} holds no recordings of a robot, but data of the form '{form}'. Episodes with actions: a LeRobot data"
        f" set, annotation/<split>/*.json, <suite>/*{dataset_libero.SUFFIX}, or {PATTERN} of the toy world."
    )


def _lerobot(
    root: Path, camera: str | None, action_keys: Sequence[str] | None, gripper_dim: int
) -> Iterator[RecordedEpisode]:
    source = LeRobotSource.open(root)
    key, parts = source.camera(camera), source.action_parts(list(action_keys) if action_keys else None)

    def episode(i: int) -> RecordedEpisode:
        def actions() -> Numbers:
            return source.parts(i, parts).astype(numpy.float64)

        def known(frame: int) -> dict[str, Numbers]:
            if _STATE not in source.info.features:
                return {}
            return {"state": source.columns(i, [_STATE])[_STATE][frame].astype(numpy.float64).reshape(-1)}

        return RecordedEpisode(
            name=source.name(i),
            path=str(source.layout.rows(i).path),
            task=source.caption(i),
            num_frames=int(source.episodes.lengths[i]),
            pictures=lambda frames: _channels_last(source.frames(i, key, list(frames)).numpy()),
            actions=actions,
            gripper=lambda: _column(actions(), gripper_dim, source.name(i)),
            known=known,
        )

    for i in range(len(source)):
        yield episode(i)


def _bridge(folder: Path, camera: str | None) -> Iterator[RecordedEpisode]:
    try:
        number = int(camera or 0)
    except ValueError as error:
        raise DataError(
            f"camera '{camera}': recordings in Bridge's layout number their cameras, 0 and so on."
        ) from error
    for annotations in annotation_folders(folder):
        recordings = read_recordings(annotations, camera_ids=(number,))
        for i in range(len(recordings)):
            yield _of_bridge(recordings, i, folder / recordings.video(i, 0))


def _of_bridge(recordings: Recordings, i: int, video: Path) -> RecordedEpisode:
    poses = recordings.poses(i)
    return RecordedEpisode(
        name=f"{recordings.folder.name}_{Path(recordings.names[i]).stem}",
        path=str(recordings.path(i)),
        task=recordings.captions[i],
        num_frames=len(poses),
        pictures=lambda frames: _channels_last(read_frames(video, list(frames)).numpy()),
        actions=lambda: pose_differences(poses[:, :6], poses[:, 6]),
        gripper=lambda: poses[:, 6],
        known=lambda frame: {"state": poses[frame]},
    )


def _libero(root: Path, camera: str, gripper_dim: int) -> Iterator[RecordedEpisode]:
    def episode(demo: dataset_libero.Demo) -> RecordedEpisode:
        def pictures(frames: Sequence[int]) -> Pictures:
            read = [dataset_libero.read_pictures(demo, camera, slice(k, k + 1), rotate=True) for k in frames]
            return numpy.concatenate(read)

        return RecordedEpisode(
            name=f"{demo.suite}_{demo.task}_{demo.name}",
            path=f"{demo.file}:{demo.name}",
            task=demo.caption,
            num_frames=demo.length,
            pictures=pictures,
            actions=lambda: dataset_libero.read_actions(demo),
            gripper=lambda: _column(dataset_libero.read_actions(demo), gripper_dim, demo.name),
            known=lambda frame: {"state": dataset_libero.read_proprio(demo)[frame]},
        )

    for suite in dataset_libero.find_suites(root):
        for file in sorted(suite.glob(f"*{dataset_libero.SUFFIX}")):
            for demo in dataset_libero.list_demos(file):
                yield episode(demo)


def _toy(folder: Path) -> Iterator[RecordedEpisode]:
    episodes, _ = read_states(folder)

    def episode(i: int) -> RecordedEpisode:
        return RecordedEpisode(
            name=f"episode_{episodes.first + i:06d}",
            path=f"{folder}: episode {i}",
            task=episodes.captions[i],
            num_frames=episodes.states.shape[1],
            pictures=lambda frames: numpy.concatenate([episodes.render(i, k, k + 1) for k in frames]),
            actions=lambda: episodes.actions[i].astype(numpy.float64),
            gripper=lambda: episodes.states[i, :, CLOSED],
            known=lambda frame: {"goal": episodes.states[i, frame, GOAL]},
        )

    for i in range(len(episodes)):
        yield episode(i)


def _channels_last(frames_C_F_H_W: NDArray[numpy.uint8]) -> Pictures:
    return numpy.ascontiguousarray(frames_C_F_H_W.transpose(1, 2, 3, 0))


def _column(rows: Numbers, dim: int, name: str) -> Numbers:
    if not -rows.shape[1] <= dim < rows.shape[1]:
        raise DataError(f"{name}: gripper_dim={dim} (--gripper_dim), but an action has {rows.shape[1]} numbers.")
    return rows[:, dim]
