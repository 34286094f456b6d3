# SPDX-License-Identifier: Apache-2.0
"""Recipes with changed fields, and what their translation sets."""

import copy
from pathlib import Path
from typing import Any

from cosmos_predict2.compat.fields import Translation

ROOT = Path(__file__).resolve().parents[2]
BASE = "cosmos_predict2/configs/base/config.py"


def edited(recipe: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The recipe with these fields, dots written as two underscores."""
    content = copy.deepcopy(recipe)
    for path, value in changes.items():
        *sections, name = path.split("__")
        inside = content
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value
    return content


def value_of(translation: Translation, key: str) -> str:
    """The value of the first override whose key is this one, or ends with it."""
    found = [item.lstrip("+").partition("=") for item in translation.overrides]
    return next(value for name, _, value in found if name == key or name.endswith(f".{key}"))
