# SPDX-License-Identifier: Apache-2.0
"""Recordings of a robot: whether their files are there, can be decoded and fit the states or the index; and a table of
their actions: what each number is called, in which range it lies, and what a model will see.

For controller actions (LeRobot) these are the recorded rows; for poses (Bridge's layout) the differences of successive
ones, in metres and radians, before they are scaled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from cosmos_predict2.actions.statistics import (
    DatasetStatistics,
    column_lines,
    dataset_statistics,
    is_constant,
    order_one_transform,
    outliers,
    sampled_statistics,
)
from cosmos_predict2.actions.transforms import ActionTransform, Floats, pose_differences, relative_pose
from cosmos_predict2.data.action_conditioned.recordings import read_annotation, recording_of
from cosmos_predict2.data.lerobot.info import Part
from cosmos_predict2.data.lerobot.reader import LeRobotSource, number_names
from cosmos_predict2.tools.check.classic_faults import classic_faults
from cosmos_predict2.tools.check.clips import ClipFacts, ClipJob, check_all, check_clip, fault
from cosmos_predict2.tools.check.episodes import action_choices, read_sample, state_parts
from imaginaire.errors import DataError
from imaginaire.findings import Finding

POSE_NAMES = ("dx (m)", "dy (m)", "dz (m)", "droll", "dpitch", "dyaw", "gripper")
MOST_RECORDINGS = 2000  # of Bridge's layout that statistics are computed of, evenly spread
ROUNDING = 1e-9
SPARE = 0.05  # of a video of another rate than the table's may be behind the last row: its camera stops by itself
OF_OWN = "dataloader_train=bridge_json_train (or dataloader_train.dataset.action_transform=statistics)"
LEAST_SEEN, MOST_SEEN = 0.1, 10.0  # of what a network sees of usual differences
FARTHEST = 0.5  # metres from one frame to the next that an arm hardly moves


@dataclass(frozen=True)
class ActionTable:
    """Statistics of the rows of an action, with a name for each of its numbers."""

    title: str
    names: tuple[str, ...]
    statistics: DatasetStatistics
    transform: ActionTransform  # that training uses for own data by default
    of_units: tuple[str, ...] = ()  # notes on units that are unlikely
    published: str = ""  # what becomes of this layout in published training

    def lines(self) -> list[str]:
        """Lines for people: the kind of actions, a row for each number, and the model's view of them."""
        counted = self.statistics
        return [
            f"{self.title}: {len(self.names)} numbers, {counted.num_transitions} rows of {counted.num_trajectories}"
            " recordings",
            *column_lines(counted.action, self.names),
            f"seen by a model as {self.transform}",
            *([self.published] if self.published else []),
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"title": self.title, "names": list(self.names), **self.statistics.to_dict()}

    @property
    def fault(self) -> str:
        """The reason why training on these actions is pointless; empty without one."""
        is_useless = is_constant(self.statistics.action)
        return f"{self.title}: no number ever changes, so a model can learn nothing" if is_useless else ""

    def notes(self) -> Iterator[str]:
        """Possible faults of the numbers."""
        yield from self.of_units
        columns = self.statistics.action
        for k, value in outliers(columns, self.transform).items():
            yield (
                f"{self.title}: {self.names[k]} has a row with {value:g}, where 98 % lie between {columns.q01[k]:g} and"
                f" {columns.q99[k]:g}: look at that recording"
            )
        constant = [name for name, low, high in zip(self.names, columns.min, columns.max) if high - low < ROUNDING]
        if constant and not self.fault:
            yield f"{self.title}: {', '.join(constant)} never change{'s' if len(constant) == 1 else ''}"


def lerobot_tables(source: LeRobotSource) -> list[ActionTable]:
    """A table of the action that training takes by itself, or of each candidate column where the user must choose.

    Raises where a row holds no number.
    """
    tables = []
    for parts in action_choices(source.info):

        def rows_of(i: int, parts: Sequence[Part] = parts) -> Floats:
            place = source.layout.rows(i).path
            if not place.is_file():
                return numpy.empty((0, 1))
            rows = source.parts(i, parts).astype(numpy.float64)
            source.parts(i, source.state_parts or parts)  # raises where its width is another one
            if not numpy.isfinite(rows).all():
                row = int(numpy.argmin(numpy.isfinite(rows).all(axis=1)))
                raise DataError(
                    f"{place}: {source.name(i)} has a number that is not finite in row {row} of its action. Mend or"
                    " remove the episode."
                )
            return rows

        statistics = sampled_statistics(source.episodes.lengths, rows_of)
        names = tuple(name for part in parts for name in number_names(source.info, part))
        title = ", ".join(f"'{part.column}'" for part in parts)
        tables.append(ActionTable(title, names, statistics, order_one_transform(statistics.action)))
    return tables


