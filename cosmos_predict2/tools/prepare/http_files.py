# SPDX-License-Identifier: Apache-2.0
"""One large file from an ordinary web server, fetched so that a broken connection goes on where it was."""

import http.client
import logging
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from cosmos_predict2.tools.prepare.records import read_record, write_json
from imaginaire.errors import DataError
from imaginaire.progress import Progress

log = logging.getLogger(__name__)

TRIES = 6  # in a row without a byte
BLOCK = 2**20
TIMEOUT = 60.0

_BROKEN = (OSError, http.client.HTTPException)  # urllib.error.URLError is an OSError


@dataclass(frozen=True)
class Remote:
    """A file on a server."""

    url: str
    size: int | None
    version: str  # its ETag or date: another one, another file


def look(url: str) -> Remote:
    """The size and version of a file, without fetching it."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=TIMEOUT) as answer:
            length = answer.headers.get("Content-Length")
            version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
    except (*_BROKEN, ValueError) as error:
        raise DataError(f"{url} cannot be reached: {error}. Is there a network?") from error
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
