# SPDX-License-Identifier: Apache-2.0
"""Values under earlier keys of a configuration, moved to the present ones: ``imaginaire.renamed.KEYS`` is the table."""

from typing import Any

from omegaconf import DictConfig, open_dict, read_write

from imaginaire.config.internals import is_empty, raw
from imaginaire.renamed import KEYS


def move_keys(tree: Any) -> None:
    """Rename keys of a dictionary or a node that may hold a part of a configuration, in place."""
    for old, new in KEYS.items():
        where, _, name = old.rpartition(".")
        section = _section(tree, where)
        if section is None or name not in section:
            continue
        if isinstance(section, DictConfig):
            value = raw(section, name)
            with read_write(tree), open_dict(tree):
                del section[name]
                _put(tree, new, value)
        else:
            _put(tree, new, section.pop(name))


def _section(tree: Any, key: str) -> Any:
    """The mapping at a key; None where there is none."""
    for part in key.split("."):
        if not isinstance(tree, dict | DictConfig) or part not in tree:
            return None
        tree = raw(tree, part) if isinstance(tree, DictConfig) else tree[part]
    is_mapping = isinstance(tree, dict) or (isinstance(tree, DictConfig) and not is_empty(tree))
    return tree if is_mapping else None


def _put(tree: Any, key: str, value: Any) -> None:
    *parts, last = key.split(".")
    for part in parts:
        if part not in tree:
            tree[part] = {}
        tree = tree[part]
    tree.setdefault(last, value)  # what is given by its present name counts
