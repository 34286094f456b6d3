# SPDX-License-Identifier: Apache-2.0
"""Unpacking archives of strangers: what tarfile's ``data`` filter lets through, and nothing of a bad archive.

Members go into a hidden folder beside the target. Only a whole archive without a bad member moves to the target, so
neither a refusal, a damaged archive nor a kill leaves a part of it there.
"""

import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path, PurePosixPath

from imaginaire import storage
from imaginaire.errors import DataError
from imaginaire.log import Progress

COPY_BYTES = 2**20


def extract_checked(
    archive: Path, target: Path, *, keep: Callable[[PurePosixPath], bool] | None = None, progress: bool = False
) -> list[PurePosixPath]:
    """The files that were unpacked from a .tar, .tar.gz, .tar.bz2 or .tar.xz, relative to ``target``.

    ``keep`` may leave files out by their name. Links, devices and names that lead out of the folder are refused, with
    the name of the member. Files that lie at the target already are replaced, others there stay.
    """
    staging = target / f".{archive.name}.unpacking"
    storage.remove(staging)  # of a process that was stopped
    try:
        staging.mkdir(parents=True)
        files = []
        bar = Progress(f"unpacking {archive.name}", unit="B", is_shown=progress)
        with _opened(archive) as tar, bar:
            for member in _checked(tar, archive):
                path = PurePosixPath(member.name)
                if keep is None or (member.isreg() and keep(path)):
                    tar.extract(member, staging, set_attrs=False, filter="data")
                    files += [path] if member.isreg() else []
                bar.set(max(bar.done, member.offset_data + member.size))
        shutil.copytree(staging, target, copy_function=os.replace, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise DataError(f"{archive} cannot be unpacked to {target}: {error}.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return files


def member_files(archive: Path) -> list[PurePosixPath]:
    """The names of the files in an archive, after the same checks; nothing is written."""
    with _opened(archive) as tar:
        return [PurePosixPath(member.name) for member in _checked(tar, archive) if member.isreg()]


def _checked(tar: tarfile.TarFile, archive: Path) -> Iterator[tarfile.TarInfo]:
    """The members in order; a bad one is an error."""
    if not hasattr(tarfile, "data_filter"):
        raise DataError(f"{archive} is not unpacked: Python 3.10.12, 3.11.4 or newer is needed (tarfile.data_filter).")
    for member in tar:
        try:
            is_good = tarfile.data_filter(member, "/folder").name == member.name and (member.isreg() or member.isdir())
        except tarfile.FilterError:
            is_good = False
        if not is_good or ".." in PurePosixPath(member.name).parts:
            raise DataError(
                f"{archive}: member '{member.name}' is refused: it is a link or a device, or its name leads out of the"
                " folder. Nothing of the archive was unpacked."
            )
        yield member


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
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    """The archive; what is wrong with it as a whole becomes our error."""
    if not archive.is_file():
        raise DataError(f"{archive} does not exist; a tar archive was expected there.")
    try:
        with tarfile.open(archive, "r:*", tarinfo=_Member) as tar:
            yield tar
            while tar.fileobj is not None and tar.fileobj.read(COPY_BYTES):
                pass  # a compressed archive has its checksum at its very end
    except (tarfile.TarError, EOFError, zlib.error, LZMAError) as error:
        raise DataError(f"{archive} is damaged or incomplete ({error}). Remove it and fetch it again.") from error
