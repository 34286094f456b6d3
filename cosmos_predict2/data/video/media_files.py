# SPDX-License-Identifier: Apache-2.0
"""Pictures and clips of a folder, by the stem that joins them with their captions and embeddings."""

from collections.abc import Sequence
from pathlib import Path

from imaginaire.errors import DataError, near


def files_by_stem(folder: Path, suffixes: Sequence[str]) -> dict[str, Path]:
    """The files with one of the suffixes (in any case) in the order of their names; empty where there is no folder.

    Two files of one stem are an error: their caption, embedding and result would be the same file.
    """
    found: dict[str, Path] = {}
    if not folder.is_dir():
        return found
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() not in suffixes or path.name.startswith(".") or not path.is_file():
            continue
        if other := found.get(path.stem):
            raise DataError(f"{other} and {path.name} have the same stem, so they would share a caption. Rename one.")
        found[path.stem] = path
    return found


def require_files(folder: Path, suffixes: Sequence[str], what: str) -> dict[str, Path]:
    """`files_by_stem`; without any, an error that lists what is there."""
    found = files_by_stem(folder, suffixes)
    if found:
        return found
    wanted = f"{what} ({', '.join('*' + suffix for suffix in suffixes)})"
    if not folder.is_dir():
        beside = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise DataError(f"There is no folder {folder}; {wanted} were expected there.{near(folder.name, beside)}")
    others = sorted({path.suffix or path.name for path in folder.iterdir()})
    raise DataError(f"{folder} holds no {wanted}; it has {', '.join(others[:8]) or 'nothing'}.")
