# SPDX-License-Identifier: Apache-2.0
"""Reading torch.distributed.checkpoint (DCP) folders without running foreign code.

torch unpickles ``.metadata`` and byte entries freely. Here the first is read as plain data, of which objects of the
format are made, and the second are not read. Folders may be local or remote.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFileSystem
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items
from torch.futures import Future

from imaginaire import distributed, storage
from imaginaire.checkpoint import plain_pickle
from imaginaire.checkpoint.plain_pickle import Like, Made, Named, Tree, load_plain, only
from imaginaire.errors import CheckpointError, first_line
from imaginaire.storage import object_store
from imaginaire.storage.object_store import StrPath

_FORMAT = "torch.distributed.checkpoint.metadata."
# What a .metadata file may name, besides the dtypes of torch.
_ALLOWED = {
    *(f"{_FORMAT}{name}" for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *(f"{_FORMAT}{name}" for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata")),
    f"{_FORMAT}_MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.serialization._get_layout",
    "torch.Size",
    "collections.OrderedDict",
    *(f"builtins.{name}" for name in ("dict", "list", "set", "tuple")),
    *(
        f"{module}.{name}"  # where it was written: not read
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "Path", "WindowsPath")
    ),
}
_DTYPES = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# The byte tensor in which this project's own DCP folders keep everything that is not a tensor.
PLAIN = "plain"


class SafeFileSystemReader(FileSystemReader):
    """Reads a local or remote DCP folder; its metadata may name nothing but the format's own classes."""

    def __init__(self, path: StrPath) -> None:
        super().__init__(path)
        self._read: dict[str, Metadata] = {}  # a large file takes seconds, and loading asks for it twice
        if storage.is_remote(path):
            remote = FsspecFileSystem()
            self.path = remote.init_path(storage.join(path), **object_store.filesystem_options(path))
            self.fs = cast(Any, remote)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        name = str(self._get_metadata_path(kwargs.get("rank")))
        if name not in self._read:
            with storage.open(name) as file:
                self._read[name] = _metadata(file.read(), name)
        metadata = self._read[name]
        assert metadata.storage_meta is not None
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        with only([]):  # of classes: a tensor needs none
            return super().read_data(plan, planner)


