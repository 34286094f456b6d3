# SPDX-License-Identifier: Apache-2.0
"""A LeRobot data set: whether its files are there, can be decoded and have the lengths of its index."""

from collections.abc import Iterator

from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.tools.check.clips import ClipFacts, ClipJob, check_all, check_clip, fault
from imaginaire.errors import DataError
from imaginaire.findings import Finding


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
                yield fault(facts.path, "too_short", problem)
