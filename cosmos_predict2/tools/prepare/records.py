# SPDX-License-Identifier: Apache-2.0
"""Text files of a prepared data set, and its record: what it was made from, by which settings, whether it is complete.

A record is a JSON object, mostly OUT/dataset.json. It is what makes a command go on where it was stopped, and keeps it
from mixing two data sets in one folder.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from imaginaire import foreign_json, storage
from imaginaire.errors import DataError

RECORD = "dataset.json"


def write_text(path: Path, text: str) -> None:
    """Write a text file, complete or not at all; bytes of file names that are not UTF-8 become JSON's ``\\udcXX``."""
    storage.write_bytes(path, text.encode(errors="backslashreplace"))


def write_json(path: Path, values: object, indent: int | None = 2) -> None:
    write_text(path, json.dumps(values, indent=indent, ensure_ascii=False) + "\n")


def read_record(path: Path, kind: str | None = None) -> dict[str, Any] | None:
    """The JSON object of a file; None where there is none, or where its ``format`` is not ``kind``."""
    try:
        record = foreign_json.load(path)
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and kind in (None, record.get("format")) else None


def holds_nothing(folder: Path) -> bool:
    """True if a folder is empty or does not exist; a file of its name is an error."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file; --out names a folder.")
    return not folder.exists() or not any(folder.iterdir())


def require_settings(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], cure: str = "") -> None:
    """Raise where a folder was made with other settings; values are compared as JSON has them."""
    wanted = json.loads(json.dumps(wanted))
    if differing := [key for key in wanted if wanted[key] != found.get(key)]:
        what = ", ".join(f"{key} {found.get(key)} (now {wanted[key]})" for key in differing)
        cure = cure or "Give the same settings, which finish what is unfinished, or another --out."
        raise DataError(f"{folder} was made with {what}. {cure}")


def require_own(folder: Path, kind: str, cure: str = "Give --out a new folder.") -> dict[str, Any] | None:
    """The record of a folder of this kind; None where it is new or empty. Other folders are errors."""
    if holds_nothing(folder):
        return None
    if (record := read_record(folder / RECORD, kind)) is None:
        raise DataError(f"{folder} holds other files. {cure}")
    return record
