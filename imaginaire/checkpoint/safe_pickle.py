# SPDX-License-Identifier: Apache-2.0
"""Reading what ``torch.save`` wrote without running what it says, whatever else the process has imported."""

import io
import pickle
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

_LOCK = threading.RLock()


def load_plain(source: Path | IO[bytes], *, mmap: bool = False) -> Any:
    """``torch.load(weights_only=True)`` on the CPU; of all other classes ``io.BytesIO`` alone is let through.

    In BytesIO Transformer Engine kept the extra state that released files have.
    """
    with only([io.BytesIO]):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)


def refused_object(error: pickle.UnpicklingError) -> str:
    """What `load_plain` stumbled over, by name; torch's own message recommends switching the check off."""
    names = re.findall(r"(?:GLOBAL|class|global:?) ([A-Za-z_][\w.]*\.[\w.]+)", str(error))
    return f"the object '{names[0].rstrip('.')}'" if names else ""


@contextmanager
def only(classes: list[Any]) -> Iterator[None]:
    """Within, torch allows these classes and no others: libraries add theirs to its list when they are imported."""
    with _LOCK:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(classes)
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)
