# SPDX-License-Identifier: Apache-2.0
"""The two layouts of a saved iteration, and how each is read, checked and written.

``standard``: ``{model,optim,scheduler,trainer}/iter_000000500.pt`` with whole tensors, pointer "iter_000000500.pt".
``dcp``: ``iter_000000500/{model,optim,scheduler,trainer}/`` of torch.distributed.checkpoint, sharded, pointer
"iter_000000500".

Both hold the same four trees of dictionaries, lists, plain values and tensors. The trainer's part is written last and
carries a fingerprint of the other three, so a torn, mixed or foreign set is recognised without reading the tensors.
Every file opens with ``torch.load(weights_only=True)``.
"""

import functools
import hashlib
import io
import logging
import os
import re
import threading
import time
import warnings
import zipfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imaginaire import distributed, storage
from imaginaire.checkpoint.plain_pickle import FAULTS, Like, Tree, load_plain
from imaginaire.checkpoint.weight_files import POINTER, load_pt
from imaginaire.distributed.parallel import is_dtensor
from imaginaire.errors import CheckpointError

log = logging.getLogger(__name__)

KINDS = ("model", "optim", "scheduler", "trainer")  # in the order of writing
_NAME = re.compile(r"iter_(\d{9,})(\.pt)?")

# torch warns at every save of a single process
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_PLAIN_TYPES = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_PLAIN_TYPES |= {Tensor, nn.Parameter}  # and DTensors

