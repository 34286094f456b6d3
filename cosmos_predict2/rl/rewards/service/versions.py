# SPDX-License-Identifier: Apache-2.0
"""The version of a reward: a digest of all that its results follow from, as far as its files show it."""

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import attrs

from cosmos_predict2.rl.rewards.service.settings import DecodeSettings, RewardSettings

MOST_FILES = 10_000  # of a path
SMALL = 1 << 20  # files up to this size are read; of larger ones size and time of change count


def version_of(reward: RewardSettings, decode: DecodeSettings) -> str:
    """Of its class and the file with its code, arguments, weights, dtype, and how latents are decoded.

    A path among them counts by what is there. Code that a reward imports and models of the hub, which are known by
    their names, do not count.
    """
    parts = [reward.path, reward.arguments, reward.model_path, reward.dtype, attrs.asdict(decode)]
    return _digest(parts, _source(reward.path.partition(":")[0]))


def decoding_of(decode: DecodeSettings) -> str:
    """The version of how latents are decoded."""
    return _digest(attrs.asdict(decode))


def _digest(parts: Any, *files: str) -> str:
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=16)
    for path in (*files, *_texts(parts)):
        for file in islice(_files(path), MOST_FILES):
            digest.update(_identity(file))
    return digest.hexdigest()


def _source(module: str) -> str:
    """The file of a module, which is not imported for it."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):  # the worker names it as unfit
        return ""
    return (found.origin or "") if found is not None else ""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _files(path: str) -> Iterator[Path]:
    """The file at a path, or all below it; none where there is no such thing."""
    try:
        if path and os.path.isfile(path):
            yield Path(path)
        elif path and os.path.isdir(path):
            for folder, folders, names in os.walk(path):
                folders.sort()
                yield from (Path(folder, name) for name in sorted(names))
    except ValueError:  # a text with a zero byte
        return


def _identity(file: Path) -> bytes:
    try:
        facts = file.stat()
        seen = file.read_bytes() if facts.st_size <= SMALL else f"{facts.st_size} {facts.st_mtime_ns}".encode()
    except OSError:  # it may vanish, or belong to another user
        seen = b""
    return str(file).encode(errors="surrogateescape") + b"\0" + hashlib.blake2b(seen, digest_size=16).digest()
