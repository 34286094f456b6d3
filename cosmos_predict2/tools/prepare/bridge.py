# SPDX-License-Identifier: Apache-2.0
"""The Bridge data set as action-conditioned training reads it: fetched, unpacked, put in its place and looked through.

OUT/annotation/{train,val,test}/NAME.json    poses and gripper states, one per frame
OUT/videos/{train,val,test}/NAME/rgb.mp4
OUT/dataset.json                             where it is from and what was counted; written last
"""

import http.client
import logging
import shutil
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from cosmos_predict2.data.action_conditioned.recordings import annotation_files, read_annotation, recording_of
from cosmos_predict2.tools.jobs import run_jobs
from cosmos_predict2.tools.prepare.records import RECORD, read_record, require_own, write_json
from cosmos_predict2.tools.prepare.tar_safety import extract_checked
from imaginaire import storage
from imaginaire.errors import DataError, raised_as
from imaginaire.log import Progress

log = logging.getLogger(__name__)

URL = "https://lf-robot-opensource.bytetos.com/obj/lab-robot-public/opensource_IRASim_v1/bridge_train_data.tar.gz"
ANNOTATIONS = ("annotation", "annotations")
FORMAT = "bridge/1"
UNPACKED = 1.1  # times the archive's size: videos hardly shrink in it
TRIES = 6  # of a fetch, in a row without a byte
BLOCK = 2**20
TIMEOUT = 60.0

_BROKEN = (OSError, http.client.HTTPException)  # urllib.error.URLError is an OSError


@dataclass
class Contents:
    recordings: dict[str, int] = field(default_factory=dict)  # by split
    frames: int = 0
    faults: list[str] = field(default_factory=list)


def prepare(
    source: str, out: Path, *, keep_archive: bool = False, workers: int | None = None, dry_run: bool = False
) -> Contents:
    """Make ``out`` of an archive, an address or a file; what is done already is not done again.

    An archive that was fetched is removed when all is unpacked, unless it is to be kept.
    """
    if read_record(out / RECORD, FORMAT) is not None:
        log.info("%s is complete", out)
        return look_through(out, workers=workers)
    if find_annotations(out) is None:
        require_own(out, FORMAT)
        archive, is_fetched = _archive(source, out, dry_run)
        if dry_run:
            return Contents()
        assert archive is not None
        _unpack(archive, out)
        if is_fetched and not keep_archive:
            archive.unlink()
    elif dry_run:
        log.info("%s: unpacked already; would look it through", out)
        return Contents()
    contents = look_through(out, workers=workers)
    if not contents.faults:
        record = {"format": FORMAT, "source": source, **{k: v for k, v in asdict(contents).items() if k != "faults"}}
        write_json(out / RECORD, record, indent=None)
    return contents


def find_annotations(folder: Path) -> Path | None:
    """``annotation`` or ``annotations`` of a Bridge folder; both spellings are seen."""
    return next((folder / name for name in ANNOTATIONS if (folder / name).is_dir()), None)


def look_through(folder: Path, *, workers: int | None = None) -> Contents:
    """Count the recordings and their frames; a fault is an annotation that is broken or whose video is not there."""
    annotations = find_annotations(folder)
    if annotations is None:
        raise DataError(f"{folder} has neither {' nor '.join(f'{name}/' for name in ANNOTATIONS)}.")
    splits = sorted(path for path in annotations.iterdir() if path.is_dir())
    if not splits:
        raise DataError(f"{annotations} has no folder of a split (train/, val/, test/).")
    contents = Contents()
    for split in splits:
        files, what = annotation_files(split), f"looking through {split.name}"
        outcome = run_jobs(partial(_num_frames, folder), files, what=what, workers=workers)
        contents.recordings[split.name] = len(outcome.results)
        contents.frames += sum(outcome.results)
        contents.faults += outcome.faults
    return contents


def _num_frames(folder: Path, path: Path) -> int:
    recording = recording_of(path, read_annotation(path))
    if not len(recording.poses):
        raise DataError(f"{path} has no state: its recording has no frames.")
    for video in recording.videos:
        if not (folder / video).is_file():
            raise DataError(f"{path}: its video {folder / video} is not there.")
    return len(recording.poses)