CHUNK_BYTES = 4 * 2**20
THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip that is a file, or ``length`` bytes of it from ``start`` on; ``name`` is what messages call it."""

    path: Path
    name: str
    start: int = 0
    length: int | None = None


@dataclass(frozen=True, slots=True)
class CheckpointSet:
    """One saved iteration in a ``checkpoints`` folder; ``name`` is the text of the pointer."""

    folder: str
    name: str

    @property
    def iteration(self) -> int:
        match = _NAME.fullmatch(self.name)
        assert match is not None
        return int(match[1])

    @property
    def is_dcp(self) -> bool:
        return not self.name.endswith(".pt")

    def path(self, kind: str) -> str:
        if self.is_dcp:
            return storage.join(self.folder, self.name, kind)
        return storage.join(self.folder, kind, self.name)

    def has(self, kind: str) -> bool:
        return storage.exists(storage.join(self.path(kind), ".metadata") if self.is_dcp else self.path(kind))

    def has_leftovers(self, kind: str) -> bool:
        """True if anything of a kind is there, also what a stopped removal left."""
        return bool(storage.listdir(self.path(kind))) if self.is_dcp else self.has(kind)

    def read(self, kind: str, like: Like | None = None) -> Tree:
        """The tree of one kind; tensors of a standard set stay memory-mapped, those of DCP are loaded into ``like``."""
        if not self.has(kind):
            raise CheckpointError(f"{self.path(kind)} is missing.")
        if self.is_dcp:
            from imaginaire.checkpoint.dcp import read_tree

            return read_tree(self.path(kind), like)
        return load_pt(self.path(kind))

    def faults(self, kinds: Sequence[str] = KINDS) -> list[str]:
        """The faults of some kinds of this set and of their record, as sentences; reads a few kilobytes."""
        missing = [self.path(kind) for kind in dict.fromkeys((*kinds, "trainer")) if not self.has(kind)]
        if missing:
            return [f"{path} is missing." for path in missing]
        try:
            fingerprint(self.path("trainer"))
            if faults := self.damage(["trainer"]):
                return faults
            trainer = self.read("trainer")
        except CheckpointError as error:
            return [str(error)]
        if not isinstance(trainer, dict) or trainer.get("iteration") != self.iteration:
            found = trainer.get("iteration") if isinstance(trainer, dict) else type(trainer).__name__
            return [f"{self.path('trainer')} is of iteration {found}, not {self.iteration}."]
        recorded = trainer.get("files")
        if not isinstance(recorded, dict):
            return []  # written by another program: nothing to compare with
        for kind in (kind for kind in kinds if kind != "trainer"):
            try:
                found = fingerprint(self.path(kind))
            except CheckpointError as error:
                faults.append(str(error))
                continue
            if found != recorded.get(kind):
                faults.append(f"{self.path(kind)} ({found['bytes']} bytes) is not the file saved with this set.")
        return faults

    def damage(self, kinds: Iterable[str], share: tuple[int, int] = (0, 1)) -> list[str]:
        """The faults in the bytes of some kinds, as sentences: all of them are read, by n processes that each take
        share (i, n). Sharded sets in an object store are left to its own checksums."""
        found: list[Archive] = []
        faults = []
        for kind in kinds:
            try:
                found += self._archives(kind)
            except CheckpointError as error:
                faults.append(str(error))
        return faults + _damage_of(found, share)

    def _archives(self, kind: str) -> list[Archive]:
        """The zips of a kind, whose directory torch can read."""
        path = self.path(kind)
        if not self.is_dcp:
            load_pt(path)
            return [Archive(storage.local_copy(path), path)]
        if storage.is_remote(path):
            return []
        from imaginaire.checkpoint.dcp import SafeFileSystemReader

        places = SafeFileSystemReader(path).read_metadata().storage_data.items()
        parts = ((index.fqn, storage.join(path, place.relative_path), place) for index, place in places)
        return [Archive(Path(file), f"'{name}' in {file}", place.offset, place.length) for name, file, place in parts]

    def bytes(self) -> int:
        return sum(_bytes(self.path(kind)) for kind in KINDS if self.has(kind))

    def remove(self, kind: str) -> None:
        storage.remove(self.path(kind))
        if self.is_dcp and not storage.listdir(storage.join(self.folder, self.name)):
            storage.remove(storage.join(self.folder, self.name))


def set_name(iteration: int, *, dcp: bool) -> str:
    return f"iter_{iteration:09d}" + ("" if dcp else ".pt")


def all_sets(folder: str) -> list[CheckpointSet]:
    """Every iteration of which anything is there, newest first."""
    names = {name for name in storage.listdir(folder) if _NAME.fullmatch(name) and not name.endswith(".pt")}
    for kind in KINDS:
        names |= {name for name in storage.listdir(storage.join(folder, kind)) if _NAME.fullmatch(name)}
    return sorted((CheckpointSet(folder, name) for name in names), key=lambda s: s.iteration, reverse=True)


def newest_complete(folder: str, before: int | None = None) -> CheckpointSet | None:
    """The newest set without faults (older than ``before``)."""
    older = (s for s in all_sets(folder) if before is None or s.iteration < before)
    return next((s for s in older if not s.faults()), None)


def read_pointer(folder: str) -> CheckpointSet | None:
    """The set that ``latest_checkpoint.txt`` names, or None without that file."""
    path = storage.join(folder, POINTER)
    if not storage.exists(path):
        return None
    name = storage.read_text(path).strip()
    if not _NAME.fullmatch(name):
        raise CheckpointError(f"{path} holds '{name[:80]}'; expected a name such as iter_000000500.pt.")
    return CheckpointSet(folder, name)


def write_pointer(saved: CheckpointSet) -> None:
    storage.write_text(storage.join(saved.folder, POINTER), saved.name + "\n")


def find_set(path: str) -> CheckpointSet:
    """The set at a path: a run's folder, its ``checkpoints`` folder, ``…/model/iter_N.pt`` or a DCP
    ``…/iter_N[/model]``."""
    path = path.rstrip("/")
    parent, _, name = path.rpartition("/")
    if name in KINDS and _NAME.fullmatch(parent.rpartition("/")[2]):
        return find_set(parent)
    if _NAME.fullmatch(name):
        folder = parent if not name.endswith(".pt") else parent.rpartition("/")[0]
        found = CheckpointSet(folder, name)
        if any(found.has(kind) for kind in KINDS):
            return found
        others = ", ".join(s.name for s in all_sets(folder)[:8]) or "none"
        raise CheckpointError(f"There is no checkpoint {name} in {folder}. Iterations there: {others}.")
    for folder in (path, storage.join(path, "checkpoints")):
        try:
            found_or_none = read_pointer(folder) or newest_complete(folder)
        except CheckpointError as error:
            complete = newest_complete(folder)
            raise CheckpointError(f"{error} Complete: {complete.path('model') if complete else 'none'}.") from error
        if found_or_none is not None:
            return found_or_none
    raise CheckpointError(
        f"{path} holds no training state. Expected a run's folder with checkpoints/{POINTER}, or one of its iterations "
        "(checkpoints/model/iter_000000500.pt or checkpoints/iter_000000500)."
    )


def write_standard(saved: CheckpointSet, trees: dict[str, Tree]) -> None:
    """Write the four files; the pointer is the caller's."""
    for kind in KINDS:
        if kind == "trainer":
            trees["trainer"]["files"] = {k: fingerprint(saved.path(k)) for k in KINDS[:-1]}
        storage.makedirs(storage.join(saved.folder, kind))
        storage.write_atomically(saved.path(kind), lambda file, tree=trees[kind]: torch.save(tree, file))  # type: ignore[misc]


