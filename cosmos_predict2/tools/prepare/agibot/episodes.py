# SPDX-License-Identifier: Apache-2.0
"""AgiBotWorld-Alpha: fetching the episodes of some tasks and keeping one camera of them.

    <data_dir>/observations/<task>/*.tar                           as fetched; each holds <episode>/videos/<camera>.mp4
    <data_dir>/observations/<task>/<episode>/videos/<camera>.mp4   what is kept
    <data_dir>/observations/<task>/.unpacked/<archive>.json        the archive is done: its size, camera and episodes
    <data_dir>/task_info/task_<task>.json                          what the captions can be made of

Archives are worked through one by one, and only what is kept is written out of them, so the disk never has to hold all
of them at once. An episode without the wanted camera keeps everything it has.
"""

import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from cosmos_predict2.tools.jobs import num_cores, run_jobs
from cosmos_predict2.tools.prepare.records import read_record, write_json
from cosmos_predict2.tools.prepare.tar_safety import extract_checked, member_files
from imaginaire import storage
from imaginaire.errors import ConfigError, DataError, near, raised_as
from imaginaire.storage import repositories

log = logging.getLogger(__name__)

REPOSITORY = "agibot-world/AgiBotWorld-Alpha"
LICENCE = "AgiBot World COMMUNITY LICENSE AGREEMENT"
CAMERA = "head_center_fisheye_color"
MOST_ARCHIVES = 4  # fetched and unpacked at the same time: more only need more disk
KEPT_SHARE = 0.05  # of an archive's bytes, at most, is one camera of its episodes (about 2 GB of 100)


@dataclass(frozen=True)
class AgibotSource:
    """Tasks and camera of the data set, and its folder."""

    data_dir: Path
    task_ids: tuple[str, ...]
    camera: str = CAMERA

    def __post_init__(self) -> None:
        for task in self.task_ids:
            if not task.isdecimal():
                raise ConfigError(f"--task_ids: '{task}' is not a task's number, such as 327.")
        if not self.camera or PurePosixPath(self.camera).name != self.camera or self.camera.endswith(".mp4"):
            raise ConfigError(f"--camera: '{self.camera}' is not a camera's name, such as {CAMERA}.")

    @property
    def output(self) -> Path:
        """The training folder, beside ``data_dir``."""
        named = self.data_dir if self.data_dir.name not in ("", "..") else self.data_dir.resolve()
        return named.parent / f"agibot_{self.camera}"

    def observations(self, task: str) -> Path:
        return self.data_dir / "observations" / task

    def task_info(self, task: str) -> Path:
        return self.data_dir / "task_info" / f"task_{task}.json"

    def episodes(self) -> list[Path]:
        """The episodes' folders of all tasks, in order; a task without any is an error."""
        found = []
        for task in self.task_ids:
            episodes = _folders(self.observations(task))
            if not episodes:
                tasks = [path.name for path in _folders(self.data_dir / "observations") if _folders(path)]
                hint = near(task, tasks) if tasks else " Run it without flags first, or give --source."
                raise DataError(f"{self.observations(task)} holds no episode.{hint}")
            found += sorted(episodes, key=lambda path: (len(path.name), path.name))
        return found


# Fetching -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Archive:
    listing: repositories.Listing
    name: str
    source: AgibotSource
    keep_tar: bool

    @property
    def path(self) -> Path:
        return self.source.data_dir / self.name

    @property
    def marker(self) -> Path:
        return self.path.parent / ".unpacked" / f"{self.path.name}.json"

    @property
    def size(self) -> int:
        return self.listing.sizes[self.name]

    @property
    def is_done(self) -> bool:
        """True if its episodes lie here, unpacked from this very archive."""
        made = read_record(self.marker) or {}
        if made.get("size") != self.size or made.get("camera") != self.source.camera:
            return False
        return all(camera_path(self.path.parent / e, self.source.camera).is_file() for e in made.get("episodes", [""]))


def fetch(source: AgibotSource, *, repo_id: str, keep_tar: bool, workers: int | None, dry_run: bool) -> list[str]:
    """Fetch and unpack the tasks' archives and descriptions; one sentence for each archive that failed."""
    patterns = [p for task in source.task_ids for p in (f"observations/{task}/*.tar", f"task_info/task_{task}.json")]
    listing = repositories.list_files(repo_id, patterns=patterns, licence=LICENCE)
    archives = [_Archive(listing, name, source, keep_tar) for name in listing.sizes if name.endswith(".tar")]
    todo = [archive for archive in archives if not archive.is_done]
    descriptions = [name for name in listing.absent(source.data_dir) if not name.endswith(".tar")]
    at_once = max(1, min(MOST_ARCHIVES, num_cores() if workers is None else workers))
    needed = _needed_bytes(todo, at_once, keep_tar)
    log.info(
        "%s: %d archives (%s), %d of them to fetch or unpack; about %s of disk are needed in %s",
        repo_id, len(archives), storage.readable_bytes(sum(archive.size for archive in archives)), len(todo),
        storage.readable_bytes(needed), source.data_dir,
    )  # fmt: skip
    if dry_run:
        for archive in todo:
            state = "unpack" if archive.path.is_file() else "fetch and unpack"
            log.info("would %s %s (%s)", state, archive.name, storage.readable_bytes(archive.size))
        return []
    if todo:
        storage.require_space(source.data_dir, needed, f"Preparing {repo_id}")
    if descriptions:
        repositories.fetch(listing, source.data_dir, descriptions)
    start = time.time()
    outcome = run_jobs(_unpack, todo, what="archives", workers=at_once if at_once > 1 else 0)
    repositories.remove_leftovers(source.data_dir, before=start)
    for archive in archives:
        if not keep_tar and archive.is_done:
            archive.path.unlink(missing_ok=True)  # one that a stopped command left
    if todo:
        log.info("unpacked %d episodes from %d archives", sum(outcome.results), len(outcome.results))
    return outcome.faults


