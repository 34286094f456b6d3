# SPDX-License-Identifier: Apache-2.0
"""Folders of clips on the hub: fetched, and moved to where training reads them.

    DOWNLOAD/<folder>/NAME.mp4  ->  DATASET/videos/NAME.mp4
    DOWNLOAD/metadata.csv       ->  DATASET/metadata.csv
    DATASET/source.json         which repository, at which commit, with which files; written last

A file that lies in its place in its full size is not fetched again.
"""

import argparse
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cosmos_predict2.tools.prepare.records import read_record, write_json
from imaginaire import command_line, storage
from imaginaire.errors import DataError
from imaginaire.storage import repositories

log = logging.getLogger(__name__)

RECORD = "source.json"


@dataclass(frozen=True)
class HubVideos:
    """One such data set: where its clips are in the repository, and which files go beside them."""

    repo_id: str
    folder: str
    patterns: tuple[str, ...]
    beside: tuple[str, ...] = ()  # names of files, wherever the repository keeps them


GROOT = HubVideos("nvidia/GR1-100", "gr1", ("gr1/*mp4", "*metadata.csv"), ("metadata.csv",))
NEMO = HubVideos("nvidia/Cosmos-NeMo-Assets", "nemo_diffusion_example_data", ("*.mp4*",))


def add_flags(parser: argparse.ArgumentParser, source: HubVideos, out: str, download_dir: str | None = None) -> None:
    """The flags of a program that prepares such a data set."""
    add = parser.add_argument
    beside = "" if download_dir else " (default: --out)"
    add("--out", type=command_line.local_folder, default=Path(out), metavar="DIR", help="where the data set goes")
    add("--download_dir", type=Path, default=download_dir, metavar="DIR", help=f"where files arrive first{beside}")
    add("--repo_id", default=source.repo_id, metavar="NAME", help="the data repository")
    add("--revision", metavar="COMMIT", help="a branch or commit of it (default: the newest)")
    add("--dry_run", action="store_true", help="log what would be fetched, and fetch nothing")


def prepare(source: HubVideos, args: argparse.Namespace) -> list[Path]:
    """Fetch what is missing and move it to its place, by the flags of `add_flags`; gives the clips."""
    repo_id, revision, dataset = args.repo_id, args.revision, args.out
    download_dir, dry_run = args.download_dir or dataset, args.dry_run
    if (finished := _finished(dataset, repo_id, revision)) is not None:
        log.info("%s: all of %s is there already", dataset, repo_id)
        return finished
    listing = repositories.list_files(repo_id, patterns=source.patterns, revision=revision)
    places = _places(source, listing.sizes, dataset)
    todo = {name: place for name, place in places.items() if not _is_there(place, listing.sizes[name])}
    videos = [place for place in places.values() if place.parent.name == "videos"]
    repositories.fetch_absent(listing, download_dir, todo, dry_run=dry_run)
    if dry_run:
        log.info("%s: would move %d files to %s", repo_id, len(todo), dataset)
        return videos
    for name, place in todo.items():
        _move(download_dir / name, place)
    files = {place.relative_to(dataset).as_posix(): listing.sizes[name] for name, place in places.items()}
    write_json(dataset / RECORD, {"repository": repo_id, "revision": listing.revision, "files": files})
    return videos


def _places(source: HubVideos, sizes: dict[str, int], dataset: Path) -> dict[str, Path]:
    """The place of each file of the repository; other files are excluded."""
    places: dict[str, Path] = {}
    for name in sizes:
        path = PurePosixPath(name)
        if path.name in source.beside:
            place = dataset / path.name
        elif path.suffix == ".mp4" and path.parts[0] == source.folder:
            place = dataset / "videos" / path.name
        else:
            continue
        if place in places.values():
            raise DataError(f"The repository has several files called {path.name}; they would all become {place}.")
        places[name] = place
    found = {place.name for place in places.values()}
    if lost := [name for name in source.beside if name not in found]:
        raise DataError(f"The repository has no {', '.join(lost)}.")
    if len(found) == len(source.beside):
        folders = sorted({PurePosixPath(name).parent.as_posix() for name in sizes})
        raise DataError(f"The repository has no clips in {source.folder}/; it has files in {', '.join(folders[:8])}.")
    return places


def _is_there(place: Path, size: int) -> bool:
    if not place.exists():
        return False
    if place.is_file() and place.stat().st_size == size:
        return True
    raise DataError(
        f"{place} is there already, but is not the {storage.readable_bytes(size)} file of the repository. Move it away."
    )


def _finished(dataset: Path, repo_id: str, revision: str | None) -> list[Path] | None:
    """The clips of a complete data set: it has a record, and every file is there in its size."""
    record = read_record(dataset / RECORD) or {}
    if record.get("repository") != repo_id or revision not in (None, record.get("revision")):
        return None
    files = {dataset / name: size for name, size in record.get("files", {}).items()}
    if any(not path.is_file() or path.stat().st_size != size for path, size in files.items()):
        return None
    return [path for path in files if path.parent.name == "videos"]


def _move(source: Path, place: Path) -> None:
    """Also to another disk; what a stopped copy left there is never taken for the file."""
    place.parent.mkdir(parents=True, exist_ok=True)
    staging = place.with_name(f".{place.name}.moving")
    try:
        shutil.move(source, staging)
        os.replace(staging, place)
    except OSError as error:
        raise DataError(f"{source} cannot be moved to {place}: {error.strerror or error}.") from error