def write_dcp(saved: CheckpointSet, trees: dict[str, Tree], group: Any = None) -> None:
    """Write the four folders, every rank its shards; the pointer is the caller's."""
    from imaginaire.checkpoint.dcp import write_tree

    for kind in KINDS:
        if kind == "trainer" and (group is None or distributed.is_rank0()):
            trees["trainer"]["files"] = {k: fingerprint(saved.path(k)) for k in KINDS[:-1]}
        write_tree(saved.path(kind), trees[kind], group)
        if distributed.is_rank0():
            storage.sync_folder(saved.path(kind))  # torch renames the index, but flushes neither it nor its name
    if distributed.is_rank0():
        storage.sync_folder(storage.join(saved.folder, saved.name))


def check_plain(tree: Tree, place: str) -> None:
    """Raise unless `torch.load(weights_only=True)` will read the tree back; names the first value that it would not."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            check_plain(name, f"{place}: the key {name!r}")
            check_plain(value, f"{place}.{name}")
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            check_plain(value, f"{place}.{index}")
    elif type(tree) not in _PLAIN_TYPES and not is_dtensor(tree):
        kind = f"{type(tree).__module__}.{type(tree).__qualname__}"
        raise CheckpointError(
            f"{place} is a {kind}, which a checkpoint cannot hold. Give plain numbers, strings, containers or tensors "
            "(float(x) for a NumPy number, torch.from_numpy(x) for an array)."
        )


def fingerprint(path: str) -> dict[str, Any]:
    """Size and digest of a checkpoint file, from the checksums in its directory; of a DCP folder, from its file
    sizes."""
    if path.endswith(".pt"):
        with storage.open(path) as file:
            try:
                with zipfile.ZipFile(file) as archive:
                    entries = [(i.filename.partition("/")[2], i.file_size, i.CRC) for i in archive.infolist()]
            except FAULTS as error:
                size = storage.size(path)
                raise CheckpointError(f"{path} ({size} bytes) is torn or not a checkpoint file: {error}.") from error
        listing = repr(entries)
    else:
        names = sorted(n for n in storage.listdir(path) if n.endswith(".distcp"))
        listing = repr([(n, storage.size(storage.join(path, n))) for n in names])
        with storage.open(storage.join(path, ".metadata")) as file:
            listing += hashlib.sha256(file.read()).hexdigest()
    return {"bytes": _bytes(path), "digest": hashlib.sha256(listing.encode()).hexdigest()[:32]}


def _bytes(path: str) -> int:
    if path.endswith(".pt"):
        return storage.size(path)
    return sum(storage.size(storage.join(path, name)) for name in storage.listdir(path))


# --- which set a run continues from: the newest whose files are complete and hold the bytes that were written


def own_set(folder: str, kinds: Iterable[str], *, fallback: bool) -> CheckpointSet | None:
    """The set that a run continues from, None where its ``checkpoints`` folder has none; every rank calls this.

    The pointer names it. All bytes of ``kinds`` are checked: when that set is damaged, the newest complete set before
    it is named in the error, or taken with ``fallback``. One rank looks for files, so that all agree even while a file
    system is slow to show them.
    """
    found = distributed.from_rank0(lambda: _named_set(folder, fallback))
    while found is not None and (faults := damage(found, kinds)):
        damaged = found
        found = distributed.from_rank0(lambda: _other_set(folder, faults, fallback, before=damaged.iteration))  # noqa: B023
    return found


def foreign_set(path: str, kinds: Iterable[str]) -> CheckpointSet:
    """The set at ``checkpoint.load_path``, complete and with unchanged bytes; every rank calls this."""
    saved = find_set(path)
    if faults := saved.faults() or damage(saved, kinds):
        complete = newest_complete(saved.folder, before=saved.iteration)
        hint = f" The newest complete set before it is {complete.path('model')}." if complete else ""
        raise CheckpointError(f"checkpoint.load_path={path}: {' '.join(faults)}{hint}")
    return saved


def require_unchanged(saved: CheckpointSet, kinds: Sequence[str]) -> None:
    """Raise unless these kinds of a set are those that were saved, with all their bytes; each process reads them, once
    as long as its files stay as they are."""
    _require_unchanged(saved, tuple(kinds), _stamp(saved, kinds))


@functools.lru_cache(maxsize=64)
def _require_unchanged(saved: CheckpointSet, kinds: tuple[str, ...], stamp: object) -> None:
    # of weights that were copied alone, nothing is known but their own checksums
    faults = saved.faults(kinds) if saved.has("trainer") or "trainer" in kinds else []
    if faults := faults or saved.damage(kinds):
        raise CheckpointError(
            f"{' '.join(faults)} Restore the files, or take another iteration:"
            f" {', '.join(s.name for s in all_sets(saved.folder) if s != saved)[:200] or 'there is no other'}."
        )


def _stamp(saved: CheckpointSet, kinds: Sequence[str]) -> object:
    """Names, sizes and times of the files of a set; remote ones have no times."""
    paths = [saved.path(kind) for kind in {*kinds, "trainer"}]
    if storage.is_remote(saved.folder):
        return tuple(sorted((path, _bytes(path)) for path in paths if storage.exists(path)))
    files = [file for path in map(Path, paths) for file in (path.iterdir() if path.is_dir() else [path])]
    return tuple(sorted((str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.is_file()))


def set_of_weights(path: str) -> CheckpointSet | None:
    """The set that the weights at a path are a part of; None where they are in none."""
    parent, _, name = path.rstrip("/").rpartition("/")
    if name == "model" and _NAME.fullmatch(parent.rpartition("/")[2]):  # iter_N/model
        parent, _, name = parent.rpartition("/")
    elif parent.rpartition("/")[2] == "model" and name.endswith(".pt"):  # model/iter_N.pt
        parent = parent.rpartition("/")[0]
    saved = CheckpointSet(parent, name) if _NAME.fullmatch(name) else None
    return saved if saved is not None and saved.has("model") else None


def damage(saved: CheckpointSet, kinds: Iterable[str]) -> list[str]:
    """The faults in the bytes of a set; the ranks share the reading, and all get the whole answer."""
    start = time.perf_counter()
    mine = saved.damage(kinds, (distributed.rank(), distributed.world_size()))
    found = sorted({fault for faults in distributed.all_gather_object(mine) for fault in faults})
    log.info("checked the bytes of iter %d (%.1f s)", saved.iteration, time.perf_counter() - start)
    return found


def _named_set(folder: str, fallback: bool) -> CheckpointSet | None:
    for kind in ("", *KINDS):
        storage.remove_stale_temporaries(storage.join(folder, kind) if kind else folder)
    try:
        named = read_pointer(folder)
        faults = [] if named is None else named.faults()
    except CheckpointError as error:
        named, faults = None, [str(error)]
    if named is not None and not faults:
        return named
    if faults:
        return _other_set(folder, faults, fallback)
    complete = newest_complete(folder)
    if complete is not None:  # stopped between the last file and the pointer, or the pointer was deleted
        log.warning("no %s in %s; resuming from the complete set %s", POINTER, folder, complete.name)
    return complete


def _other_set(folder: str, faults: list[str], fallback: bool, before: int | None = None) -> CheckpointSet:
    complete = newest_complete(folder, before)
    if complete is None:
        raise CheckpointError(
            f"The run cannot resume: {' '.join(faults)} {folder} holds no other complete set. "
            "Restore the files, or start under another job.name."
        )
    if not fallback:
        raise CheckpointError(
            f"The run cannot resume: {' '.join(faults)} The newest complete set is {complete.name} "
            f"(iteration {complete.iteration}); continue from it with checkpoint.fallback=True."
        )
    log.warning("%s Falling back to %s, as checkpoint.fallback=True asks.", " ".join(faults), complete.name)
    return complete


# --- the bytes of zips: torch ignores the CRC-32 of each record


def _damage_of(archives: Sequence[Archive], share: tuple[int, int] = (0, 1)) -> list[str]:
    """A sentence for each record that is not what was saved; of share (i, n) every n-th record is read, from the i-th
    on, so that n processes read all of them."""
    with ExitStack() as files, ThreadPoolExecutor(THREADS) as pool:

        @functools.cache
        def opened(path: Path, thread: int) -> zipfile.ZipFile:
            """One for each thread: threads that open records of the same one disturb each other in Python 3.12."""
            return files.enter_context(zipfile.ZipFile(path))

        checks = [check for archive in archives for check in _checks(archive, opened)]
        found = pool.map(lambda check: check(), checks[share[0] :: share[1]])
        damaged = [sentence for sentence in found if sentence]
    return damaged if len(damaged) <= 4 else [*damaged[:3], f"So are {len(damaged) - 3} more parts."]


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
    except FAULTS as error:
        return _sentence(archive, error)
    except Exception:  # a damaged pickle raises nearly anything, with torch's advice to load it without restrictions
        return _sentence(archive, "its pickle cannot be read")


def _damage_of_record(archive: Archive, opened: zipfile.ZipFile, info: zipfile.ZipInfo) -> str:
    try:
        with opened.open(info) as record:
            while record.read(CHUNK_BYTES):
                pass  # at its end the checksum is compared
    except FAULTS as error:
        return _sentence(archive, error)
    return ""


def _sentence(archive: Archive, cause: BaseException | str) -> str:
    return f"{archive.name} is damaged: its bytes are not those that were saved ({cause})."
