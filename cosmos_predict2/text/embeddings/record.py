# SPDX-License-Identifier: Apache-2.0
"""The record beside a folder's embeddings: which encoder made them, and of which captions.

    t5_xxl/embeddings.json                    {"format", "encoder", "width", "num_tokens", "captions": {stem: SHA-256}}
    t5_xxl/embeddings.shard-0-of-8.json       the same of one of several processes, with "revision"

Several processes write a file each, so that none waits for another; reading puts them together. Where two know the same
stem, the higher revision is the newer run. A run of one process makes one file of them all again.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imaginaire import storage
from imaginaire.errors import DataError

FORMAT = "text_embeddings/1"
RECORD = "embeddings.json"
_PART = re.compile(r"embeddings\.shard-\d+-of-\d+\.json")


@dataclass(frozen=True)
class EncoderRecord:
    """What is known of the embeddings of a folder."""

    encoder: str
    width: int
    num_tokens: int
    captions: Mapping[str, str]  # caption_hash of the text that each stem's embedding is of


def caption_hash(caption: str) -> str:
    """SHA-256 of a caption, as records keep it."""
    return hashlib.sha256(caption.encode("utf-8", errors="surrogatepass")).hexdigest()


def read_record(folder: Path) -> EncoderRecord | None:
    """What all records of the folder say together; None where there is none."""
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
        content = json.loads(path.read_bytes().decode("utf-8", errors="surrogatepass"))
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
