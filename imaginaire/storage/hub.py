# SPDX-License-Identifier: Apache-2.0
"""Files that are not there, and failures of the Hugging Face hub, in words that say what to do."""

import re
from collections.abc import Sequence
from typing import Any

from imaginaire import storage
from imaginaire.errors import CheckpointError, UserError, alike, near, optional_module


def client() -> Any:
    """The module ``huggingface_hub``, imported only where something is fetched."""
    return optional_module("huggingface_hub", "weights")


def explained(error: Exception, repository: str, *, revision: str | None, licence: str, kind: str = "") -> str:
    """One sentence on a failure of the hub; ``kind`` is "" for models and "datasets" for data sets.

    The client's error classes moved between its versions, so they are known by name.
    """
    name = type(error).__name__
    where = f"{repository} @ {revision or 'newest'}"
    page = "/".join(["https://huggingface.co", *([kind] if kind else []), repository])
    status = getattr(getattr(error, "response", None), "status_code", None)
    causes = [name, *(type(e).__name__ for e in (error.__cause__, error.__context__) if e is not None)]
    accept = f"accept the {licence or 'licence'} on {page}, then log in with 'hf auth login' or set HF_TOKEN"
    if "GatedRepoError" in causes or status == 403:
        return f"{repository} is gated: {accept} to a token with read access."
    if status == 401:  # without a token the hub answers so for absent, private and gated repositories alike
        return f"{repository} is not on the hub under that name, or it is private or gated. If it is gated, {accept}."
    if name in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
        return f"{where} has not got what was asked for ({page}/tree/{revision or 'main'})."
    if "RepositoryNotFoundError" in causes or status == 404:
        return f"{where} is not on the hub, or not for you to see ({name})."
    if isinstance(error, UserError):
        return f"{where}: {error}."
    no_answer = any(word in cause for word in ("Connect", "Timeout", "LocalEntry", "Offline") for cause in causes)
    cure = " Is there a network? HF_ENDPOINT names a mirror of the hub." if no_answer else ""
    text = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else "no message"
    return f"{repository}: {name}: {text}.{cure}"


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
    here = f": {parent} has no '{name}'." if names else f": {parent} is empty."
    hub = " As a hub id it would be written hf://organisation/name." if address.count("/") == 1 else ""
    meant = _probably_meant(parent, address.rstrip("/").removeprefix(parent).strip("/").split("/"))
    seen = names if name.startswith(".") else [other for other in names if not other.startswith(".")]
    hint = near(name, seen)
    if parent == ".":  # the working folder, which the address does not name
        here, hint = ".", alike(name, seen)
    hint = hint if meant is None else f" There is {meant}."
    return CheckpointError(f"{address} does not exist{here}{hint}{hub}")


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
