# SPDX-License-Identifier: Apache-2.0
"""One recording of a robot: its annotation, and whether its videos are there and fit the states."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from cosmos_predict2.data.action_conditioned.recordings import read_annotation, read_recording
from cosmos_predict2.tools.check.clips import ClipFacts, ClipJob, check_clip, fault
from imaginaire.errors import DataError


@dataclass(frozen=True)
class RecordingJob:
    annotation: Path
    root: Path  # that the paths of videos count from
    num_frames: int | None = None
    is_fast: bool = False


def check_recording(job: RecordingJob) -> list[ClipFacts]:
    """One entry for each camera; faults of the annotation are with the first, which may be no clip."""
    path = job.annotation
    try:
        annotation = read_annotation(path)
        recording = read_recording(path)
        assert recording is not None, "no recording was left out"
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


def _annotation_faults(annotation: dict[str, Any]) -> list[str]:
    faults = []
    num_states = len(annotation["state"])
    if num_states == 0:
        return ["'state' is empty: the recording has no frames"]
    actions = annotation.get("action")
    if actions is not None:
        if not isinstance(actions, list) or len(actions) not in (num_states - 1, num_states):
            count = len(actions) if isinstance(actions, list) else type(actions).__name__
            faults.append(f"'action' has {count} rows for {num_states} states; {num_states - 1} are expected")
        elif not _is_finite(actions):
            faults.append("'action' holds something else than rows of finite numbers")
    return faults


def _is_finite(rows: list[Any]) -> bool:
    try:
        return bool(numpy.isfinite(numpy.array(rows, dtype=numpy.float64)).all())
    except (TypeError, ValueError):
        return False
