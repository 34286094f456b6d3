# SPDX-License-Identifier: Apache-2.0
"""A data set's folder of text embeddings: one file a clip, and a record of the encoder that made them.

    t5_xxl/NAME.pickle                     a list with one float16 array [tokens, width], as public data sets have it
    t5_xxl/NAME.safetensors                "embedding", the same numbers
    t5_xxl/embeddings.json                 {"format", "encoder", "width", "num_tokens", "captions": {stem: SHA-256}}
    t5_xxl/embeddings.shard-0-of-8.json    the same of one of several processes, with "revision"

A folder without a record, made by other software, is read as it is. Several processes write one record file each, so
that none waits for another; reading merges them. Where two have the same stem, the higher revision is the newer run.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from cosmos_predict2.text.embeddings import pickles
from cosmos_predict2.text.embeddings.pickles import LARGEST_BYTES, NUM_TOKENS, padded
from cosmos_predict2.text.trained_text import encode_commands, parse_name
from imaginaire import foreign_json, storage
from imaginaire.errors import DataError, raised_as

log = logging.getLogger(__name__)

FOLDER_NAMES = ("t5_xxl", "text_embedding")  # the first is written
SUFFIXES = (".pickle", ".pkl", ".safetensors")  # the first that is there is read
FORMS = {"pickle": ".pickle", "safetensors": ".safetensors"}
FORMAT = "text_embeddings/1"
KEY = "embedding"  # in a safetensors file, and in those of the cache
RECORD = "embeddings.json"
_PART = re.compile(r"embeddings\.shard-\d+-of-\d+\.json")


@dataclass(frozen=True)
class EncoderRecord:
    """Properties that all embeddings of a folder share."""

    encoder: str
    width: int
    num_tokens: int
    captions: Mapping[str, str]  # caption_hash of the text that each stem's embedding is of


class EmbeddingFolder:
    """Embeddings by the stem of their clip."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise DataError(
                f"There is no folder {self.folder} with text embeddings. Write it:"
                f" {encode_commands(self.folder.parent)}"
            )
        self._has_warned = False

    def find(self, stem: str) -> Path | None:
        """The file of a clip's embedding, if it has one."""
        for suffix in SUFFIXES:
            path = os.path.join(self.folder, stem + suffix)
            if os.path.exists(path):
                return Path(path)
        return None

    def stems(self) -> list[str]:
        """All that have an embedding, sorted. Two files for one clip are an error: which one is meant?"""
        files = embedding_files(self.folder)
        if double := [paths for paths in files.values() if len(paths) > 1]:
            first, second = double[0][:2]
            raise DataError(f"{first} and {second.name} are embeddings of one clip. Remove one of them.")
        return sorted(files)

    def read(self, stem: str, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor]:
        """float32 [num_tokens, width] with zeros behind the prompt, and int64 [num_tokens], 1 where the prompt is."""
        path = self.find(stem)
        if path is None:
            raise DataError(
                f"{self.folder} has no embedding of '{stem}' ({stem}.pickle, .pkl or .safetensors). Write it:"
                f" {self.command()}"
            )
        rows = read_embedding(path)
        if rows.shape[1] != self.width:
            raise DataError(
                f"{path} has embeddings of width {rows.shape[1]}, but the folder is of width {self.width}. Delete it"
                f" and encode its caption again: {self.command()}"
            )
        if len(rows) > num_tokens and not self._has_warned:
            self._has_warned = True
            log.warning("%s has %d tokens: cut to %d (logged once)", path, len(rows), num_tokens)
        return masked(rows, num_tokens)

    @cached_property
    def record(self) -> EncoderRecord | None:
        """The record of the encoder; None in a folder made by other software."""
        record = read_record(self.folder)
        if record is None:
            log.info("%s has no %s: its encoder is unknown, and it is used as it is", self.folder, RECORD)
        return record

    @cached_property
    def width(self) -> int:
        """Numbers per token, by the record, or else by the first file."""
        if self.record is not None:
            return self.record.width
        if not (files := embedding_files(self.folder)):
            raise DataError(f"{self.folder} holds no embeddings ({', '.join(SUFFIXES)}).")
        return int(read_embedding(next(iter(files.values()))[0]).shape[1])

    def require_encoder(self, name: str, num_tokens: int | None = None) -> None:
        """Raise unless the embeddings are of the encoder ``name``: its whole name, or its kind ("t5", "bytes")."""
        found = self.record.encoder if self.record else name
        if not is_encoder(found, name):
            raise DataError(
                f"{self.folder} holds embeddings by {found}, but {name} was asked for. Ask for that one"
                f" (text_encoder={parse_name(found).kind}) if the model takes it, or delete the folder and"
                f" encode the captions again: {encode_commands(self.folder.parent, name, num_tokens)}"
            )

    def command(self) -> str:
        """The command that adds what is missing, with the encoder of the folder."""
        return encode_commands(self.folder.parent, self.record.encoder if self.record else "")


# ---- the files -------------------------------------------------------------------------------------------------------


def find_embedding_dir(dataset_dir: Path | str) -> Path | None:
    """The folder of a data set's embeddings; None if it has none."""
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
    size = storage.size(path)
    if size > LARGEST_BYTES:
        raise DataError(f"{path} has {storage.readable_bytes(size)}: too large for the embedding of one prompt.")
    with storage.open(path) as file:
        return embedding_in(file.read(), str(path))


