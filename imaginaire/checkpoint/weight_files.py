# SPDX-License-Identifier: Apache-2.0
"""The files of weights that an address names, and their tensors by name: lazy, memory-mapped, not unpickled.

The content of a file decides what it is, not its name. A file that is not what it should be (empty, cut short, a web
page, a git-lfs pointer) is named as what it looks like.
"""

import contextlib
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

from torch import Tensor

from imaginaire import foreign_json, storage
from imaginaire.checkpoint.plain_pickle import Refused, load_plain, read_arrays, refused_object
from imaginaire.errors import CheckpointError, ConfigError, first_line, listed, near, raised_as
from imaginaire.storage import hub
from imaginaire.storage.hub import absent
from imaginaire.storage.object_store import StrPath

log = logging.getLogger(__name__)

TENSOR_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
POINTER = "latest_checkpoint.txt"
CONTAINERS = ("model", "state_dict", "model_state_dict", "module")  # a training file has its weights under one of these
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(?:safetensors|bin)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name; each is opened when it is asked for, by ``source[name]`` of the pair under its new name."""

    def __init__(self, places: Mapping[str, tuple[Any, str]]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        source, inner = self._places[name]
        return cast(Tensor, source[inner])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        source, inner = self._places[name]
        return shape_of(source, inner)


class _SafetensorsFile:
    """``file[name]`` for an open safetensors file; the tensor is a view of the mapped file."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __getitem__(self, name: str) -> Tensor:
        return cast(Tensor, self.file.get_tensor(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.file.get_slice(name).get_shape())


def shape_of(source: Any, name: str) -> tuple[int, ...]:
    """The shape of ``source[name]``, without reading it where the source knows it."""
    return tuple(source.shape(name) if hasattr(source, "shape") else source[name].shape)


def open_address(address: str) -> Mapping[str, Tensor]:
    """The tensors at a local or remote path, or of a hub id; of a training run, at what `latest` gives."""
    if is_hub(address):
        return _open_hub(address)
    if storage.is_folder(address):
        return _open_folder(_Folder.at(address))
    if not storage.exists(address):
        raise absent(address)
    return open_file(storage.local_copy(address), address)


def latest(address: str) -> str:
    """The checkpoint that a run's folder stands for, named by its ``latest_checkpoint.txt``; other addresses unchanged.
    Call it once before reading a checkpoint several times: a run may save another one in between."""
    if is_hub(address) or not storage.is_folder(address):
        return address
    for folder in (address, storage.join(address, "checkpoints")):
        if storage.exists(storage.join(folder, POINTER)):
            return _pointed(folder)
    return address


def names_at(address: str) -> list[str]:
    """The names directly in a local or remote folder, or in a hub repository or a folder of it; [] for a file."""
    if is_hub(address):
        repository, revision, inner = _hub_parts(address)
        prefix = f"{inner}/" if inner else ""
        names = _hub_names(repository, revision, address)
        return sorted({name[len(prefix) :].partition("/")[0] for name in names if name.startswith(prefix)})
    return storage.listdir(address) if storage.is_folder(address) else []


def below(address: str, name: str) -> str:
    """The address of a name in a folder or hub repository."""
    if is_hub(address):
        return f"hf://{address.removeprefix('hf://').rstrip('/')}/{name}"
    return storage.join(address, name)


def local_file(address: str) -> Path:
    """One file of a local, remote or hub address, on this machine."""
    if not is_hub(address):
        if not storage.exists(address):
            raise absent(address)
        return storage.local_copy(address)
    repository, revision, inner = _hub_parts(address)
    return _hub_fetch(repository, revision, inner, address)


def json_in(address: str, name: str) -> dict[str, Any]:
    """The object in a JSON file of a local, remote or hub folder; {} where there is no such file."""
    if name not in names_at(address):
        return {}
    with raised_as(CheckpointError, f"{address}/{name} cannot be read", ValueError):
        return foreign_json.load_object(local_file(below(address, name)))


def is_hub(address: str) -> bool:
    """True for ``hf://...``, and for ``organisation/name`` that is no path here: its first part does not exist."""
    has_form = _HUB_ID.fullmatch(address) is not None and not address.endswith(TENSOR_SUFFIXES)
    return address.startswith("hf://") or (has_form and not os.path.exists(address.partition("/")[0]))


def load_pt(path: StrPath) -> Any:
    """The content of a file of ``torch.save``, memory-mapped, ``weights_only=True``; remote files are fetched first."""
    text = os.fspath(path)
    if not storage.exists(text):
        raise absent(text)
    return _load_torch(storage.local_copy(text), text)


def open_file(local: Path, address: str) -> Mapping[str, Tensor]:
    """The tensors of one file that lies at ``local``; ``address`` is what the user called it."""
    kind = _kind(local)
    if kind == "safetensors":
        return _open_safetensors(local, address)
    if kind in ("torch", "old torch"):
        return _tensors_in(_load_torch(local, address), address)
    raise _not_weights(address, kind, local)


# One file -------------------------------------------------------------------------------------------------------------


def _load_torch(local: Path, address: str) -> Any:
    kind = _kind(local)
    if kind not in ("torch", "old torch"):
        raise _not_weights(address, kind, local)
    try:
        if local.suffix == ".safetensors":  # from its path, torch would go by the suffix
            with open(local, "rb") as file:
                return load_plain(file)
        return load_plain(local, mmap=kind == "torch")
    except pickle.UnpicklingError as error:
        refused = refused_object(error)
        if kind == "old torch" and not refused:
            raise CheckpointError(f"{address} {_pickle_described(local)}.") from error
        raise CheckpointError(
            f"{address} holds {refused or 'an object'}, which is not read: unpickling it could run foreign code. Where "
            "the file came from, keep the tensors alone: torch.save({name: value for name, value in state.items() if "
            "isinstance(value, torch.Tensor)}, path), or save as .safetensors."
        ) from error
    except Exception as error:  # a damaged archive or pickle raises nearly anything
        raise _damaged(address, local, error) from error


def _pickle_described(local: Path) -> str:
    """A description of a pickle that torch does not read."""
    try:
        value = read_arrays(local.read_bytes())
    except (Refused, ValueError):
        return "is damaged, or a pickle that torch.save did not write"
    what = f"NumPy array {list(value.shape)}" if hasattr(value, "shape") else type(value).__name__
    return (
        f"is a pickled {what}, not a file of tensors. Where it came from, write them with torch.save({{name:"
        " torch.from_numpy(array) for ...}, path), or save as .safetensors"
    )


def _open_safetensors(local: Path, address: str) -> Mapping[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(local, framework="pt", device="cpu")
    except SafetensorError as error:
        raise CheckpointError(
            f"{address} is a safetensors file that is cut short or damaged ({_megabytes(local)}; {error})."
        ) from error
    tensors = _SafetensorsFile(file)
    return LazyTensors({name: (tensors, name) for name in file.keys()})  # noqa: SIM118


def _tensors_in(tree: Any, address: str) -> Mapping[str, Tensor]:
    while isinstance(tree, Mapping):
        inner = next((key for key in CONTAINERS if isinstance(tree.get(key), Mapping)), None)
        if inner is None:
            break
        tree = tree[inner]
    if not isinstance(tree, Mapping):
        raise CheckpointError(f"{address} holds a {type(tree).__name__}; a dictionary of tensors was expected.")
    tensors = {name: value for name, value in tree.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if not tensors:
        keys = ", ".join(repr(key) for key in list(tree)[:8]) or "none"
        raise CheckpointError(f"{address} holds no tensors by name. Its keys: {keys}.")
    if others := [str(name) for name in tree if name not in tensors and not str(name).endswith("_extra_state")]:
        log.info("%s: %d entries are not tensors and were left out: %s", address, len(others), ", ".join(others[:5]))
    return tensors


def _kind(path: Path) -> str:
    with open(path, "rb") as file:
        head = file.read(512)
    start = head.lstrip().lower()
    if not head:
        return "empty"
    if head.startswith(b"PK\x03\x04"):
        return "torch"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**30:
        return "safetensors"
    if head[0] == 0x80 and head[1:2] and head[1] in range(1, 6):
        return "old torch"
    if head.startswith(b"version https://git-lfs"):
        return "git-lfs"
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<error")):
        return "page"
    if not head.strip(b"\0"):
        return "zeros"
    return "unknown"


def _not_weights(address: str, kind: str, local: Path) -> CheckpointError:
    if kind == "safetensors":
        return CheckpointError(f"{address} is a safetensors file; a training file (.pt) was expected here.")
    looks = {
        "empty": "is empty (0 bytes): the disk was full, or a download failed. Fetch or save it again",
        "git-lfs": "is a git-lfs pointer, not the weights themselves. Run 'git lfs pull' in its folder",
        "page": "is a web page or an error message, not weights: the download was refused (is a login or an accepted "
        "licence needed?)",
        "zeros": "begins with zeros only: it was not written to the end, or its disk failed. Fetch or save it again",
    }.get(kind)
    if looks is None:
        with open(local, "rb") as file:
            head = file.read(16)
        looks = f"is neither a torch file nor safetensors ({_megabytes(local)}, begins with {head!r})"
    return CheckpointError(f"{address} {looks}.")


def _damaged(address: str, local: Path, error: Exception) -> CheckpointError:
    with open(local, "rb") as file:
        file.seek(max(0, local.stat().st_size - 2**16))
        has_end = b"PK\5\6" in file.read()
    if _kind(local) == "torch" and not has_end:
        return CheckpointError(
            f"{address} is cut short ({_megabytes(local)}): the end of the archive is missing. Fetch or save it again."
        )
    return CheckpointError(
        f"{address} is damaged, or was not written by torch.save ({_megabytes(local)}; {first_line(error)})."
    )


def _megabytes(path: Path) -> str:
    size = path.stat().st_size
    return f"{size} bytes" if size < 1e5 else f"{size / 1e6:.1f} MB"


# Folders --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Folder:
    """The names directly in a folder, and how to get one of its files onto this machine."""

    address: str
    names: list[str]
    fetch: Callable[[str], Path]

    @classmethod
    def at(cls, address: str) -> "_Folder":
        return cls(address, storage.listdir(address), lambda name: storage.local_copy(storage.join(address, name)))

    def open(self, name: str) -> Mapping[str, Tensor]:
        return open_file(self.fetch(name), f"{self.address.rstrip('/')}/{name}")


def _open_folder(folder: _Folder) -> Mapping[str, Tensor]:
    """The one set of weights in a folder: DCP, or a hub or diffusers folder."""
    address, names = folder.address, folder.names
    if ".metadata" in names:
        return _open_dcp(address)
    if "model" in names and storage.exists(storage.join(address, "model", ".metadata")):
        return _open_dcp(storage.join(address, "model"))
    if (found := _open_files(folder)) is not None:
        return found
    inside = {name: storage.listdir(storage.join(address, name)) for name in names if "." not in name}
    inner = [n for n, held in inside.items() if ".metadata" in held or any(h.endswith(TENSOR_SUFFIXES) for h in held)]
    if len(inner) == 1:
        return _open_folder(_Folder.at(storage.join(address, inner[0])))
    if inner:
        raise CheckpointError(f"{address} holds several sets of weights. Name one: {_choice(address, inner)}.")
    raise CheckpointError(f"{address} holds no weights. It holds: {listed(names) or 'nothing'}.")


def _open_files(folder: _Folder) -> Mapping[str, Tensor] | None:
    """A single file, or the shards of one model; None if the folder has no tensor files itself."""
    indexes = [name for name in folder.names if name.endswith(".index.json")]
    if len(indexes) == 1:
        return _open_index(folder, indexes[0])
    files = [name for name in folder.names if name.endswith(TENSOR_SUFFIXES)]
    files = [name for name in files if name.endswith(".safetensors")] or files
    if not files:
        return None
    shards = [_SHARD.fullmatch(name) for name in files]
    stems = {(match[1], match[3]) for match in shards if match}
    if len(stems) == 1 and all(shards):
        ((stem, total),) = stems
        suffix = files[0].rpartition(".")[2]
        expected = [f"{stem}-{i:05d}-of-{total}.{suffix}" for i in range(1, int(total) + 1)]
        _require_shards(folder, expected)
        places: dict[str, tuple[Any, str]] = {}
        for shard in map(folder.open, expected):
            if twice := [name for name in shard if name in places]:
                raise CheckpointError(f"{folder.address}: two shards hold the same tensors: {listed(twice)}.")
            places |= {name: (shard, name) for name in shard}
        return LazyTensors(places)
    if len(files) == 1:
        return folder.open(files[0])
    one_of = _choice(folder.address, files)
    raise CheckpointError(f"{folder.address} holds several files of weights. Name one: {one_of}.")


def _open_index(folder: _Folder, index: str) -> Mapping[str, Tensor]:
    try:
        places = dict(foreign_json.load(folder.fetch(index))["weight_map"])
        needed = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder.address}/{index} is not an index of shards ({first_line(error)}).") from error
    _require_shards(folder, needed)
    shards = {name: folder.open(name) for name in needed}
    if lost := [name for name, shard in places.items() if name not in shards[shard]]:
        raise CheckpointError(f"{folder.address}: {index} names {len(lost)} tensors that no shard has: {listed(lost)}.")
    return LazyTensors({name: (shards[shard], name) for name, shard in places.items()})


def _require_shards(folder: _Folder, needed: Iterable[str]) -> None:
    needed = list(needed)
    if unsafe := [name for name in needed if not isinstance(name, str) or os.path.basename(name) != name]:
        raise CheckpointError(f"{folder.address}: the index names files outside its folder: {unsafe[:3]}.")
    if missing := [name for name in needed if name not in folder.names]:
        raise CheckpointError(
            f"{folder.address}: {len(missing)} of {len(needed)} shards are missing: {listed(missing)}. "
            "Fetch the folder again."
        )


def _open_dcp(address: str) -> Mapping[str, Tensor]:
    from imaginaire.checkpoint.dcp import DcpTensors

    tensors = DcpTensors(address)
    if not tensors:
        raise CheckpointError(f"{address} is a DCP folder without tensors.")
    if tensors.others:
        log.info("%s: %d entries are not tensors and were left out", address, len(tensors.others))
    return tensors


def _pointed(folder: str) -> str:
    """The weights that ``latest_checkpoint.txt`` of a training run names, in either layout."""
    try:
        pointer = storage.read_text(storage.join(folder, POINTER)).strip()
    except CheckpointError as error:
        raise CheckpointError(f"{error} {_iterations(folder)}") from error
    if not re.fullmatch(r"[\w.-]+", pointer, re.ASCII):
        raise CheckpointError(
            f"{folder}/{POINTER} should hold a name such as iter_000001000.pt; it holds {pointer[:80]!r}. "
            f"{_iterations(folder)}"
        )
    target = storage.join(folder, *(("model", pointer) if pointer.endswith(".pt") else (pointer, "model")))
    if not storage.exists(target):
        raise CheckpointError(f"{folder}/{POINTER} names {pointer}, but {target} does not exist. {_iterations(folder)}")
    log.info("%s: reading %s, its latest", folder, target)
    return target


def _iterations(folder: str) -> str:
    """The iterations of a run, newest first, for messages."""
    there = {*storage.listdir(storage.join(folder, "model")), *storage.listdir(folder)}
    return f"Iterations there: {listed(sorted((n for n in there if n.startswith('iter_')), reverse=True)) or 'none'}."


def _choice(address: str, names: list[str]) -> str:
    return listed([below(address, name) for name in names])


# The hub --------------------------------------------------------------------------------------------------------------


def _open_hub(address: str) -> Mapping[str, Tensor]:
    """``organisation/name``, or ``hf://organisation/name[@revision][/folder or file]``."""
    repository, revision, inner = _hub_parts(address)
    names = _hub_names(repository, revision, address)
    if inner in names:
        return open_file(_hub_fetch(repository, revision, inner, address), address)
    prefix = f"{inner}/" if inner else ""
    below = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    if not below:
        raise CheckpointError(f"{repository} on the hub has no '{inner}'.{near(inner, names)}")
    folder = _Folder(
        f"hf://{repository}{'@' + revision if revision else ''}{'/' + inner if inner else ''}",
        [name for name in below if "/" not in name],
        lambda name: _hub_fetch(repository, revision, prefix + name, address),
    )
    found = _open_files(folder)
    if found is None:
        inside = [name for name in below if name.endswith(TENSOR_SUFFIXES)]
        raise CheckpointError(f"{folder.address} holds several sets of weights, or none. Name one: {listed(inside)}.")
    return found


def _hub_parts(address: str) -> tuple[str, str | None, str]:
    """Repository, revision and inner path; a slash in a revision is written %2F, as elsewhere on the hub."""
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w.%-]+))?(?:/(.+))?", address.removeprefix("hf://").rstrip("/"))
    if match is None:
        raise ConfigError(f"{address}: expected hf://organisation/name[@revision][/file].")
    return match[1], unquote(match[2]) if match[2] else None, match[3] or ""


def _hub_names(repository: str, revision: str | None, address: str) -> list[str]:
    log.info("%s is not a path here: asking the hub for it", address)
    client = hub.client()
    with _hub_failures(address):
        return list(client.HfApi().list_repo_files(repository, revision=revision))


def _hub_fetch(repository: str, revision: str | None, name: str, address: str) -> Path:
    client = hub.client()
    with _hub_failures(address):
        return Path(client.hf_hub_download(repository, name, revision=revision))


@contextlib.contextmanager
def _hub_failures(address: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the client's classes moved between its versions
        repository, revision, _ = _hub_parts(address)
        reason = hub.explained(error, repository, revision=revision, licence="")
        raise CheckpointError(f"{address} is not a path here ({os.getcwd()}), and on the hub: {reason}") from error