class SafeLoadPlanner(DefaultLoadPlanner):
    """The default planner for tensors; it refuses other entries, which torch would unpickle freely."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(f"entry '{read_item.dest_index.fqn}' is no tensor, and is not read for safety.")


class DcpTensors(Mapping[str, Tensor]):
    """The tensors of a DCP folder by name, each read when it is asked for; needs no process group."""

    def __init__(self, folder: StrPath) -> None:
        self.folder = storage.join(folder)
        self.reader = SafeFileSystemReader(folder)
        self.metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        entries = self.metadata.state_dict_metadata
        self.tensors = {
            name: entry
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
            and not (name == PLAIN and entry.properties.dtype == torch.uint8)
        }
        self.others = [name for name in entries if name not in self.tensors]
        self._check_files()

    def __getitem__(self, name: str) -> Tensor:
        entry = self.tensors[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        planner = SafeLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner({name: tensor}, self.metadata, is_coordinator=True)
        try:
            self.reader.read_data(LoadPlan(_create_read_items(name, entry, tensor)), planner).wait()
        except Exception as error:  # a damaged file raises nearly anything
            raise CheckpointError(f"{self.folder}: '{name}' cannot be read: {first_line(error)}") from error
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors  # Mapping's own would read the tensor

    def shape(self, name: str) -> torch.Size:
        return self.tensors[name].size

    def _check_files(self) -> None:
        needed: dict[str, int] = {}
        for info in cast(dict[Any, Any], self.metadata.storage_data).values():
            needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        there = set(storage.listdir(self.folder))
        if missing := sorted(name for name in needed if name not in there and "/" not in name):
            raise CheckpointError(f"{self.folder}: {len(missing)} of {len(needed)} files are missing: {missing[:5]}.")
        for name, end in needed.items():
            if (found := storage.size(storage.join(self.folder, name))) < end:
                raise CheckpointError(f"{self.folder}/{name} is cut short: {found} bytes of at least {end}.")


def dcp_writer(path: StrPath) -> Any:
    """The storage writer of a DCP folder, local or remote."""
    if not storage.is_remote(path):
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(path)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    object_store.filesystem(path)  # sets up the client that fsspec then hands to the writer
    return FsspecWriter(path, **object_store.filesystem_options(path))


# Trees: tensors under dotted keys, everything else in one byte tensor -------------------------------------------------


def write_tree(path: str, tree: Tree, group: Any) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    tensors: dict[str, Tensor] = {}
    skeleton = _take_tensors(tree, (), tensors)
    if distributed.is_rank0():
        buffer = io.BytesIO()
        torch.save(skeleton, buffer)
        tensors[PLAIN] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    save(tensors, storage_writer=dcp_writer(path), process_group=group, no_dist=group is None)


def read_tree(path: str, like: Like | None) -> Tree:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        return _load_dcp(path, like)
    except CheckpointException as error:
        causes = "; ".join(sorted({f"{type(e[0]).__name__} {e[0]}".strip() for e in error.failures.values()}))
        raise CheckpointError(f"{path} cannot be read: {causes}.") from error
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path} is damaged: {first_line(error)}.") from error


def _load_dcp(path: str, like: Like | None) -> Tree:
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = SafeFileSystemReader(path)
    entries = reader.read_metadata().state_dict_metadata
    stored = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    no_dist = not distributed.is_initialized() or like is None
    targets: dict[str, Tensor] = {}
    places: dict[str, tuple[str, ...]] = {}  # of each tensor in the tree
    skeleton: Tree = None
    if PLAIN in stored:
        plain = torch.empty(stored[PLAIN].size, dtype=torch.uint8)
        load({PLAIN: plain}, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=True)
        skeleton = load_plain(io.BytesIO(plain.numpy().tobytes()))
        _put_tensors(skeleton, places.__setitem__)
    else:
        places = {key: (key,) for key in stored}
    for key, place in places.items():
        if key not in stored:
            raise CheckpointError(f"{path} has no tensor '{key}', which its own index names.")
        size, dtype = stored[key].size, stored[key].properties.dtype
        targets[key] = torch.empty(size, dtype=dtype) if like is None else like(place, size, dtype)
    if targets:
        group = None if no_dist else distributed.cpu_group("checkpoint")
        load(targets, storage_reader=reader, planner=SafeLoadPlanner(), process_group=group, no_dist=no_dist)
    return targets if skeleton is None else _put_tensors(skeleton, lambda key, place: targets[key])


def _take_tensors(tree: Tree, place: tuple[str, ...], into: dict[str, Tensor]) -> Tree:
    """The tree with each tensor replaced by its key; the tensors go into a flat dictionary."""
    if isinstance(tree, Tensor):
        key = ".".join(place)
        into[key] = tree
        return {"__tensor__": key, "__place__": list(place)}
    if isinstance(tree, dict):
        return {name: _take_tensors(value, (*place, str(name)), into) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_take_tensors(value, (*place, str(i)), into) for i, value in enumerate(tree))
    return tree


def _put_tensors(tree: Tree, tensor_at: Callable[[str, tuple[str, ...]], Any]) -> Tree:
    """The tree with each key replaced by the tensor of this key and place."""
    if isinstance(tree, dict):
        if "__tensor__" in tree:
            return tensor_at(tree["__tensor__"], tuple(tree["__place__"]))
        return {name: _put_tensors(value, tensor_at) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_put_tensors(value, tensor_at) for value in tree)
    return tree


# .metadata ------------------------------------------------------------------------------------------------------------


def _metadata(content: bytes, source: str) -> Metadata:
    """The content of a .metadata file as new objects of the format; the planner's data are not read."""
    try:
        tree = plain_pickle.read(content, lambda name: name in _ALLOWED or name in _DTYPES)
        if not isinstance(tree, Made) or tree.name != f"{_FORMAT}Metadata":
            found = tree.name if isinstance(tree, Made | Named) else type(tree).__name__
            raise CheckpointError(f"{source} holds a {found}, not DCP metadata.")
        entries = {_typed(name, str): _entry(made) for name, made in _field(tree, "state_dict_metadata", dict).items()}
        places = _field(tree, "storage_data", dict | None) or {}
        storage_data = {_index(key): _place(made) for key, made in places.items()}
    except plain_pickle.Refused as refused:
        raise CheckpointError(
            f"{source} is not plain DCP metadata: it names or holds '{refused}', which is not read for safety. Convert "
            "the folder to one file where it was made (torch.distributed.checkpoint.format_utils.dcp_to_torch_save)."
        ) from None
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{source} is damaged ({len(content)} bytes; {first_line(error)}).") from error
    _check_sizes(entries, storage_data, source)
    return Metadata(entries, storage_data=storage_data, storage_meta=StorageMeta())


