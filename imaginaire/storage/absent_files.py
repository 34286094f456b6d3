# SPDX-License-Identifier: Apache-2.0
"""The error for a file that is not there: where its path stops being right."""

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
        if names or parent in ("/", "."):
            break
        missing = parent
    here = f"{parent} has no '{name}'." if missing != address.rstrip("/") or names else f"{parent} is empty."
    hub = " As a hub id it would be written hf://organisation/name." if address.count("/") == 1 else ""
    seen = names if name.startswith(".") else [other for other in names if not other.startswith(".")]
    return CheckpointError(f"{address} does not exist: {here}{near(name, seen)}{hub}")
