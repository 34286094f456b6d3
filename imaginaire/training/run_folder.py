# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: whether it can be written, who holds it, and that a start which is refused leaves none."""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from imaginaire import distributed, storage
from imaginaire import log as logs
from imaginaire.config.lazy_yaml import plain_data
from imaginaire.errors import CheckpointError, ConfigError, UserError

log = logging.getLogger(__name__)

_COMPARED = ("dataloader_train", "model", "scheduler")  # sections that define what weights were trained on
# Of them, what another machine sets anew.
_OF_THE_MACHINE = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "timeout", "fsdp_shard_size")
_SHOWN = 8  # changes in a message

_locked: set[str] = set()  # a second lock of one process would replace the first, and end with it
# run folders that this process made, with the parents so made, the deepest first, and the config.yaml it wrote there
_made: dict[str, tuple[list[str], str]] = {}
_replaced: dict[str, tuple[str, str]] = {}  # run folders that were there before: their config.yaml, and the new one


def check_writable(path: str) -> None:
    """Raise when the run folder cannot be written: better now than at the first save. Nothing is left of the trial."""
    place = path if storage.is_remote(path) else str(_nearest(path))
    try:
        probe = storage.join(place, f".write-probe-{uuid.uuid4().hex}")
        storage.write_atomically(probe, lambda file: file.write(b"x"))
        storage.remove(probe)
    except OSError as error:
        raise CheckpointError(
            f"The run folder {path} cannot be written: {error}. Set IMAGINAIRE_OUTPUT_ROOT to a place that can, or "
            "change job.name."
        ) from error


def claim(path: str, config: str) -> IO[str] | None:
    """Make the run folder, lock it and write its config.yaml; what `unlock` takes."""
    whole, nearest = Path(storage.join(path)).absolute(), _nearest(path)
    new = [str(place) for place in (whole, *whole.parents) if nearest in place.parents]
    if storage.is_remote(path):
        new = [] if storage.is_folder(path) else [path]
    storage.makedirs(path)
    file = lock(path)
    keep(path)  # what an earlier run of this process made is not this one's to remove
    if new:  # of two that begin it at once, the one that holds it
        _made[path] = new, config
    saved = storage.join(path, "config.yaml")
    with contextlib.suppress(OSError, UserError):
        if storage.exists(saved):
            _replaced[path] = storage.read_text(saved), config
    storage.write_atomically(saved, lambda out: out.write(config.encode()))
    return file


def changes(path: str, config: str) -> str:
    """A warning for a run with checkpoints whose data, model or schedule differ from its config.yaml, which `claim`
    will replace by ``config``; empty without differences."""
    saved = storage.join(path, "config.yaml")
    if not (storage.exists(saved) and storage.listdir(storage.join(path, "checkpoints"))):
        return ""
    try:
        before, now = dict(_leaves(plain_data(storage.read_text(saved), saved))), dict(_leaves(plain_data(config, "")))
    except (OSError, UserError) as error:
        log.info("%s is replaced, and was not compared: %s", saved, error)
        return ""
    changed = [
        f"\n  {key}: {before.get(key, 'not set')} -> {now.get(key, 'not set')}"
        for key in dict.fromkeys((*before, *now))
        if key.partition(".")[0] in _COMPARED
        and key.rpartition(".")[2] not in _OF_THE_MACHINE
        and before.get(key, "not set") != now.get(key, "not set")
    ]
    if not changed:
        return ""
    more = f"\n  ... and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return (
        f"{path} is continued with other settings than it was trained with:{''.join(changed[:_SHOWN])}{more}\n"
        "The new ones count from now on. Its config.yaml has them, and inference takes them for its older checkpoints"
        " too. Where that is not meant, give this run another job.name, or its settings from before."
    )


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree of dictionaries by their dotted keys; a list is one value."""
    if isinstance(tree, dict) and (tree or not key):
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree


def keep(path: str) -> None:
    """The run has begun: its folder stays, also when a later start in it is refused."""
    _made.pop(path, None)
    _replaced.pop(path, None)


def _put_back(path: str, before: str, config: str) -> None:
    """The config.yaml of a run that a refused start replaced by ``config``, unless another process has it by now."""
    saved = storage.join(path, "config.yaml")
    file = None
    try:
        file = lock(path)
        if storage.read_text(saved) == config:
            storage.write_atomically(saved, lambda out: out.write(before.encode()))
    except (OSError, UserError) as error:
        log.warning("%s has the settings of the start that was refused: %s", saved, error)
    finally:
        if file is not None:
            unlock(file)


def discard_new(path: str) -> None:
    """End the log of a run that was refused before its first step, and remove its folder where it was made for it; one
    that was there before gets its config.yaml back.

    Not where another process holds it by now, and never with checkpoints. In an object store, which has no locks, only
    where it holds nothing but the config.yaml of this start.
    """
    new, config = _made.pop(path, ([], ""))
    if not new and path in _replaced:
        _put_back(path, *_replaced.pop(path))
    if distributed.is_rank0() and not new:
        return
    logs.setup(None, distributed.rank())
    _locked.discard(_lock_name(path))
    if not new:
        return
    file = None
    try:
        file = lock(path)
        if storage.listdir(storage.join(path, "checkpoints")):
            raise CheckpointError("it holds checkpoints")
        if storage.is_remote(path):
            own = storage.join(path, "config.yaml")
            if storage.listdir(path) != ["config.yaml"] or storage.read_text(own) != config:
                raise CheckpointError("another process may have begun the run")
            storage.remove(own)
            return
        storage.remove(path)
        for parent in new[1:]:
            os.rmdir(parent)  # as far as no other run has come to lie in it
    except (OSError, UserError) as error:
        log.info("%s is left: %s", path, error)
    finally:
        if file is not None:
            unlock(file)


def lock(path: str) -> IO[str] | None:
    """Hold the run folder for this process, or raise naming its holder; released with the file or the process."""
    if storage.is_remote(path):
        return None  # object stores have no locks
    name = _lock_name(path)
    if name in _locked:
        raise ConfigError(f"The run folder {path} is in use by this process: close() its other trainer first.")
    try:
        file = open(name, "a+")  # noqa: SIM115 - held as long as the run
    except OSError as error:
        raise ConfigError(f"{name} cannot be opened: {error}. Give this run another job.name.") from error
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


def unlock(file: IO[str]) -> None:
    _locked.discard(file.name)
    file.close()


def _lock_name(path: str) -> str:
    return os.path.abspath(storage.join(path, "run.lock"))


def _nearest(path: str) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    place = Path(storage.join(path)).absolute()  # without file://
    while not place.exists():
        place = place.parent
    return place
