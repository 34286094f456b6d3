# SPDX-License-Identifier: Apache-2.0
"""Files of ``torch.save``: reading them without running foreign code, and checking that their bytes are unchanged.

The check compares the CRC-32 of each record of the zip, which torch ignores.
"""

import functools
import io
import os
import pickle
import re
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

CHUNK_BYTES = 4 * 2**20
THREADS = min(4, os.cpu_count() or 1)
# What reading a damaged zip raises: its fields are read as they come.
FAULTS = (
    *(zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError),
    *(ValueError, OverflowError, KeyError, NotImplementedError, RuntimeError),
)


_LOCK = threading.RLock()


def load_plain(source: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """``torch.load(weights_only=True)`` on the CPU; of all other classes ``io.BytesIO`` alone is let through.

    In BytesIO Transformer Engine kept the extra state that released files have.
    """
    with only([io.BytesIO]):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


def refused_object(error: pickle.UnpicklingError) -> str:
    """What `load_plain` stumbled over, by name; torch's own message recommends switching the check off."""
    names = re.findall(r"(?:GLOBAL|class|global:?) ([A-Za-z_][\w.]*\.[\w.]+)", str(error))
    return f"the object '{names[0].rstrip('.')}'" if names else ""


@contextmanager
def only(classes: list[Any]) -> Iterator[None]:
    """Within, torch allows these classes and no others: libraries add theirs to its list when they are imported."""
    with _LOCK:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(classes)
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip that is a file, or ``length`` bytes of it from ``start`` on; ``name`` is what messages call it."""

    path: Path
    name: str
    start: int = 0
    length: int | None = None


def damage(archives: Sequence[Archive], share: tuple[int, int] = (0, 1)) -> list[str]:
    """A sentence for each record that is not what was saved; of share (i, n) every n-th record is read, from the i-th
    on, so that n processes read all of them."""
    with ExitStack() as files, ThreadPoolExecutor(THREADS) as pool:

        @functools.cache
        def opened(path: Path, thread: int) -> zipfile.ZipFile:
            """One for each thread: threads that open records of the same one disturb each other in Python 3.12."""
            return files.enter_context(zipfile.ZipFile(path))

        checks = [check for archive in archives for check in _checks(archive, opened)]
        found = pool.map(lambda check: check(), checks[share[0] :: share[1]])
        return [sentence for sentence in found if sentence]


def _checks(archive: Archive, opened: Callable[[Path, int], zipfile.ZipFile]) -> list[Callable[[], str]]:
    if archive.length is not None:
        return [functools.partial(_damage_of_part, archive)]
    try:
        records = opened(archive.path, threading.get_ident()).infolist()
    except FAULTS as error:
        return [functools.partial(_sentence, archive, error)]
    return [
        lambda info=info: _damage_of_record(archive, opened(archive.path, threading.get_ident()), info)  # type: ignore
        for info in records
    ]


def _damage_of_part(archive: Archive) -> str:
    """Parts are tensors of a sharded checkpoint, each a zip of a few records, which memory can hold."""
    try:
        with open(archive.path, "rb") as file:
            file.seek(archive.start)
            content = file.read(archive.length)
        with zipfile.ZipFile(io.BytesIO(content)) as opened:
            found = [_damage_of_record(archive, opened, info) for info in opened.infolist()]
        load_plain(io.BytesIO(content))  # torch's reader of zips looks at more fields
        return next((sentence for sentence in found if sentence), "")
    except Exception as error:  # a damaged pickle raises nearly anything
        return _sentence(archive, error)


def _damage_of_record(archive: Archive, opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> str:
    try:
        with opened.open(info) as record:
            while record.read(CHUNK_BYTES):
                pass  # at its end the checksum is compared
    except FAULTS as error:
        return _sentence(archive, error)
    return ""


def _sentence(archive: Archive, error: BaseException) -> str:
    return f"{archive.name} is damaged: its bytes are not those that were saved ({error})."