def classic_faults_of(source: LeRobotSource, *, with_pictures: bool) -> Iterator[Finding]:
    """Findings on what actions, states and pictures mean, see `classic_faults`."""
    choices = action_choices(source.info), [state_parts(source.info)]
    actions, states = (
        [name for parts in each for part in parts for name in number_names(source.info, part)] for each in choices
    )
    episodes = read_sample(source, with_pictures=with_pictures)
    yield from classic_faults(str(source.info.root), source.info.fps, episodes, actions, states)


def bridge_table(annotations: Sequence[Path]) -> ActionTable | None:
    """The pose differences of recordings in Bridge's layout; None where no file can be read (which is a fault)."""
    chosen = numpy.linspace(0, len(annotations) - 1, min(len(annotations), MOST_RECORDINGS)).round().astype(int)
    rows, largest_angle = [], 0.0
    for place in chosen.tolist():
        try:
            recording = recording_of(annotations[place], read_annotation(annotations[place]), camera_ids=())
        except DataError:
            continue
        if len(recording.poses) > 1:
            rows.append(pose_differences(recording.poses[:, :6], recording.poses[:, 6]) + 0.0)  # no minus zeros
            largest_angle = max(largest_angle, float(numpy.abs(recording.poses[:, 3:6]).max()))
    if not rows:
        return None
    statistics, published = dataset_statistics(rows), relative_pose()
    notes = [*_unit_notes(numpy.concatenate(rows), largest_angle)]
    columns = statistics.action
    seen = numpy.abs(published.apply([columns.q01, columns.q99]))[:, :6].max()
    if seen and not LEAST_SEEN <= seen <= MOST_SEEN:
        notes.append(
            f"times 20, as released weights have them, 98 % of the differences of 'state' reach {seen:.2g}, where a"
            f" network expects the order of 1: train with {OF_OWN}"
        )
    published_by = f"with {OF_OWN}; with bridge_train as {published}, which released weights have"
    transform = order_one_transform(columns, "relative_pose")
    return ActionTable("differences of 'state'", POSE_NAMES, statistics, transform, tuple(notes), published_by)


def _unit_notes(rows: Floats, largest_angle: float) -> Iterator[str]:
    """Units of poses that are unlikely."""
    farthest = float(numpy.linalg.norm(rows[:, :3], axis=1).max())
    if farthest > FARTHEST:
        yield (
            f"'state': from one frame to the next a position changes by {farthest:g}; metres are expected, of which an"
            " arm hardly moves half a one in a frame. Are these millimetres, or frames left out?"
        )
    if largest_angle > 2 * numpy.pi:
        yield f"'state': angles reach {largest_angle:g}; radians are expected. Are these degrees?"
    low, high = float(rows[:, 6].min()), float(rows[:, 6].max())
    if low < 0 or high > 1:
        yield f"the gripper's states lie between {low:g} and {high:g}; 0 (open) to 1 (closed) is expected"


# --- files


@dataclass(frozen=True)
class RecordingJob:
    """A recording in Bridge's layout."""

    annotation: Path
    root: Path  # that the paths of videos count from
    num_frames: int | None = None
    is_fast: bool = False


def check_recording(job: RecordingJob) -> list[ClipFacts]:
    """One entry for each camera; faults of the annotation are with the first, which may be no clip."""
    path = job.annotation
    try:
        annotation = read_annotation(path)
        recording = recording_of(path, annotation)
    except DataError as error:
        return [ClipFacts(stem=path.stem, path="", faults=[fault(path, "annotation", str(error))])]
    faults = [fault(path, "annotation", f"{path}: {text}.") for text in _annotation_faults(annotation)]
    num_states = len(recording.poses)
    if job.num_frames is not None and num_states < job.num_frames:
        message = f"{path} has {num_states} states, but training takes {job.num_frames} frames."
        faults.append(fault(path, "too_short", message))
    facts = []
    for camera, entry in enumerate(annotation["videos"]):
        name = entry.get("video_path") if isinstance(entry, dict) else entry
        if not isinstance(name, str) or not name:
            faults.append(fault(path, "annotation", f"{path}: video {camera} has no 'video_path'."))
            continue
        video = job.root / name
        if not video.is_file():
            faults.append(fault(video, "missing_video", f"{video} is missing; {path} names it."))
            continue
        found = check_clip(ClipJob(path.stem, video, is_fast=job.is_fast))
        if found.height and found.num_frames < num_states:
            message = f"{video} has {found.num_frames} frames for the {num_states} states of {path}."
            found.faults.append(fault(video, "too_short", message))
        facts.append(found)
    return [*facts, ClipFacts(stem=path.stem, path="", faults=faults)] if faults else facts


