# SPDX-License-Identifier: Apache-2.0
"""The files of one embedding each: their names, and how each form is read and written."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from cosmos_predict2.text.embeddings import pickles
from cosmos_predict2.text.embeddings.cache import KEY
from cosmos_predict2.text.embeddings.pickles import LARGEST_BYTES
from imaginaire import storage
from imaginaire.errors import DataError

FOLDER_NAMES = ("t5_xxl", "text_embedding")  # the first is written
SUFFIXES = (".pickle", ".pkl", ".safetensors")  # the first that is there is read
FORMS = {"pickle": ".pickle", "safetensors": ".safetensors"}


def find_embedding_dir(dataset_dir: Path | str) -> Path | None:
    """Where a data set keeps its embeddings; None if it has none."""
    folders = (Path(dataset_dir) / name for name in FOLDER_NAMES)
    return next((folder for folder in folders if folder.is_dir()), None)


def embedding_files(folder: Path) -> dict[str, list[Path]]:
    """The embedding files of a folder by stem, in the order of SUFFIXES."""
    found: dict[str, list[Path]] = {}
    names = {name for name in storage.listdir(folder) if not name.startswith(".")}
    for suffix in SUFFIXES:
        for name in sorted(name for name in names if name.endswith(suffix)):
            found.setdefault(name.removesuffix(suffix), []).append(folder / name)
    return found


def read_embedding(path: Path) -> Tensor:
    """float32 [tokens, width] of one file, as many tokens as it has; every number of it is finite."""
    rows = _read_safetensors(path) if path.suffix == ".safetensors" else pickles.read_rows(path)
    if not torch.isfinite(rows.sum()):
        raise DataError(f"{path} holds NaN or infinity. Delete it and encode its caption again.")
    return rows


def write_embedding(folder: Path, stem: str, rows: Tensor, form: str, replaced: Sequence[Path]) -> None:
    """Write one embedding, and then remove the files that it stands for."""
    path = folder / f"{stem}{FORMS[form]}"
    if form == "pickle":
        pickles.write(path, rows)
    else:
        content = save({KEY: rows.contiguous()})
        storage.write_atomically(path, lambda file: file.write(content))
    for old in replaced:
        if old != path:
            old.unlink(missing_ok=True)


def _read_safetensors(path: Path) -> Tensor:
    size = storage.size(path)
    if size > LARGEST_BYTES:
        raise DataError(f"{path} has {storage.readable_bytes(size)}: too large for the embedding of one prompt.")
    try:
        tensors = load(path.read_bytes())
    except SafetensorError as error:
        raise DataError(f"{path} cannot be read as safetensors ({error}). Write it again.") from error
    tensor = tensors.get(KEY, next(iter(tensors.values()))) if len(tensors) == 1 or KEY in tensors else None
    if tensor is None or tensor.ndim != 2 or not tensor.is_floating_point() or 0 in tensor.shape:
        found = ", ".join(f"{name} {value.dtype} {list(value.shape)}" for name, value in tensors.items()) or "nothing"
        raise DataError(f"{path} should hold one floating-point tensor [tokens, width], '{KEY}'; found {found}.")
    return tensor.float()
