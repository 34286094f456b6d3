# SPDX-License-Identifier: Apache-2.0
"""Repositories of the Hugging Face hub: list their files with the sizes, and fetch those that are missing here.

Each file appears in full or not at all, and one that lies here in its full size is not fetched again, so a command that
was stopped goes on where it was. ``HF_ENDPOINT`` names another hub, ``HF_TOKEN`` or ``hf auth login`` the user.

Not ``snapshot_download``: it lists whole repositories (AgiBot's is huge), ends at the first file that fails, and checks
neither the disk before nor the sizes after.
"""

import logging
import os
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from imaginaire import storage
from imaginaire.errors import DataError, UserError
from imaginaire.log import Progress
from imaginaire.storage import hub

log = logging.getLogger(__name__)

THREADS = 8  # small files wait for answers, not for bandwidth
RESERVE = 2**30  # bytes of the disk that a download leaves free


@dataclass(frozen=True)
class Listing:
    """Files of a repository that match some patterns, at one commit."""

    repo_id: str
    revision: str
    kind: str  # "dataset" or "model"
    licence: str
    sizes: dict[str, int]

    def absent(self, target: Path) -> dict[str, int]:
        """Files that do not lie below ``target`` in their full size."""
        return {name: size for name, size in self.sizes.items() if _size(target / name) != size}


def fetch_absent(
    listing: Listing, target: Path, names: Collection[str] | None = None, *, dry_run: bool = False
) -> tuple[str, ...]:
    """Fetch the files of a listing (all, or those of ``names``) that do not lie below ``target``; returns their names.

    A full disk is an error before anything is fetched. A dry run logs what would be fetched.
    """
    absent = {name: size for name, size in listing.absent(target).items() if names is None or name in names}
    text = f"{len(absent)} of {len(listing.sizes)} files, {storage.readable_bytes(sum(absent.values()))}, to {target}"
    if dry_run:
        log.info("%s: would fetch %s", listing.repo_id, text)
    elif not absent:
        log.info("%s: all files are there already", listing.repo_id)
    else:
        storage.require_space(target, sum(absent.values()) + RESERVE, f"The download of {listing.repo_id}")
        log.info("%s: fetching %s", listing.repo_id, text)
        start = time.time()
        fetch(listing, target, absent)
        remove_leftovers(target, before=start)
    return tuple(absent)


def list_files(
    repo_id: str,
    *,
    patterns: Sequence[str],
    ignored: Sequence[str] = (),
    kind: str = "dataset",
    licence: str = "",
    revision: str | None = None,
) -> Listing:
    """The files that match any of the patterns but the ``ignored`` ones, with their sizes; a pattern that matches none
    is an error."""
    client = hub.client()
    try:
        api = client.HfApi(endpoint=_endpoint())
        commit = api.repo_info(repo_id, repo_type=kind, revision=revision).sha
        known: dict[str, int] = {}
        for folder in sorted({_plain_folder(pattern) for pattern in patterns}):
            tree = api.list_repo_tree(repo_id, folder or None, recursive=True, revision=commit, repo_type=kind)
            known.update((entry.path, int(entry.size)) for entry in tree if hasattr(entry, "size"))
    except Exception as error:
        raise DataError(_explained(error, repo_id, kind, revision, licence)) from error
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise DataError(f"{repo_id} @ {commit} has no file that matches '{pattern}'.")
    unwanted = {name for name in known if any(fnmatchcase(name, pattern) for pattern in ignored)}
    wanted = sorted(name for name in known if any(fnmatchcase(name, p) for p in patterns) and name not in unwanted)
    for name in wanted:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DataError(
                f"{repo_id} lists a file called '{name}', which leads out of the folder. It was not fetched."
            )
    return Listing(repo_id, commit, kind, licence, {name: known[name] for name in wanted})


def fetch(listing: Listing, target: Path, names: Collection[str], *, progress: bool = True) -> None:
    """Fetch these files of a listing; all are tried, then those that failed are named."""
    client = hub.client()
    faults: list[str] = []

    def one(name: str) -> None:
        place = target / name
        if place.is_dir():
            raise DataError(f"{place} is a folder, and a file of that name is to be fetched. Move it away.")
        if _size(place) not in (None, listing.sizes[name]):
            place.unlink()  # cut short, or another version
        client.hf_hub_download(
            listing.repo_id,
            name,
            repo_type=listing.kind,
            revision=listing.revision,
            local_dir=str(target),
            endpoint=_endpoint(),
        )
        if _size(place) != listing.sizes[name]:
            raise DataError(f"{name} arrived with {_size(place)} of {listing.sizes[name]} bytes; run it again")

    bar = Progress(listing.repo_id, len(names), unit="file", is_shown=progress)
    with ThreadPoolExecutor(min(THREADS, max(1, len(names)))) as pool, bar:
        try:
            jobs = {pool.submit(one, name): name for name in names}
            for job in as_completed(jobs):
                if (error := job.exception()) is None:
                    bar.update()
                elif isinstance(error, Exception):
                    faults.append(_explained(error, listing.repo_id, listing.kind, listing.revision, listing.licence))
                else:
                    raise error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if faults:
        more = f" ({len(faults)} of {len(names)} files failed)" if len(names) > 1 else ""
        raise DataError(f"{faults[0]}{more}")


def remove_leftovers(target: Path, before: float) -> None:
    """Delete the client's partial files of calls that were killed before that time: nothing would ever use them."""
    for path in files_below(target / ".cache" / "huggingface"):
        try:
            if path.name.endswith(".incomplete") and path.stat().st_mtime < before:
                path.unlink()
        except FileNotFoundError:
            pass


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None  # read each time: the client reads it at its import only


def _explained(error: Exception, repo_id: str, kind: str, revision: str | None, licence: str) -> str:
    if isinstance(error, UserError):
        return str(error)
    return hub.explained(error, repo_id, revision=revision, licence=licence, kind={"dataset": "datasets"}.get(kind, ""))


def _plain_folder(pattern: str) -> str:
    """The folder that a pattern names without wildcards: "observations/327" of "observations/327/*.tar"."""
    parts: list[str] = []
    for part in PurePosixPath(pattern).parent.parts:
        if any(letter in part for letter in "*?["):
            break
        parts.append(part)
    return "/".join(parts)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def files_below(folder: Path) -> Iterator[Path]:
    """All files and links to files below a folder; links to folders are not followed."""
    for place, _, names in os.walk(folder):
        yield from (Path(place) / name for name in names)