def _annotation_faults(annotation: dict[str, Any]) -> Iterator[str]:
    num_states, actions = len(annotation["state"]), annotation.get("action")
    if num_states == 0:
        yield "'state' is empty: the recording has no frames"
    elif actions is None:
        return
    elif not isinstance(actions, list) or len(actions) not in (num_states - 1, num_states):
        count = len(actions) if isinstance(actions, list) else type(actions).__name__
        yield f"'action' has {count} rows for {num_states} states; {num_states - 1} are expected"
    else:
        try:
            is_finite = bool(numpy.isfinite(numpy.array(actions, dtype=numpy.float64)).all())
        except (TypeError, ValueError):
            is_finite = False
        if not is_finite:
            yield "'action' holds something else than rows of finite numbers"


def check_videos(source: LeRobotSource, *, is_fast: bool, workers: int | None) -> list[ClipFacts]:
    """One entry for each video file of each camera; those of a camera whose pictures are in the tables are none."""
    jobs = [
        ClipJob(f"{camera}/{path.stem}", path, is_fast=is_fast)
        for camera in source.info.cameras
        if source.info.is_video(camera)
        for path in dict.fromkeys(source.file_of(i, camera) for i in range(len(source)))
        if path.is_file()
    ]
    return check_all(check_clip, jobs, source.info.root, workers)


def index_faults(source: LeRobotSource, clips: list[ClipFacts], num_frames: int | None = None) -> Iterator[Finding]:
    """Files that are not there, episodes that are too short, and videos that are shorter or faster than is stated."""
    root, lengths = source.info.root, source.episodes.lengths.tolist()
    missing = {path for camera in source.info.cameras for path in source.missing_files(camera)}
    for path in sorted(missing):
        yield fault(path, "missing_file", f"{path} does not exist; the index of {root} names it.")
    tables = {source.layout.rows(i).path for i in range(len(lengths))}
    if others := sorted({*(root / "data").rglob("*.parquet")} - tables):
        message = f"{root}: the index has {len(lengths)} episodes and names none of {len(others)} tables, such as"
        message += f" {others[0]}. Was it written over? Restore meta/, or remove them."
        yield fault(others[0], "not_in_index", message)
    for i, length in enumerate(lengths):
        if num_frames is not None and length < num_frames:
            message = f"{root}: {source.name(i)} has {length} frames, but training takes {num_frames}."
            yield fault(source.layout.rows(i).path, "too_short", message)
    by_path = {facts.path: facts for facts in clips if facts.height}
    for camera in filter(source.info.is_video, source.info.cameras):
        rates = set()
        for i in range(len(lengths)):
            try:
                clip = source.layout.clip(i, camera)
                if (facts := by_path.get(str(clip.path))) is None:
                    continue
                if facts.path not in rates:
                    rates.add(facts.path)
                    source.check_rate(camera, clip.path, facts.num_frames, facts.fps)
                source.clip(i, camera)  # raises where the index does not agree with itself
            except DataError as error:
                yield fault(source.file_of(i, camera), "index", str(error))
                continue
            if (problem := source.length_problem(i, camera, clip, facts.num_frames)) is not None:
                cure = "Record the episode again, remove it, or cut the rows that have no frame."
                yield fault(facts.path, "too_short", f"{problem} {cure}")
            rate = max(1.0, source.info.video_fps(camera) / source.info.fps)
            is_same_rate = source.info.video_fps(camera) == source.info.fps
            most = lengths[i] if is_same_rate else lengths[i] * rate * (1 + SPARE) + 1
            if clip.seconds is None and facts.num_frames > most:  # a file for each episode
                message = f"{facts.path} has {facts.num_frames} frames, but {source.name(i)} has {lengths[i]} rows of"
                message += f" actions, which are of {lengths[i] * rate:g} frames. Cut the frames that have no row, or"
                message += " add rows: that of a last picture may have the action before it again."
                yield fault(facts.path, "too_long", message)
