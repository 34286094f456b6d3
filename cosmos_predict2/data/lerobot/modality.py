# SPDX-License-Identifier: Apache-2.0
"""Names for parts of the state and action vectors: ``meta/modality.json``, which GR00T data sets have.

{"state": {"left_arm": {"start": 0, "end": 7}, ...}, "action": {"left_arm": {"start": 0, "end": 7}, ...},
 "video": {"ego_view": {"original_key": "observation.images.ego_view"}},
 "annotation": {"human.action.task_description": {}}}
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_predict2.data.lerobot.info import read_json
from imaginaire.errors import DataError

# Parts of the action, in order, with their widths: what action-conditioned weights of a robot are trained with.
EMBODIMENTS: dict[str, dict[str, int]] = {
    "gr1": {"left_arm": 7, "left_hand": 6, "right_arm": 7, "right_hand": 6, "waist": 3},
}
_COLUMNS = {"state": "observation.state", "action": "action"}


@dataclass(frozen=True, slots=True)
class Part:
    """Numbers ``start`` ... ``end - 1`` of a column; all of them where ``end`` is None."""

    column: str
    start: int = 0
    end: int | None = None
    absolute: bool | None = None  # targets (True) or moves (False), where modality.json says it


@dataclass(frozen=True)
class Modality:
    """The names that a data set gives to parts of its columns."""

    state: Mapping[str, Part]
    action: Mapping[str, Part]
    video: Mapping[str, str]
    annotation: Mapping[str, str]


def read_modality(root: Path) -> Modality | None:
    """What modality.json says; None where there is none."""
    path = root / "meta" / "modality.json"
    if not path.is_file():
        return None
    content = read_json(path)
    return Modality(
        state=_parts(content, "state", path),
        action=_parts(content, "action", path),
        video={name: str(entry.get("original_key", name)) for name, entry in _entries(content, "video", path)},
        annotation={
            name: str(entry.get("original_key") or f"annotation.{name}")
            for name, entry in _entries(content, "annotation", path)
        },
    )


def is_absolute(modality: Modality | None, column: str, place: int) -> bool | None:
    """Whether a number of an action's column is a target (True) or a move (False); None where nothing says it."""
    known = modality.action.values() if modality else ()
    found = (part.absolute for part in known if part.column == column and part.start <= place < (part.end or 0))
    return next((one for one in found if one is not None), None)


def _parts(content: Mapping[str, Any], kind: str, path: Path) -> dict[str, Part]:
    parts = {}
    for name, entry in _entries(content, kind, path):
        start, end = entry.get("start"), entry.get("end")
        if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start < end:
            raise DataError(f"{path}: {kind}.{name} goes from {start} to {end}; two ascending numbers are needed.")
        absolute = entry.get("absolute")
        column = str(entry.get("original_key") or _COLUMNS[kind])
        parts[name] = Part(column, start, end, absolute if isinstance(absolute, bool) else None)
    return parts


def _entries(content: Mapping[str, Any], kind: str, path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    entries = content.get(kind) or {}
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise DataError(f"{path}: '{kind}' is not a table of names.")
    return list(entries.items())
