# SPDX-License-Identifier: Apache-2.0
"""Reading torch.distributed.checkpoint (DCP) folders without running what a foreign file says.

torch unpickles ``.metadata`` and byte entries freely. Here the first goes through an unpickler that knows only the
classes of the format, the second through ``weights_only=True``. Folders may be local or remote.
"""

import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as FsspecFileSystem
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from imaginaire import object_store, storage
from imaginaire.errors import CheckpointError
from imaginaire.object_store import StrPath
from imaginaire.safe_pickle import load_plain, refused_object

# Attributes of these modules that a .metadata file may name, besides dtypes.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "builtins": {"dict", "list", "set", "tuple"},
}
# The byte tensor in which this project's own DCP folders keep everything that is not a tensor.
PLAIN = "plain"
_PATHS = {"PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "Path", "WindowsPath"}


class SafeFileSystemReader(FileSystemReader):
    """Reads a local or remote DCP folder; its metadata may name nothing but the format's own classes."""

    def __init__(self, path: StrPath) -> None:
        super().__init__(path)
        if storage.is_remote(path):
            remote = FsspecFileSystem()
            self.path = remote.init_path(storage.join(path), **object_store.filesystem_options(path))
            self.fs = cast(Any, remote)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        name = self._get_metadata_path(kwargs.get("rank"))
        with storage.open(name) as file:
            metadata = _restricted_load(file.read(), str(name))
        for info in (metadata.storage_data or {}).values():
            relative = PurePosixPath(str(info.relative_path))
            if relative.is_absolute() or ".." in relative.parts:
                raise CheckpointError(
                    f"{name} points outside its folder, at '{relative}'. It was not written by torch."
                )
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafeLoadPlanner(DefaultLoadPlanner):
    """The default planner, with ``weights_only=True`` for entries that are not tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        loaded = load_bytes(value, f"entry '{name}'")
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


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
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, AssertionError) as error:
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


def dcp_read(folder: StrPath) -> DcpTensors:
    """The tensors of a DCP folder by name, read lazily in a single process."""
    return DcpTensors(folder)


def is_dcp(folder: StrPath) -> bool:
    return storage.exists(storage.join(folder, ".metadata"))


def load_bytes(value: io.BytesIO, source: str) -> Any:
    """A non-tensor entry."""
    try:
        return load_plain(value)
    except pickle.UnpicklingError as error:
        refused = refused_object(error) or first_line(error)
        raise CheckpointError(f"{source} holds {refused}, which is not read for safety.") from error


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return PurePosixPath  # where it was written: a note, never opened
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name}")


def _restricted_load(data: bytes, source: str) -> Metadata:
    try:
        metadata = _RestrictedUnpickler(io.BytesIO(data)).load()
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{source} is not plain DCP metadata: it names or holds '{error}', which is not read for safety. Convert "
            "the folder to one file where it was made (torch.distributed.checkpoint.format_utils.dcp_to_torch_save)."
        ) from error
    except Exception as error:  # a damaged pickle raises nearly anything
        size = len(data)
        raise CheckpointError(f"{source} is damaged ({size} bytes; {first_line(error)}).") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{source} holds a {type(metadata).__name__}, not DCP metadata.")
    return metadata
