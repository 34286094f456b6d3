# SPDX-License-Identifier: Apache-2.0
"""LIBERO's demonstrations made ready for training: as they are, with captions and statistics beside them, or written
out in the Bridge layout, where poses give the actions.

form "keep", in SOURCE itself (read by LiberoDataset):
    SOURCE/<suite>/<task>_demo.hdf5                    as published
    SOURCE/metas/<task>.txt                            captions, for get_t5_embeddings

form "bridge", in another folder (read by ActionConditionedDataset):
    OUT/annotation/{train,val}/<suite>-<task>-demo_<k>.json
    OUT/videos/{train,val}/<suite>-<task>-demo_<k>/<camera>.mp4

and with both dataset_statistics.json (of the controller's actions, by suite) and dataset.json, written last.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from cosmos_predict2.actions.statistics import dataset_statistics
from cosmos_predict2.actions.transforms import controller, relative_pose
from cosmos_predict2.data.action_conditioned.dataset_libero import (
    FPS,
    SUFFIX,
    Demo,
    caption,
    find_suites,
    is_validation,
    list_demos,
    read_actions,
    read_pictures,
    read_poses,
    read_proprio,
)
from cosmos_predict2.data.video.media import write_video
from cosmos_predict2.tools.jobs import Outcome, run_jobs
from cosmos_predict2.tools.prepare.records import RECORD, require_own, require_settings, write_json, write_text
from imaginaire import storage
from imaginaire.errors import ConfigError, DataError
from imaginaire.storage import repositories

log = logging.getLogger(__name__)

REPOSITORY = "yifengzhu-hf/LIBERO-datasets"
SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
FORMS = ("bridge", "keep")
FORMAT = "libero/1"
STATISTICS = "dataset_statistics.json"

_BYTES_PER_PIXEL = 0.3  # of a clip that is small and sharp
_MASK = [True] * 6 + [False]  # policies do not normalise the gripper's command


@dataclass(frozen=True)
class LiberoSettings:
    """Settings of the written demonstrations; two folders of equal settings are equal."""

    form: str = "bridge"
    suites: tuple[str, ...] | None = None
    cameras: tuple[str, ...] = ("agentview_rgb", "eye_in_hand_rgb")
    rotate: bool = True
    val_every: int = 10

    def __post_init__(self) -> None:
        if not self.cameras:
            raise ConfigError("One camera at least is needed.")
        if self.val_every < 0 or self.val_every == 1:
            raise ConfigError(f"val_every={self.val_every}; 2 or more, or 0 for no validation.")


def download(repo_id: str, source: Path, suites: tuple[str, ...] | None, *, dry_run: bool = False) -> None:
    """Fetch the suites' files into ``source``, as far as they are not there."""
    patterns = [f"{suite}/*{SUFFIX}" for suite in suites or SUITES]
    repositories.fetch_absent(repositories.list_files(repo_id, patterns=patterns), source, dry_run=dry_run)


def prepare(
    source: Path, out: Path, settings: LiberoSettings, *, workers: int | None = None, dry_run: bool = False
) -> Outcome[Any]:
    """Write what is missing: a result for each demonstration (bridge) or task (keep), a fault for each that failed."""
    folders = find_suites(source, settings.suites)
    settings = replace(settings, suites=tuple(sorted(folder.name for folder in folders)))
    files = [file for folder in folders for file in sorted(folder.glob(f"*{SUFFIX}"))]
    listed = run_jobs(list_demos, files, what="listing demonstrations", workers=0)
    demos = [demo for found in listed.results for demo in found]
    if settings.form == "keep":
        outcome = _keep(source, demos, settings, dry_run, is_whole=not listed.faults)
    else:
        outcome = _export(demos, out, settings, workers, dry_run, is_whole=not listed.faults)
    return Outcome(outcome.results, [*listed.faults, *outcome.faults])


# ---- form keep -------------------------------------------------------------------------------------------------------


def _keep(source: Path, demos: list[Demo], settings: LiberoSettings, dry_run: bool, *, is_whole: bool) -> Outcome[Any]:
    tasks = {demo.task: caption(demo.task) for demo in demos}
    if dry_run:
        log.info("%s: would write %d captions, statistics and %s", source, len(tasks), RECORD)
        return Outcome(list(tasks))
    for task, text in tasks.items():
        write_text(source / "metas" / f"{task}.txt", text + "\n")
    outcome: Outcome[Any] = Outcome(list(tasks))
    outcome.faults += _finish(source, demos, settings, is_whole)
    return outcome


# ---- form bridge -----------------------------------------------------------------------------------------------------


