# SPDX-License-Identifier: Apache-2.0
"""Unpacking archives of strangers: plain files and folders below one place, or nothing at all.

Members are looked at one by one before they are written, into a hidden folder beside the target. Only a whole archive
without a bad member moves to the target, so neither a refusal, a damaged archive nor a kill leaves a part of it there.
Not tarfile's ``data`` filter: it lets links through, renames absolute names, and early releases of Python 3.10 lack it.
"""

import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path, PurePosixPath

from imaginaire import storage
from imaginaire.errors import DataError
from imaginaire.progress import Progress

COPY_BYTES = 2**20


def extract_checked(
    archive: Path, target: Path, *, keep: Callable[[PurePosixPath], bool] | None = None, progress: bool = False
) -> list[PurePosixPath]:
    """The files that were unpacked from a .tar, .tar.gz, .tar.bz2 or .tar.xz, relative to ``target``.

    ``keep`` may leave files out by their name. Absolute names, names with ``..``, links and devices are refused, with
    the name of the member. Files that lie at the target already are replaced, others there stay. Owners and special
    permissions of the archive are not taken over.
    """
    staging = target / f".{archive.name}.unpacking"
    storage.remove(staging)  # of a process that was stopped
    try:
        staging.mkdir(parents=True)
        files = []
        bar = Progress(f"unpacking {archive.name}", unit="B", is_shown=progress)
        with _opened(archive) as members, bar:
            for member, tar in members:
                path = checked_name(member, archive)
                if member.isdir():
                    if keep is None:
                        (staging / path).mkdir(parents=True, exist_ok=True)
                elif keep is None or keep(path):
                    _write(tar, member, staging / path)
                    files.append(path)
                bar.set(max(bar.done, member.offset_data + member.size))
        _move_into(staging, target)
    except OSError as error:
        raise DataError(f"{archive} cannot be unpacked to {target}: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return files


def member_files(archive: Path) -> dict[PurePosixPath, int]:
    """Size by name of the files in an archive, after the same checks; nothing is written."""
    with _opened(archive) as members:
        names = {checked_name(member, archive): member for member, _ in members}
    return {name: member.size for name, member in names.items() if member.isreg()}


def checked_name(member: tarfile.TarInfo, archive: Path) -> PurePosixPath:
    """The member's relative path, after refusing whatever could reach beyond the target folder."""
    path = PurePosixPath(member.name)
    fault = ""
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or "\0" in member.name:
        fault = "its name leads out of the folder"
    elif member.issym() or member.islnk():
        fault = f"it is a link to '{member.linkname}'"
    elif not (member.isreg() or member.isdir()):
        fault = "it is neither a file nor a folder"
    elif member.isreg() and not path.parts:
        fault = "it has no name"
    if fault:
        raise DataError(f"{archive}: member '{member.name}' is refused: {fault}. Nothing of the archive was unpacked.")
    return path


class _Member(tarfile.TarInfo):
    """A damaged or missing header is an error: the plain class takes one for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> "_Member":
        try:
            return super().fromtarfile(tar)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "EOFHeaderError":  # not a public class: the blocks of zeros at the end
                raise
            raise tarfile.ReadError(str(error)) from error


@contextmanager
def _opened(archive: Path) -> Iterator[Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]]:
    """The members in order; what is wrong with the archive as a whole becomes our error."""
    if not archive.is_file():
        raise DataError(f"{archive} does not exist; a tar archive was expected there.")
    try:
        with tarfile.open(archive, "r:*", tarinfo=_Member) as tar:
            yield ((member, tar) for member in tar)
            while tar.fileobj is not None and tar.fileobj.read(COPY_BYTES):
                pass  # a compressed archive has its checksum at its very end
    except (tarfile.TarError, EOFError, zlib.error, LZMAError) as error:
        raise DataError(f"{archive} is damaged or incomplete ({error}). Remove it and fetch it again.") from error


def _write(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    assert source is not None, member.name
    with source, path.open("wb") as file:
        shutil.copyfileobj(source, file, COPY_BYTES)
        if file.tell() != member.size:
            raise tarfile.ReadError(f"'{member.name}' ends after {file.tell()} of {member.size} bytes")


def _move_into(source: Path, target: Path) -> None:
    """Rename what is in one folder into another; folders that are in both are joined."""
    for entry in sorted(source.iterdir()):
        place = target / entry.name
        there = place.lstat().st_mode if os.path.lexists(place) else None
        if there is not None and stat.S_ISDIR(there) and entry.is_dir():
            _move_into(entry, place)
            continue
        if there is not None and (stat.S_ISDIR(there) or entry.is_dir()):
            raise DataError(f"{place} is in the way: the archive has a {'folder' if entry.is_dir() else 'file'} there.")
        os.replace(entry, place)