def embedding_in(content: bytes, path: str) -> Tensor:
    """The embedding in the bytes of a file; ``path`` names it in errors, and its suffix decides how they are read."""
    rows = (_in_safetensors if path.endswith(".safetensors") else pickles.rows_of)(content, path)
    if not torch.isfinite(rows.sum()):
        raise DataError(f"{path} holds NaN or infinity. Delete it and encode its caption again.")
    return rows


def masked(rows: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """An embedding with zeros behind the prompt, and int64 [num_tokens], 1 where the prompt is."""
    mask = torch.zeros(num_tokens, dtype=torch.int64)
    mask[: len(rows)] = 1
    return padded(rows, num_tokens), mask


def write_embedding(folder: Path, stem: str, rows: Tensor, form: str, replaced: Sequence[Path]) -> None:
    """Write one embedding, and then remove the files that it stands for."""
    path = folder / f"{stem}{FORMS[form]}"
    if form == "pickle":
        pickles.write(path, rows)
    else:
        storage.write_bytes(path, save({KEY: rows.contiguous()}))
    for old in replaced:
        if old != path:
            old.unlink(missing_ok=True)


def _in_safetensors(content: bytes, path: str) -> Tensor:
    with raised_as(DataError, f"{path} cannot be read as safetensors", SafetensorError, cure="Write it again."):
        tensors = load(content)
    tensor = tensors.get(KEY, next(iter(tensors.values()))) if len(tensors) == 1 or KEY in tensors else None
    if tensor is None or tensor.ndim != 2 or not tensor.is_floating_point() or 0 in tensor.shape:
        found = ", ".join(f"{name} {value.dtype} {list(value.shape)}" for name, value in tensors.items()) or "nothing"
        raise DataError(f"{path} should hold one floating-point tensor [tokens, width], '{KEY}'; found {found}.")
    return tensor.float()


# ---- the record ------------------------------------------------------------------------------------------------------


def is_encoder(encoder: str, name: str) -> bool:
    """True if the recorded ``encoder`` is the encoder ``name``, or one of that kind."""
    return encoder == name or encoder.startswith(f"{name}-")


def caption_hash(caption: str) -> str:
    """SHA-256 of a caption, as records keep it."""
    return hashlib.sha256(caption.encode("utf-8", errors="surrogatepass")).hexdigest()


def read_record(folder: Path) -> EncoderRecord | None:
    """All records of the folder merged; None where there is none."""
    found = sorted(((_read(path), path) for path in _paths(folder)), key=lambda item: item[0]["revision"])
    if not found:
        return None
    first, first_path = found[0]
    captions: dict[str, str] = {}
    for part, path in found:
        for key in ("encoder", "width", "num_tokens"):
            if part[key] != first[key]:
                raise DataError(
                    f"{folder} mixes embeddings: {first_path.name} has {key} {first[key]}, {path.name} has {part[key]}."
                    f" Delete {folder} and encode it again with one encoder."
                )
        captions.update(part["captions"])
    return EncoderRecord(first["encoder"], first["width"], first["num_tokens"], captions)


def write_record(folder: Path, record: EncoderRecord, shard: tuple[int, int] = (0, 1), revision: int = 0) -> None:
    """Write the record, or one process's part of it, in place of what this process wrote before."""
    content: dict[str, Any] = {"format": FORMAT, "encoder": record.encoder, "width": record.width}
    content["num_tokens"] = record.num_tokens
    if shard[1] > 1:
        content["revision"] = revision
    content["captions"] = dict(sorted(record.captions.items()))
    name = RECORD if shard[1] == 1 else f"embeddings.shard-{shard[0]}-of-{shard[1]}.json"
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    storage.write_atomically(folder / name, lambda file: file.write(text.encode("utf-8", errors="surrogatepass")))


def next_revision(folder: Path) -> int:
    """A number above those of all parts that the folder has."""
    return 1 + max((_read(path)["revision"] for path in _paths(folder)), default=0)


def remove_parts(folder: Path) -> None:
    """Delete the parts, after their content was written as one record."""
    for path in _paths(folder):
        if path.name != RECORD:
            path.unlink(missing_ok=True)


def _paths(folder: Path) -> list[Path]:
    names = storage.listdir(folder)
    return [folder / name for name in names if name == RECORD or _PART.fullmatch(name)]


def _read(path: Path) -> dict[str, Any]:
    cure = f"Delete {path.parent} and encode it again, or bring the file back."
    try:
        content = foreign_json.loads(path.read_bytes().decode("utf-8", errors="surrogatepass"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}, the record of these embeddings, cannot be read ({error}). {cure}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise DataError(f"{path} is no record of embeddings: format {found!r}, expected '{FORMAT}'. {cure}")
    content.setdefault("revision", 0)
    kinds = {"encoder": str, "width": int, "num_tokens": int, "revision": int, "captions": dict}
    if wrong := [key for key, kind in kinds.items() if not isinstance(content.get(key), kind)]:
        raise DataError(f"{path} is a damaged record of embeddings: see {', '.join(wrong)}. {cure}")
    return content