def _needed_bytes(todo: Sequence[_Archive], at_once: int, keep_tar: bool) -> int:
    absent = sorted((archive.size for archive in todo if not archive.path.is_file()), reverse=True)
    if not todo:
        return 0
    fetched = sum(absent) if keep_tar else sum(absent[:at_once])
    return int(fetched + KEPT_SHARE * sum(archive.size for archive in todo)) + repositories.RESERVE


def _unpack(archive: _Archive) -> int:
    """Number of episodes with the camera that came out of an archive, after fetching it where it is not here."""
    camera, path = archive.source.camera, archive.path
    if archive.name in archive.listing.absent(archive.source.data_dir):
        repositories.fetch(archive.listing, archive.source.data_dir, [archive.name], progress=False)
    files = member_files(path)
    wanted = {file.parts[0] for file in files if file.parts[1:] == ("videos", f"{camera}.mp4")}
    if not wanted:
        raise DataError(
            f"{path}: no episode in it has videos/{camera}.mp4, so nothing was unpacked and it stays."
            f"{_cameras_hint(camera, files)}"
        )

    def keep(file: PurePosixPath) -> bool:
        is_of_episode = len(file.parts) > 1 and not file.parts[0].startswith(".")  # nothing among archives and markers
        return is_of_episode and (file.parts[0] not in wanted or is_kept(file.parts[1:], camera))

    extract_checked(path, path.parent, keep=keep)
    made = {"size": archive.size, "camera": camera, "episodes": sorted(wanted)}
    write_json(archive.marker, made)
    if not archive.keep_tar:
        path.unlink()
    return len(wanted)


def _cameras_hint(camera: str, files: Iterable[PurePosixPath]) -> str:
    cameras = Counter(file.stem for file in files if file.suffix == ".mp4" and file.parts[1:2] == ("videos",))
    if cameras:
        return near(camera, cameras)
    some = ", ".join(str(file) for file in sorted(files)[:3])
    return f" Expected <episode>/videos/<camera>.mp4, found {some or 'no file'}."


# Cleaning -------------------------------------------------------------------------------------------------------------


def camera_path(episode: Path, camera: str) -> Path:
    return episode / "videos" / f"{camera}.mp4"


def is_kept(parts: tuple[str, ...], camera: str) -> bool:
    """True if cleaning leaves a file of an episode, named by its path below the episode's folder."""
    if len(parts) < 2:
        return True
    return parts[0] == "videos" and (not parts[-1].lower().endswith(".mp4") or parts[1:] == (f"{camera}.mp4",))


def clean(source: AgibotSource, *, workers: int | None, dry_run: bool) -> list[str]:
    """Delete everything but ``videos/<camera>.mp4`` of each episode that has it; a sentence for each that has not."""
    episodes, clean_one = source.episodes(), partial(_clean, source.camera, dry_run)
    # In this process: a folder is gone in less time than a worker takes to start, until there are very many.
    outcome = run_jobs(clean_one, episodes, what="cleaning", workers=0 if dry_run or len(episodes) < 500 else workers)
    num_files, size = sum(count for count, _ in outcome.results), sum(size for _, size in outcome.results)
    log.info(
        "%s %d files (%s) of %d episodes; their %s.mp4 stays",
        "would delete" if dry_run else "deleted", num_files, storage.readable_bytes(size), len(outcome.results),
        source.camera,
    )  # fmt: skip
    return outcome.faults


def _clean(camera: str, dry_run: bool, episode: Path) -> tuple[int, int]:
    """Number of deleted files, and their bytes."""
    require_camera(episode, camera)
    files = repositories.files_below(episode)
    deleted = [path for path in files if not is_kept(path.relative_to(episode).parts, camera)]
    size = sum(path.lstat().st_size for path in deleted)
    folders = [path for path in _folders(episode, hidden=True) if path.name != "videos"]
    if dry_run:
        return len(deleted), size
    with raised_as(DataError, f"{episode} cannot be cleaned", OSError):
        for path in deleted:
            path.unlink()
        for folder in folders:
            if folder.is_symlink():
                folder.unlink()
            else:
                shutil.rmtree(folder)
    return len(deleted), size


def require_camera(episode: Path, camera: str) -> Path:
    """The episode's video; where it is missing or empty, an error that names the cameras that are there."""
    path = camera_path(episode, camera)
    if path.is_file() and path.stat().st_size:
        return path
    there = sorted(other.stem for other in path.parent.glob("*.mp4") if other != path)
    what = "is empty" if path.is_file() else "is missing"
    raise DataError(f"{path} {what}; the episode was left as it is.{near(camera, there)}")


def _folders(folder: Path, hidden: bool = False) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in sorted(folder.iterdir()) if path.is_dir() and (hidden or not path.name.startswith("."))]
