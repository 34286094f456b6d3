# SPDX-License-Identifier: Apache-2.0
"""The error for a file that is not there: where its path stops being right, and which file was probably meant."""

import re
from collections.abc import Sequence

from imaginaire import storage
from imaginaire.errors import CheckpointError, near


def absent(address: str) -> CheckpointError:
    """The error for an address that does not exist: what lies where the path stops being right."""
    missing = address.rstrip("/")
    while True:
        parent, _, name = missing.rpartition("/")
        if storage.is_remote(address) and parent.endswith(":/"):
            return CheckpointError(f"{address} does not exist.")
        parent = parent or ("/" if missing.startswith("/") else ".")
        names = storage.listdir(parent)
        if names or parent in ("/", ".") or storage.is_folder(parent):
            break
        missing = parent
    here = f"{parent} has no '{name}'." if names else f"{parent} is empty."
    hub = " As a hub id it would be written hf://organisation/name." if address.count("/") == 1 else ""
    meant = _probably_meant(parent, address.rstrip("/").removeprefix(parent).strip("/").split("/"))
    seen = names if name.startswith(".") else [other for other in names if not other.startswith(".")]
    hint = near(name, seen) if meant is None else f" There is {meant}."
    return CheckpointError(f"{address} does not exist: {here}{hint}{hub}")


def _probably_meant(parent: str, parts: Sequence[str]) -> str | None:
    """The existing file below ``parent`` whose path means the same: a number with more zeros, a name with less before
    it (guides print an experiment's name where a run's stands)."""
    place = "" if parent == "." else parent
    for part in parts:
        names = storage.listdir(place or ".")
        shorter = [name for name in names if name and part.endswith(f"_{name}")]
        same = [name for name in names if name == part] or sorted(shorter, key=len)[-1:]
        same = same or [name for name in names if _without_zeros(name) == _without_zeros(part)]
        if not same:
            return None
        place = storage.join(place, same[0]) if place else same[0]
    return place


def _without_zeros(name: str) -> str:
    return re.sub(r"(?<!\d)0+(?=\d)", "", name)