def _archive(source: str, out: Path, dry_run: bool) -> tuple[Path | None, bool]:
    """The archive on this disk, and whether it was fetched for this."""
    if urlsplit(source).scheme not in ("http", "https"):
        path = Path(source)
        if not path.is_file():
            raise DataError(f"There is no archive {source}. Give a file, or an address that begins with https://.")
        needed = int(path.stat().st_size * UNPACKED)
        log.info("%s: %s to unpack to %s", path, storage.readable_bytes(needed), out)
        storage.require_space(out.parent, needed, f"Unpacking {path}")
        return path, False
    name = PurePosixPath(urlsplit(source).path).name
    if not name:
        raise DataError(f"The address {source} ends without the name of an archive, such as bridge_train_data.tar.gz.")
    target = out.parent / name
    if target.is_file():
        log.info("%s is here already", target)
        storage.require_space(out.parent, int(target.stat().st_size * UNPACKED), f"Unpacking {target}")
        return target, True
    remote = look_up(source)
    if remote.size is not None:
        log.info("%s: %s to fetch to %s", source, storage.readable_bytes(remote.size), target)
        storage.require_space(out.parent, int(remote.size * (1 + UNPACKED)), f"Bridge ({source})")
    return (None, True) if dry_run else (fetch(remote, target), True)


def _unpack(archive: Path, out: Path) -> None:
    """The archive's Bridge folder, wherever it lies in there, becomes ``out`` in one step."""
    staging = out.parent / f".{out.name}.unpacked"
    shutil.rmtree(staging, ignore_errors=True)  # of a process that was stopped
    try:
        extract_checked(archive, staging, progress=True)
        found = sorted({path.parent for name in ANNOTATIONS for path in staging.rglob(name) if path.is_dir()})
        found = [path for path in found if path.name == "bridge"] or found
        if not found:
            names = ", ".join(sorted(path.name for path in staging.iterdir())) or "nothing"
            raise DataError(f"{archive} has no folder with annotation/ in it; it has {names}. It is not Bridge.")
        if len(found) > 1:
            names = ", ".join(path.relative_to(staging).as_posix() for path in found)
            raise DataError(f"{archive} has several folders with annotation/: {names}. Pack the one that is meant.")
        if out.is_dir():
            out.rmdir()  # empty: it was looked at before
        found[0].replace(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


# ---- one large file from an ordinary web server, fetched so that a broken connection goes on where it was ------------


@dataclass(frozen=True)
class Remote:
    """A file on a server."""

    url: str
    size: int | None
    version: str  # its ETag or date: another one, another file


def look_up(url: str) -> Remote:
    """The size and version of a file, without fetching it."""
    with raised_as(DataError, f"{url} cannot be reached", *_BROKEN, ValueError, cure="Is there a network?"):
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT) as answer:
            length = answer.headers.get("Content-Length")
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
    return Remote(url, int(length) if length else None, version)


def fetch(remote: Remote, target: Path, *, wait: float = 2.0) -> Path:
    """Fetch the file; what came of it lies in ``NAME.part`` until it is whole, and is not fetched again."""
    part, notes = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.json")
    about = {"url": remote.url, "size": remote.size, "version": remote.version}
    if part.exists() and read_record(notes) != about:
        part.unlink()  # of another file, or of another version of it
    write_json(notes, about)
    if remote.size is not None and _size(part) > remote.size:
        part.unlink()
    left = TRIES
    with Progress(target.name, remote.size, unit="B", done=_size(part)) as bar:
        while (have := _size(part)) != remote.size:
            try:
                _get_more(remote, part, have, bar)
                if remote.size is None:
                    break  # nothing to hold it against: an end without an error is the end
                reason = "the connection ended early"
            except urllib.error.HTTPError as error:
                raise DataError(f"{remote.url}: the server answers {error.code} {error.reason}.") from error
            except _BROKEN as error:
                reason = str(error) or type(error).__name__
            now = _size(part)
            left = TRIES if now > have else left - 1
            if left == 0:
                raise DataError(f"{remote.url} stops at {now} of {remote.size} bytes: {reason}. Start it again later.")
            if now != remote.size:
                log.info("%s: %s after %d bytes; going on", remote.url, reason, now)
                time.sleep(wait)
    part.replace(target)
    notes.unlink(missing_ok=True)
    return target


def _get_more(remote: Remote, part: Path, have: int, bar: Progress) -> None:
    """Append what follows ``have`` bytes, or write all of it where the server has no ranges."""
    headers = {"Range": f"bytes={have}-"} if have else {}
    if have and remote.version and not remote.version.startswith("W/"):
        headers["If-Range"] = remote.version
    with urllib.request.urlopen(urllib.request.Request(remote.url, headers=headers), timeout=TIMEOUT) as answer:
        goes_on = answer.status == 206
        bar.set(have if goes_on else 0)
        with part.open("ab" if goes_on else "wb") as file:
            while block := answer.read(BLOCK):
                file.write(block)
                bar.update(len(block))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
