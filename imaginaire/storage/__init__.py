# SPDX-License-Identifier: Apache-2.0
"""Files and objects by path: local folders and ``s3://`` (or any other fsspec address) with the same calls.

A local write goes to a temporary file beside its target, is synced, and is renamed over it; an object appears in its
store only when the upload is complete. Remote operations are tried three times when the failure may pass (connection,
time-out, throttling, 5xx) and fail at once, with a cure, when it will not. Nothing is cached between calls.
"""

import builtins
import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import logging
import math
import numbers
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import psutil

from imaginaire.errors import CheckpointError, DataError
from imaginaire.storage.object_store import StrPath, filesystem, is_s3, on_store, raise_if_no_bucket, retry

log = logging.getLogger(__name__)

UPLOAD_PART_BYTES = 64 * 2**20  # held in memory; an object may have 10,000 parts, so up to 625 GB

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_TEMPORARY = re.compile(r"^\..+\.tmp-(\d+)$")


# Paths ----------------------------------------------------------------------------------------------------------------


def is_remote(path: StrPath) -> bool:
    """True for ``scheme://`` addresses other than ``file://``."""
    text = os.fspath(path)
    return "://" in text and not text.startswith("file://")


def join(base: StrPath, *parts: str) -> str:
    """``base/part/part``, for local paths and addresses alike."""
    if is_remote(base):
        return "/".join([os.fspath(base).rstrip("/"), *(part.strip("/") for part in parts)])
    return os.path.join(_local(base), *parts)


def exists(path: StrPath) -> bool:
    if not is_remote(path):
        return os.path.exists(_local(path))
    return _info(path) is not None


def is_folder(path: StrPath) -> bool:
    """True for a folder; in an object store, for a prefix that has objects below it."""
    if not is_remote(path):
        return os.path.isdir(_local(path))
    info = _info(path)
    return info is not None and info["type"] == "directory"


def size(path: StrPath) -> int:
    """Bytes in the file."""
    if not is_remote(path):
        with _explained(path):
            return os.path.getsize(_local(path))
    return int(_existing(path)["size"])