def _export(
    demos: list[Demo], out: Path, settings: LiberoSettings, workers: int | None, dry_run: bool, *, is_whole: bool
) -> Outcome[Any]:
    if (found := require_own(out, FORMAT)) is not None:
        require_settings(out, found, _settings(settings))
    place = partial(_annotation_path, out, settings)
    todo = [demo for demo in demos if not place(demo).exists()]
    needed = _bytes_needed(todo, settings.cameras)
    size = storage.readable_bytes(needed)
    log.info("%s: %d of %d demonstrations to write, about %s", out, len(todo), len(demos), size)
    if dry_run:
        return Outcome(demos)
    storage.require_space(out, needed, "Writing LIBERO out")
    _write_record(out, settings, demos, is_complete=False)
    written = run_jobs(partial(_write_demo, out, settings), todo, what="writing demonstrations", workers=workers)
    done = [demo for demo in demos if place(demo).exists()]
    outcome: Outcome[Any] = Outcome(list(done), written.faults)
    if not written.faults:
        outcome.faults += _finish(out, done, settings, is_whole)
    return outcome


def _write_demo(out: Path, settings: LiberoSettings, demo: Demo) -> None:
    """Write the clips of a demonstration, then its annotation."""
    poses, closed = read_poses(demo)
    actions = read_actions(demo)
    videos = []
    for camera in settings.cameras:
        pictures = read_pictures(demo, camera, slice(None), rotate=settings.rotate)
        video = f"videos/{_split(settings, demo)}/{_name(demo)}/{camera}.mp4"
        frames = torch.from_numpy(numpy.ascontiguousarray(pictures.transpose(3, 0, 1, 2)))
        write_video(out / video, frames, FPS)
        videos.append({"video_path": video})
    annotation = {
        "episode_id": _name(demo),
        "texts": [demo.caption],
        "videos": videos,
        "state": poses.round(7).tolist(),
        "continuous_gripper_state": closed.round(6).tolist(),
        "action": actions[:-1].round(7).tolist(),
        "suite": demo.suite,
        "task": demo.task,
        "cameras": list(settings.cameras),
        "is_rotated": settings.rotate,
    }
    write_json(_annotation_path(out, settings, demo), annotation, indent=None)


def _name(demo: Demo) -> str:
    return f"{demo.suite}-{demo.task}-{demo.name}"


def _split(settings: LiberoSettings, demo: Demo) -> str:
    return "val" if is_validation(demo.number, settings.val_every) else "train"


def _annotation_path(out: Path, settings: LiberoSettings, demo: Demo) -> Path:
    return out / "annotation" / _split(settings, demo) / f"{_name(demo)}.json"


def _bytes_needed(demos: list[Demo], cameras: Sequence[str]) -> int:
    """Estimated bytes of the clips and annotations, by the pictures of the first that has them; raises if none has."""
    fault: DataError | None = None
    for demo in demos:
        try:
            first = [read_pictures(demo, camera, slice(0, 1), rotate=False) for camera in cameras]
            pixels = sum(int(numpy.prod(picture.shape[1:3])) for picture in first)
            return sum(int(each.length * (pixels * _BYTES_PER_PIXEL + 200) + 10_000) for each in demos)
        except DataError as error:
            fault = fault or error
    if fault is not None:
        raise fault
    return 0


# ---- what both end with ----------------------------------------------------------------------------------------------


def _finish(folder: Path, demos: list[Demo], settings: LiberoSettings, is_whole: bool) -> list[str]:
    """Statistics and the record, which is complete unless a file could not be read; gives the faults."""
    statistics, faults = {}, []
    training = [demo for demo in demos if _split(settings, demo) == "train"]
    for suite in sorted({demo.suite for demo in training}):
        used = [demo for demo in training if demo.suite == suite]
        try:
            of_suite = dataset_statistics(map(read_actions, used), map(read_proprio, used), mask=_MASK)
            statistics[suite] = of_suite.to_dict()
        except DataError as error:
            faults.append(f"{suite}: {error}")
    write_json(folder / STATISTICS, statistics)
    if not faults:
        _write_record(folder, settings, demos, is_complete=is_whole)
    return faults


def _write_record(folder: Path, settings: LiberoSettings, demos: list[Demo], *, is_complete: bool) -> None:
    val = sum(_split(settings, demo) == "val" for demo in demos)
    record = {
        "format": FORMAT,
        "is_complete": is_complete,
        **_settings(settings),
        "fps": FPS,
        "action_transform": (controller() if settings.form == "keep" else relative_pose()).to_dict(),
        "counts": {"train": len(demos) - val, "val": val, "frames": sum(demo.length for demo in demos)},
    }
    write_json(folder / RECORD, record)


def _settings(settings: LiberoSettings) -> dict[str, Any]:
    return {
        "form": settings.form,
        "suites": list(settings.suites or ()),
        "cameras": list(settings.cameras),
        "is_rotated": settings.rotate if settings.form == "bridge" else False,  # "keep" turns nothing on disk
        "val_every": settings.val_every,
    }
