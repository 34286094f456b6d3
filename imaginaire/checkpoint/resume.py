# SPDX-License-Identifier: Apache-2.0
"""Which saved iteration a run goes on from: the newest whose files are complete and are what was written."""

import logging
import time
from collections.abc import Callable, Iterable

from imaginaire import distributed, storage
from imaginaire.checkpoint import layout as checkpoint_layout
from imaginaire.checkpoint.layout import KINDS, CheckpointSet
from imaginaire.checkpoint.weight_files import POINTER
from imaginaire.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


def own_set(folder: str, kinds: Iterable[str], *, fallback: bool) -> CheckpointSet | None:
    """The set that a ``checkpoints`` folder goes on from, None where there is none; every rank calls this.

    Its pointer names it. When that set is damaged, which may only show when all bytes of ``kinds`` are read, the error
    names the newest complete set before it, or that one is given (``fallback``).
    """
    found = _of_rank0(lambda: _named_set(folder, fallback))
    while found is not None and (faults := damage(found, kinds)):
        damaged = found
        found = _of_rank0(lambda: _other_set(folder, faults, fallback, before=damaged.iteration))  # noqa: B023
    return found


def foreign_set(path: str, kinds: Iterable[str]) -> CheckpointSet:
    """The set at ``checkpoint.load_path``, whose files are complete and what was written; every rank calls this."""
    saved = checkpoint_layout.find_set(path)
    if faults := saved.faults() or damage(saved, kinds):
        complete = checkpoint_layout.newest_complete(saved.folder, before=saved.iteration)
        hint = f" The newest complete set before it is {complete.path('model')}." if complete else ""
        raise CheckpointError(f"checkpoint.load_path={path}: {' '.join(faults)}{hint}")
    return saved


def damage(saved: CheckpointSet, kinds: Iterable[str]) -> list[str]:
    """What is wrong with the bytes of a set; the ranks share the reading, and all get the whole answer."""
    start = time.perf_counter()
    mine = saved.damage(kinds, (distributed.rank(), distributed.world_size()))
    found = sorted({fault for faults in distributed.all_gather_object(mine) for fault in faults})
    log.info("checked the bytes of iter %d (%.1f s)", saved.iteration, time.perf_counter() - start)
    return found


def _of_rank0(choose: Callable[[], CheckpointSet | None]) -> CheckpointSet | None:
    # one rank looks, so that all agree even while a file system is slow to show files
    found: CheckpointSet | Exception | None = None
    if distributed.is_rank0():
        try:
            found = choose()
        except (CheckpointError, ConfigError) as error:
            found = error
    found = distributed.broadcast_object(found)
    if isinstance(found, Exception):
        raise found
    assert found is None or isinstance(found, CheckpointSet)
    return found


def _named_set(folder: str, fallback: bool) -> CheckpointSet | None:
    for kind in ("", *KINDS):
        storage.remove_stale_temporaries(storage.join(folder, kind) if kind else folder)
    try:
        named = checkpoint_layout.read_pointer(folder)
        faults = [] if named is None else named.faults()
    except CheckpointError as error:
        named, faults = None, [str(error)]
    if named is not None and not faults:
        return named
    if faults:
        return _other_set(folder, faults, fallback)
    complete = checkpoint_layout.newest_complete(folder)
    if complete is not None:  # stopped between the last file and the pointer, or the pointer was deleted
        log.warning("no %s in %s; resuming from the complete set %s", POINTER, folder, complete.name)
    return complete


def _other_set(folder: str, faults: list[str], fallback: bool, before: int | None = None) -> CheckpointSet:
    complete = checkpoint_layout.newest_complete(folder, before)
    if complete is None:
        raise CheckpointError(
            f"The run cannot resume: {' '.join(faults)} {folder} holds no other complete set. "
            "Restore the files, or start under another job.name."
        )
    if not fallback:
        raise CheckpointError(
            f"The run cannot resume: {' '.join(faults)} The newest complete set is {complete.name} "
            f"(iteration {complete.iteration}); go on from it with checkpoint.fallback=True."
        )
    log.warning("%s Falling back to %s, as checkpoint.fallback=True asks.", " ".join(faults), complete.name)
    return complete
