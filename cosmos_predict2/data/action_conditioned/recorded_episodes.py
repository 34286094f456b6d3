# SPDX-License-Identifier: Apache-2.0
"""Whole episodes of recordings, whatever their layout: some pictures, the actions, the gripper, the task.

LeRobot data sets, recordings in Bridge's layout, LIBERO's files and states of the toy world. Nothing is read before it
is asked for, but the index.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray

from cosmos_predict2.actions.transforms import UNKNOWN, ActionContract, pose_differences
from cosmos_predict2.data.action_conditioned import dataset_libero
from cosmos_predict2.data.action_conditioned.recordings import BridgeRecordings, read_recordings
from cosmos_predict2.data.clip_dataset import Windows
from cosmos_predict2.data.dataset_forms import TOY_STATES, annotation_folders, form_of
from cosmos_predict2.data.lerobot.info import STATE
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.lerobot.robots import units_of
from cosmos_predict2.data.samples import evenly
from cosmos_predict2.data.video.clips import read_frames
from cosmos_predict2.data.views import cameras_in, stacked, stretched
from cosmos_predict2.tokenizers.sizes import small_size
from imaginaire.errors import ConfigError, DataError

Pictures = NDArray[numpy.uint8]
Numbers = NDArray[numpy.float64]
LIBERO_CAMERA = "agentview_rgb"


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
    contract: ActionContract = UNKNOWN


def open_episodes(
    folder: Path,
    *,
    camera: str | None = None,
    action_keys: Sequence[str] | None = None,
    gripper_dim: int = -1,
    embodiment: str | None = None,
    units: str | None = None,
) -> Sequence[RecordedEpisode]:
    """The episodes of a folder, in their order.

    ``camera`` is a name, of Bridge's layout a number; of LeRobot and LIBERO several have views (`data.views`).
    ``gripper_dim`` is the index of the gripper in an action of LeRobot or LIBERO. ``embodiment`` and ``units`` of a
    LeRobot data set are those of `LeRobotActionDataset`.
    """
    toy_folder = next((one for one in (folder, folder / "train") if any(one.glob(TOY_STATES))), None)
    is_libero = folder.is_dir() and any(folder.glob(f"*/*{dataset_libero.SUFFIX}"))
    form = "" if toy_folder or is_libero else form_of(folder)
    if form == "lerobot":
        return list(_lerobot(folder, camera, action_keys, gripper_dim, embodiment, units))
    if embodiment or units:
        raise ConfigError(f"{folder} is no LeRobot data set, of which embodiment and units are: leave them out.")
    if toy_folder:
        return list(_toy(toy_folder))
    if is_libero:
        return list(_libero(folder, camera or LIBERO_CAMERA, gripper_dim))
    if form == "bridge":
        return list(_bridge(folder, camera))
    raise DataError(
        f"{folder} holds no recordings of a robot, but data of the form '{form}'. Episodes with actions: a LeRobot data"
        f" set, annotation/<split>/*.json, <suite>/*{dataset_libero.SUFFIX}, or {TOY_STATES} of the toy world."
    )


@dataclass(frozen=True)
class EpisodeWindows:
    """Windows of successive pictures, at one size, with the actions that lead from each picture to the next."""

    pictures: Pictures  # [N, F, H, W, 3]
    actions: Numbers  # [N, F - 1, d], unscaled
    episodes: list[int]  # of each window the number of its episode

    def __len__(self) -> int:
        return len(self.pictures)

    def evenly(self, num: int) -> "EpisodeWindows":
        """At most so many of them, evenly apart."""
        rows = evenly(len(self), num)
        return EpisodeWindows(self.pictures[rows], self.actions[rows], [self.episodes[i] for i in rows])


def read_windows(
    episodes: Sequence[RecordedEpisode],
    chosen: Sequence[int],
    *,
    num: int,
    num_frames: int,
    size: tuple[int, int] | None = None,
    num_views: int = 1,
) -> EpisodeWindows:
    """At most ``num`` windows of as many of the ``chosen`` episodes as can be, evenly apart in each.

    ``size`` of each view is (height, width); without it, that which `small_size` makes of the first picture.
    """
    windows = Windows([episodes[i].num_frames for i in chosen], num_frames, what="recordings")
    if size is None:
        height, width = episodes[chosen[0]].pictures([0]).shape[1:3]
        size = small_size(height // num_views, width)
    of_episode: dict[int, list[NDArray[numpy.int64]]] = {}
    for place in windows.spread(num):
        row, frames = windows[place]
        of_episode.setdefault(chosen[row], []).append(frames)
    pictures, actions, origins = [], [], []
    for number, found in of_episode.items():
        episode, rows = episodes[number], episodes[number].actions()
        shown = numpy.unique(numpy.concatenate(found))  # each of them is read once
        pictures_3_F_H_W = torch.from_numpy(episode.pictures(shown.tolist())).permute(3, 0, 1, 2)
        read = stretched(pictures_3_F_H_W, size, num_views)
        for frames in found:
            pictures.append(read[:, numpy.searchsorted(shown, frames)].permute(1, 2, 3, 0).numpy())
            actions.append(rows[frames[0] : frames[-1]])
            origins.append(number)
        if not all(numpy.isfinite(part).all() for part in actions[-len(found) :]):
            raise DataError(f"{episode.path}: {episode.name} has actions that are not finite.")
    return EpisodeWindows(numpy.stack(pictures), numpy.stack(actions), origins)


def _lerobot(
    root: Path,
    camera: str | None,
    action_keys: Sequence[str] | None,
    gripper_dim: int,
    embodiment: str | None,
    units: str | None,
) -> Iterator[RecordedEpisode]:
    source = LeRobotSource.open(root)
    key, parts = source.camera(camera), source.action_parts(list(action_keys) if action_keys else None, embodiment)
    contract = source.action_contract(parts, state=source.state_parts)
    contract = replace(contract, units=units_of(embodiment, units))

    def episode(i: int) -> RecordedEpisode:
        def actions() -> Numbers:
            return source.parts(i, parts).astype(numpy.float64)

        def known(frame: int) -> dict[str, Numbers]:
            if STATE not in source.info.features:
                return {}
            return {"state": source.columns(i, [STATE])[STATE][frame].astype(numpy.float64).reshape(-1)}

        return RecordedEpisode(
            name=source.name(i),
            path=str(source.layout.rows(i).path),
            task=source.caption(i),
            num_frames=int(source.episodes.lengths[i]),
            pictures=lambda frames: _channels_last(source.frames(i, key, list(frames)).numpy()),
            actions=actions,
            gripper=lambda: _column(actions(), gripper_dim, source.name(i)),
            known=known,
            contract=contract,
        )

    return map(episode, range(len(source)))


def _bridge(folder: Path, camera: str | None) -> Iterator[RecordedEpisode]:
    try:
        numbers = tuple(int(name) for name in cameras_in(camera or "0"))
    except ValueError as error:
        raise DataError(
            f"camera '{camera}': recordings in Bridge's layout number their cameras, 0 and so on."
        ) from error
    for annotations in annotation_folders(folder):
        recordings = read_recordings(annotations, camera_ids=numbers)
        for i in range(len(recordings)):
            yield _of_bridge(recordings, i, [folder / recordings.video(i, k) for k in range(len(numbers))])


def _of_bridge(recordings: BridgeRecordings, i: int, videos: Sequence[Path]) -> RecordedEpisode:
    poses = recordings.poses(i)

    def pictures(frames: Sequence[int]) -> Pictures:
        return _channels_last(stacked([read_frames(video, list(frames)) for video in videos]).numpy())

    return RecordedEpisode(
        name=f"{recordings.folder.name}_{Path(recordings.names[i]).stem}",
        path=str(recordings.path(i)),
        task=recordings.captions[i],
        num_frames=len(poses),
        pictures=pictures,
        actions=lambda: pose_differences(poses[:, :6], poses[:, 6]),
        gripper=lambda: poses[:, 6],
        known=lambda frame: {"state": poses[frame]},
    )


def _libero(root: Path, camera: str, gripper_dim: int) -> Iterator[RecordedEpisode]:
    def episode(demo: dataset_libero.Demo) -> RecordedEpisode:
        def pictures(frames: Sequence[int]) -> Pictures:
            read = [dataset_libero.read_views(demo, camera, slice(k, k + 1), rotate=True) for k in frames]
            return _channels_last(torch.cat(read, dim=1).numpy())

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

    return map(episode, dataset_libero.all_demos(root))


def _toy(folder: Path) -> Iterator[RecordedEpisode]:
    from cosmos_predict2.data.toy.videos import read_states  # of recordings of a robot nothing of the toy world is used
    from cosmos_predict2.toy_world.physics import CLOSED, GOAL

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

    return map(episode, range(len(episodes)))


def _channels_last(frames_C_F_H_W: NDArray[numpy.uint8]) -> Pictures:
    return numpy.ascontiguousarray(frames_C_F_H_W.transpose(1, 2, 3, 0))


def _column(rows: Numbers, dim: int, name: str) -> Numbers:
    if not -rows.shape[1] <= dim < rows.shape[1]:
        raise DataError(f"{name}: gripper_dim={dim} (--gripper_dim), but an action has {rows.shape[1]} numbers.")
    return rows[:, dim]