def listdir(path: StrPath) -> list[str]:
    """The names in a folder, sorted; empty where there is no such folder."""
    if not is_remote(path):
        try:
            return sorted(os.listdir(_local(path)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def names(fs: Any, inner: str) -> list[str]:
        try:
            found = fs.ls(inner, detail=False)
        except FileNotFoundError as error:
            raise_if_no_bucket(error, path)
            return []
        own = inner.rstrip("/")
        # An object store may answer with the folder's own marker, or with the object itself.
        return sorted({entry.rstrip("/").rsplit("/", 1)[-1] for entry in found if entry.rstrip("/") != own})

    return on_store(path, names)


def matching(pattern: StrPath) -> list[str]:
    """The files or objects that a pattern with ``*``, ``?`` or ``[...]`` fits, sorted."""
    if not is_remote(pattern):
        return sorted(glob.glob(_local(pattern)))
    return on_store(pattern, lambda fs, inner: sorted(fs.unstrip_protocol(name) for name in fs.glob(inner)))


def version(path: StrPath) -> str:
    """Changes with the content of a file or an object; without reading it."""
    if not is_remote(path):
        with _explained(path):
            status = os.stat(_local(path))
        return f"{status.st_size} {status.st_mtime_ns}"
    return _version_of(_existing(path))


def makedirs(path: StrPath) -> None:
    """Make a local folder and its parents; object stores have none."""
    if is_remote(path):
        return
    try:
        os.makedirs(_local(path), exist_ok=True)
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise CheckpointError(_disk_full(path, "made")) from error
        is_file = isinstance(error, NotADirectoryError | FileExistsError)
        why = "a part of this path is a file; a folder was expected" if is_file else error.strerror or str(error)
        raise CheckpointError(
            f"The folder {os.fspath(path)} cannot be created: {why}. Give another folder (for a run: set"
            " IMAGINAIRE_OUTPUT_ROOT)."
        ) from error


def free_bytes(path: StrPath) -> int | None:
    """Free bytes on the disk that holds ``path``, which need not exist yet; None for a remote one."""
    if is_remote(path):
        return None
    return shutil.disk_usage(nearest_folder(path)).free


def nearest_folder(path: StrPath) -> Path:
    """A local path itself, or the nearest folder above it that exists."""
    place = Path(_local(path)).absolute()
    while not place.exists():
        place = place.parent
    return place


def require_space(path: StrPath, needed: int, what: str) -> None:
    """Raise unless the disk that holds ``path`` has ``needed`` bytes free."""
    free = free_bytes(path)
    if free is not None and free < needed:
        raise DataError(
            f"{what} needs about {readable_bytes(needed)}, but the disk of {path} has {readable_bytes(free)} free."
            " Make room, or give a folder on another disk."
        )


# Reading --------------------------------------------------------------------------------------------------------------


def open(path: StrPath, mode: str = "rb") -> IO[Any]:  # named as the builtin on purpose: storage.open
    """A file object for reading, ``rb`` or ``r``."""
    assert mode in ("r", "rb"), f"storage.open reads; use write_atomically to write, not mode '{mode}'"
    if not is_remote(path):
        with _explained(path):
            return builtins.open(_local(path), mode, encoding=None if "b" in mode else "utf-8")
    return on_store(path, lambda fs, inner: cast(IO[Any], fs.open(inner, mode)))


def read_part(path: StrPath, start: int, length: int) -> bytes:
    """``length`` bytes of a file from ``start`` on; fewer where it ends before."""
    if not is_remote(path):
        with _explained(path), builtins.open(_local(path), "rb") as file:
            file.seek(start)
            return file.read(length)
    return on_store(path, lambda fs, inner: bytes(fs.cat_file(inner, start=start, end=start + length)))


def read_text(path: StrPath) -> str:
    """The whole file as UTF-8 text."""
    if not is_remote(path):
        with _explained(path), builtins.open(_local(path), "rb") as file:
            content = file.read()
    else:
        content = on_store(path, lambda fs, inner: bytes(fs.cat_file(inner)))
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{os.fspath(path)} should be text in UTF-8, but byte {error.start} of {len(content)} is"
            f" {content[error.start]:#x}: it is damaged, or another file in its place. Fetch or write it again."
        ) from error


_copies: set[Path] = set()  # folders of local_copy that this process uses


def forget_copies() -> None:
    """Delete the copies that `local_copy` made or found; what is mapped into memory stays readable."""
    while _copies:
        shutil.rmtree(_copies.pop(), ignore_errors=True)


def local_copy(path: StrPath) -> Path:
    """A local path with the file's content: the path itself, or a copy in ``$TMPDIR``, fetched once per machine.

    The copy's place is derived from the address and the object's version, so a changed object is fetched anew. Other
    processes of the machine wait for the one that fetches.
    """
    if not is_remote(path):
        return Path(_local(path))
    info = _existing(path)
    key = hashlib.sha256(f"{os.fspath(path)}\n{_version_of(info)}".encode()).hexdigest()[:32]
    # ranks that one launcher started share their copies, other runs have their own
    folder = Path(tempfile.gettempdir()) / f"imaginaire-cache-{os.getuid()}-{os.getppid()}-{key}"
    target = folder / os.path.basename(os.fspath(path).rstrip("/"))
    _copies.add(folder)
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with builtins.open(folder / ".lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back by the kernel, even when the holder is killed
        if target.exists():
            return target
        remove_stale_temporaries(folder)
        needed, free = int(info["size"]), free_bytes(folder)
        if free is not None and free < needed:
            raise CheckpointError(
                f"{os.fspath(path)} has {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB free. "
                "Set TMPDIR to a larger disk."
            )
        temporary = _temporary_name(str(target))
        start = time.monotonic()
        on_store(path, lambda fs, inner: fs.get_file(inner, temporary))
        os.replace(temporary, target)
        log.info("fetched %s to %s (%.1f s)", os.fspath(path), target, time.monotonic() - start)
    return target


# Writing --------------------------------------------------------------------------------------------------------------


def write_atomically(path: StrPath, write: Callable[[BinaryIO], object]) -> None:
    """Have ``write`` fill a file that appears at ``path`` complete or not at all.

    Whatever stops it leaves the old content, if any. For a remote path ``write`` may be called again after a failure
    that may pass, so it must be repeatable.
    """
    if is_remote(path):
        retry(path, lambda: _upload(path, write))
        return
    target = _local(path)
    makedirs(os.path.dirname(target) or ".")
    temporary = _temporary_name(target)
    with _explained_writing(path):
        try:
            file = create(temporary)
            try:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            finally:
                file.close()
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        _sync(os.path.dirname(target) or ".")


def write_bytes(path: StrPath, content: bytes | memoryview) -> None:
    """A file of this content, complete or not at all."""
    write_atomically(path, lambda file: file.write(content))


def write_text(path: StrPath, text: str) -> None:
    """A text in UTF-8, complete or not at all."""
    write_bytes(path, text.encode())


def write_json(path: StrPath, values: object, *, indent: int = 2) -> None:
    """Values as JSON, complete or not at all; null for a number that is not finite, which JSON does not know."""
    write_text(path, json.dumps(_finite(values), indent=indent, default=str, allow_nan=False) + "\n")


def _finite(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):  # NumPy's numbers, too
        return float(value) if math.isfinite(value) else None
    return value


def copy_into(folder: StrPath, local: Path, *parts: str) -> str:
    """Copy a local file to ``folder/part/part``, local or remote; the path of the copy."""
    path = join(folder, *parts)
    write_bytes(path, local.read_bytes())
    return path


def create(path: StrPath) -> BinaryIO:
    """A new file opened for writing, or an upload whose object appears when it is closed."""
    if not is_remote(path):
        return builtins.open(_local(path), "wb")
    fs, inner = filesystem(path)
    return cast(BinaryIO, fs.open(inner, "wb", block_size=UPLOAD_PART_BYTES))


def sync_folder(path: StrPath) -> None:
    """Flush a local folder to its disk: the files directly in it, then their names."""
    if is_remote(path):
        return
    folder = _local(path)
    for name in os.listdir(folder):
        _sync(os.path.join(folder, name))
    _sync(folder)


def remove(path: StrPath) -> None:
    """Delete a file or a folder with everything in it; an absent one is fine."""
    if not is_remote(path):
        target = _local(path)
        with _explained(path):
            try:
                if os.path.isdir(target) and not os.path.islink(target):
                    shutil.rmtree(target)
                else:
                    os.unlink(target)
            except FileNotFoundError:
                pass
        return

    def delete(fs: Any, inner: str) -> None:
        try:
            fs.rm(inner, recursive=True)
        except FileNotFoundError as error:
            raise_if_no_bucket(error, path)

    on_store(path, delete)


def remove_stale_temporaries(folder: StrPath) -> None:
    """Delete what killed processes left half-written directly in ``folder``: temporary files, unfinished uploads.

    Files of processes that run on this machine are left alone. Unfinished uploads are invisible but paid for.
    """
    if is_remote(folder):
        if is_s3(folder):
            on_store(folder, _abort_uploads)
        return
    for name in listdir(folder):
        if (match := _TEMPORARY.match(name)) and not _may_write(int(match[1]), join(folder, name)):
            remove(join(folder, name))
            log.info("removed %s, left by a process that was stopped", join(folder, name))


def _may_write(pid: int, path: str) -> bool:
    """The file's process runs here: it is not a killed one that was not yet collected, nor one that began after the
    file was changed and got the number of its writer."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= os.stat(path).st_mtime + 1
    except psutil.NoSuchProcess:
        return False
    except FileNotFoundError:  # written to its end meanwhile
        return True


def _temporary_name(target: str) -> str:
    folder, name = os.path.split(target)
    return os.path.join(folder, f".{name}.tmp-{os.getpid()}")


def _sync(path: str) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _upload(path: StrPath, write: Callable[[BinaryIO], object]) -> None:
    file: Any = create(path)
    try:
        write(file)
        file.close()  # completes the upload
    except BaseException:
        try:
            file.discard()
        except Exception as error:  # the first failure is the one to report; a leftover upload is invisible
            log.warning("an unfinished upload could not be aborted: %s", error)
        file.forced = file.closed = True  # closing it, or the garbage collector, would complete it instead
        raise


def _abort_uploads(fs: Any, inner: str) -> None:
    bucket, prefix, _ = fs.split_path(inner)
    for upload in fs.list_multipart_uploads(bucket):
        key = upload["Key"]
        if os.path.dirname(key) == prefix.rstrip("/"):
            fs.abort_mpu(bucket, key, upload["UploadId"])
            log.info("aborted the unfinished upload of s3://%s/%s", bucket, key)


def _version_of(info: Mapping[str, Any]) -> str:
    return " ".join(str(info.get(key)) for key in ("ETag", "etag", "size", "LastModified", "created", "mtime"))


def _existing(path: StrPath) -> dict[str, Any]:
    """The record of a remote path in its store; an error where there is none."""
    if (info := _info(path)) is None:
        raise CheckpointError(f"{os.fspath(path)} does not exist.")
    return info


def _info(path: StrPath) -> dict[str, Any] | None:
    def info(fs: Any, inner: str) -> dict[str, Any] | None:
        try:
            return dict(fs.info(inner))
        except FileNotFoundError as error:
            raise_if_no_bucket(error, path)
            return None

    return on_store(path, info)


@contextlib.contextmanager
def _explained(path: StrPath) -> Iterator[None]:
    """Turn the local failures that a user can mend into a CheckpointError."""
    text = os.fspath(path)
    try:
        with _explained_writing(path):
            yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{text} does not exist.") from error
    except IsADirectoryError as error:
        raise CheckpointError(f"{text} is a folder; a file was expected.") from error
    except (NotADirectoryError, FileExistsError) as error:
        raise CheckpointError(f"{text}: a part of this path is a file; a folder was expected.") from error


@contextlib.contextmanager
def _explained_writing(path: StrPath) -> Iterator[None]:
    """Explain what the disk itself refuses, and nothing else: the block may run the caller's code."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save puts a RuntimeError of its own on top of a failed write
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None and cause.errno in _DISK_FULL:
            raise CheckpointError(_disk_full(path, "written")) from error
        if cause is not None and cause.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise CheckpointError(
                f"{os.fspath(path)}: {cause.strerror}. Change its permissions, or give a folder that you can "
                "write (for a run: set IMAGINAIRE_OUTPUT_ROOT)."
            ) from error
        raise


def _disk_full(path: StrPath, done: str) -> str:
    return (
        f"{os.fspath(path)} was not {done}: the disk or quota is full ({readable_bytes(free_bytes(path) or 0)} free)."
        " Free space, or write to another disk (for a run: set IMAGINAIRE_OUTPUT_ROOT, or keep fewer checkpoints with"
        " checkpoint.keep_last)."
    )


def readable_bytes(count: int) -> str:
    """``0 bytes``, ``812.3 MB``, ``1.2 GB``: in powers of a thousand."""
    if count < 1000:
        return "1 byte" if count == 1 else f"{count} bytes"
    power = min(int(math.log10(count)) // 3, 4)
    return f"{count / 1000**power:.1f} {('bytes', 'kB', 'MB', 'GB', 'TB')[power]}"


def _local(path: StrPath) -> str:
    return os.fspath(path).removeprefix("file://")
