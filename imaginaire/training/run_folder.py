# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: whether it can be written, who holds it, and the configuration in it."""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from imaginaire import distributed, storage
from imaginaire import log as logs
from imaginaire.config.lazy_config import plain_data
from imaginaire.errors import CheckpointError, ConfigError, UserError, raised_as

log = logging.getLogger(__name__)

_COMPARED = ("dataloader_train", "model", "scheduler")  # sections that define what weights were trained on
# Of them, what another machine sets anew.
_OF_THE_MACHINE = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "timeout", "fsdp_shard_size")
_SHOWN = 8  # changes in a message

_locked: set[str] = set()  # a second lock of one process would replace the first, and end with it


def check_writable(path: str) -> None:
    """Raise when the run folder cannot be written: better now than at the first save. Nothing is left of the trial."""
    place = path if storage.is_remote(path) else str(storage.nearest_folder(path))
    cure = "Set IMAGINAIRE_OUTPUT_ROOT to a place that can, or change job.name."
    with raised_as(CheckpointError, f"The run folder {path} cannot be written", OSError, cure=cure):
        probe = storage.join(place, f".write-probe-{uuid.uuid4().hex}")
        storage.write_bytes(probe, b"x")
        storage.remove(probe)


class RunFolder:
    """The folder of a run with its log, held by rank 0 until `release`; every rank makes one."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock: IO[str] | None = None
        self._made_below = distributed.from_rank0(self._take)
        logs.setup(path, distributed.rank())

    def _take(self) -> Path | None:
        """Make the folder and lock it; the folder above it that was there, where this run made it."""
        is_there = storage.is_remote(self._path) or storage.exists(self._path)
        below = None if is_there else storage.nearest_folder(self._path)
        self._lock = _lock(self._path)
        return below

    def release(self) -> None:
        """Another process may now use it: call this after the last write. A second call does nothing."""
        if self._lock is not None:
            _locked.discard(self._lock.name)
            self._lock.close()
            self._lock = None

    def remove(self) -> None:
        """Remove it if this run made it, and the folders above it that it is alone in."""
        if self._made_below is None:
            return
        logs.setup(None, distributed.rank())  # no log in a folder that is gone
        if distributed.is_rank0():
            place = Path(storage.join(self._path)).absolute()
            shutil.rmtree(place, ignore_errors=True)  # another process may still write its log
            with contextlib.suppress(OSError):
                while (place := place.parent) != self._made_below:
                    place.rmdir()


def _lock(path: str) -> IO[str] | None:
    """Make the run folder and hold it for this process, or raise naming its holder."""
    storage.makedirs(path)
    if storage.is_remote(path):
        return None  # object stores have no locks
    name = os.path.abspath(storage.join(path, "run.lock"))
    if name in _locked:
        raise ConfigError(f"The run folder {path} is in use by this process: close() its other trainer first.")
    with raised_as(ConfigError, f"{name} cannot be opened", OSError, cure="Give this run another job.name."):
        file = open(name, "a+")  # noqa: SIM115 - held as long as the run
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock not shared with forked workers
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            log.warning("%s cannot be locked (%s): do not start the same run twice", path, error)
            return file
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ConfigError(
            f"The run folder {path} is in use by {holder}. Wait for it, end it, or give this run another job.name."
        ) from error
    _locked.add(name)
    file.truncate(0)
    file.write(f"{socket.gethostname()} pid {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    return file


def write_config(path: str, config: str, *, is_resumed: bool) -> None:
    """Write config.yaml at the start of training; what a resumed run was trained with until now is compared first."""
    saved = storage.join(path, "config.yaml")
    if is_resumed and storage.exists(saved):
        _warn_of_changes(path, saved, config)
    storage.write_text(saved, config)


def _warn_of_changes(path: str, saved: str, config: str) -> None:
    try:
        before, now = dict(_leaves(plain_data(storage.read_text(saved), saved))), dict(_leaves(plain_data(config, "")))
    except (OSError, UserError) as error:
        log.info("%s is replaced, and was not compared: %s", saved, error)
        return
    changed = [
        f"\n  {key}: {before.get(key, 'not set')} -> {now.get(key, 'not set')}"
        for key in dict.fromkeys((*before, *now))
        if key.partition(".")[0] in _COMPARED
        and key.rpartition(".")[2] not in _OF_THE_MACHINE
        and before.get(key, "not set") != now.get(key, "not set")
    ]
    if changed:
        shown = "".join(changed[:_SHOWN])
        log.warning(
            f"{path} is continued with {len(changed)} other settings than it was trained with:{shown}\nThe new ones"
            " count from now on, also for inference from its older checkpoints. Where that is not meant, give this run"
            " another job.name."
        )


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree of dictionaries by their dotted keys; a list is one value."""
    if isinstance(tree, dict) and (tree or not key):
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree
