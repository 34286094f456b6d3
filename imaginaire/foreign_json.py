# SPDX-License-Identifier: Apache-2.0
"""JSON that somebody else may have written, or damaged: every fault of it is a ValueError.

Python's own reader ends in a RecursionError for deep brackets, takes the last of two values under one key, gives
infinity for 1e999, and reads a file of any size. What it gives here is finite, of bounded depth, and can be printed.
"""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from imaginaire.errors import ConfigError

MOST_BYTES = 2**28  # 256 MiB: a record of the captions of a million clips
MOST_DEPTH = 64
MOST_DIGITS = 20  # of an integer: no count or size has more


def load(path: Path) -> Any:
    """The value in a file; an OSError where it cannot be read."""
    with path.open("rb") as file:
        return loads(file.read(MOST_BYTES + 1))


def load_object(path: Path) -> dict[str, Any]:
    """The object in a file that holds one."""
    found = load(path)
    if not isinstance(found, dict):
        raise ValueError(f"an object was expected, not {type(found).__name__}")
    return found


def loads(content: str | bytes, *, constants: bool = False) -> Any:
    """The value in a text, in UTF-8 with or without a mark; ``constants`` also takes NaN and Infinity."""
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content.removeprefix("\ufeff")
    try:
        found = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=None if constants else _finite,
            parse_constant=None if constants else _refuse,
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level: list[Any] = [[found]]
    for _ in range(MOST_DEPTH):
        inside = [each.values() if isinstance(each, dict) else each for each in level]
        level = [child for children in inside for child in children if isinstance(child, dict | list)]
    if level:
        raise ValueError(_TOO_DEEP)
    if re.search(r"\\u[dD][89a-fA-F]", text):  # half a character by its escape passes until it is printed or encoded
        json.dumps(found, ensure_ascii=False).encode()
    return found


def refuse_interpolations(data: Any, source: str) -> None:
    """Raise where plain data of a file that may come from anywhere hold a ``${...}``: in a node it would be computed,
    to a call of anything that it names. Saved configurations have values in their place."""
    if "${" in str(data):
        raise ConfigError(f"{source} holds an interpolation (${{...}}), which is not computed here: give its value.")


_TOO_DEEP = f"its brackets are nested more than {MOST_DEPTH} deep"


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key '{next(name for name in found if names.count(name) > 1)[:80]}' stands twice")
    return found


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"the number {text[:MOST_DIGITS]}... has {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number")