def _entry(made: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _typed(made, Made).name == f"{_FORMAT}BytesStorageMetadata":
        return BytesStorageMetadata()
    size = _size(_field(made, "size"))
    chunks = []
    for chunk in _field(made, "chunks", list):
        chunks.append(ChunkStorageMetadata(_size(_field(chunk, "offsets")), _size(_field(chunk, "sizes"))))
        places = list(zip(chunks[-1].offsets, chunks[-1].sizes, size, strict=True))
        if any(offset + length > whole for offset, length, whole in places):
            raise ValueError(f"a piece {places} outside its tensor")
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ValueError(f"pieces that do not make up a tensor of {list(size)}")
    dtype = _typed(_typed(_field(made, "properties", Made).state, tuple)[0], Named).name
    return TensorStorageMetadata(TensorProperties(dtype=_DTYPES[dtype]), size, chunks)


def _index(made: Any) -> MetadataIndex:
    offset, index = _field(made, "offset", default=None), _field(made, "index", int | None, default=None)
    return MetadataIndex(_field(made, "fqn", str), None if offset is None else _size(offset), index)


def _place(made: Any) -> _StorageInfo:
    path, offset, length = _field(made, "relative_path", str), _field(made, "offset", int), _field(made, "length", int)
    transforms = _field(made, "transform_descriptors", list | tuple | None, default=None)
    if offset < 0 or length < 0:
        raise ValueError(f"{length} bytes at {offset} of {path}")
    return _StorageInfo(path, offset, length, transforms and [_typed(name, str) for name in transforms])


def _size(value: Any) -> torch.Size:
    lengths = value.args[0] if isinstance(value, Made) and value.name == "torch.Size" and value.args else value
    if not all(0 <= _typed(length, int) < 2**62 for length in _typed(lengths, tuple | list)):
        raise ValueError(f"a size of {lengths}")
    return torch.Size(lengths)


_REQUIRED = object()


def _field(made: Any, name: str, kind: Any = object, default: Any = _REQUIRED) -> Any:
    value = _typed(_typed(made, Made).state, dict).get(name, default)
    if value is _REQUIRED:
        raise ValueError(f"a {made.name} without {name}")
    return _typed(value, kind)


def _typed(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} in place of {getattr(kind, '__name__', kind)}")
    return value


def _check_sizes(entries: Mapping[str, Any], places: Mapping[MetadataIndex, _StorageInfo], source: str) -> None:
    """Raise where reading would go outside the folder, or take more memory than the recorded sizes of its files."""
    stored: dict[str, float] = {}
    for index, place in places.items():
        relative = PurePosixPath(place.relative_path)
        if relative.is_absolute() or ".." in relative.parts or "\0" in place.relative_path:
            raise CheckpointError(f"{source} points outside its folder, at '{relative}'. It was not written by torch.")
        packed = float("inf") if place.transform_descriptors else place.length
        stored[index.fqn] = stored.get(index.fqn, 0) + packed
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            needed = math.prod(entry.size) * entry.properties.dtype.itemsize
            if needed > stored.get(name, 0):
                raise CheckpointError(
                    f"{source} is damaged: '{name}' has {needed} bytes, of which {stored.get(name, 0)} are stored."
                )
