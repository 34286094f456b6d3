# SPDX-License-Identifier: Apache-2.0
"""All that this repository uses of OmegaConf and Hydra beyond their public interface, and why.

OmegaConf has no public way to recognise a null node without resolving it, nor to ask a node for its place in the tree.
Hydra's store refuses classes and functions in plain dictionaries, which published experiment files store, and copies
every entry at each composition, which would build them all. ``patched_store`` mends both.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

from omegaconf import Container, DictConfig
from omegaconf._utils import get_yaml_loader

# The flag of nodes that may hold classes, functions and dtypes. A node changes the dictionary it is given: copy it.
OBJECTS = MappingProxyType({"allow_objects": True})


yaml_loader: Any = get_yaml_loader()  # the rules by which OmegaConf reads YAML; public is only the reading of nodes


def is_empty(node: Container) -> bool:
    """True for a node that is null, "???" or an interpolation: it has no items to look at."""
    return node._is_none() or node._is_missing() or node._is_interpolation()


def full_key(node: Container) -> str:
    """The full key of a node in its tree; empty for one that stands alone."""
    parent = node._get_parent()
    return "" if parent is None else parent._get_full_key(node._key())


def raw(node: Container, name: Any) -> Any:
    """An item of a node as it is written: an interpolation is its text, null a node."""
    child: Any = node._get_node(name)
    return child if isinstance(child, Container) and not is_empty(child) else child and child._value()


@contextlib.contextmanager
def patched_store(enter: Callable[[str | None, str, Any, str], str]) -> Iterator[None]:
    """Hydra's own ``store`` accepts plain dictionaries that hold classes and functions; compositions share the store.

    ``enter(group, name, node, module)`` looks at what a module stores and returns the name to store it under. It is not
    called where the caller names itself as ``provider``.
    """
    from hydra.core.config_store import ConfigStore  # here, as it takes a tenth of a second

    of_hydra = ConfigStore.store

    def store(self: ConfigStore, name: str, node: Any, group: str | None = None, *more: Any, **options: Any) -> None:
        if isinstance(node, dict):
            node = DictConfig(dict(node), flags=dict(OBJECTS))
        if not (more[1:] or options.get("provider")):
            options["provider"] = sys._getframe(1).f_globals.get("__name__", "?")
            name = enter(group, name.removesuffix(".yaml"), node, options["provider"])
        of_hydra(self, name, node, group, *more, **options)

    ConfigStore.store = store  # type: ignore[method-assign]
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    try:
        yield
    finally:
        ConfigStore.store = of_hydra  # type: ignore[method-assign]
        del ConfigStore.__deepcopy__  # type: ignore[attr-defined]
