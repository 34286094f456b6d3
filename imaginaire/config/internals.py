# SPDX-License-Identifier: Apache-2.0
"""All that this repository uses of OmegaConf and Hydra beyond their public interface, and why.

OmegaConf has no public way to recognise a null node without resolving it, nor to ask a node for its place in the tree.
Hydra's store refuses classes and functions in plain dictionaries, which published experiment files store, and copies
every entry at each composition, which takes half a second. OmegaConf copies a node's every part by ``copy.deepcopy``,
which was most of the time in which experiments are registered. ``patched_store`` mends all three.
"""

import contextlib
import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

from omegaconf import AnyNode, BooleanNode, Container, DictConfig, FloatNode, IntegerNode, ListConfig, StringNode
from omegaconf._utils import get_yaml_loader

# The flag of nodes that may hold classes, functions and dtypes. A node changes the dictionary it is given: copy it.
OBJECTS = MappingProxyType({"allow_objects": True})


yaml_loader: Any = get_yaml_loader()  # the rules by which OmegaConf reads YAML; public is only the reading of nodes


def is_empty(node: Container) -> bool:
    """Whether a node is null, "???" or an interpolation: it has no items to look at."""
    return node._is_none() or node._is_missing() or node._is_interpolation()


def full_key(node: Container) -> str:
    """Where a node lies in its tree; empty for one that stands alone."""
    parent = node._get_parent()
    return "" if parent is None else parent._get_full_key(node._key())


def raw(node: Container, name: Any) -> Any:
    """An item of a node as it is written: an interpolation is its text, null a node."""
    child: Any = node._get_node(name)
    return child if isinstance(child, Container) and not is_empty(child) else child and child._value()


@contextlib.contextmanager
def patched_store(enter: Callable[[str | None, str, Any, str], str]) -> Iterator[None]:
    """Hydra's own ``store`` accepts plain dictionaries that hold classes and functions; compositions share the store;
    nodes are copied quickly.

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

    of_omegaconf = {cls: cls.__deepcopy__ for cls in _QUICKLY_COPIED}
    ConfigStore.store = store  # type: ignore[method-assign]
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    for cls in _QUICKLY_COPIED:
        cls.__deepcopy__ = _copied  # type: ignore[attr-defined]
    try:
        yield
    finally:
        ConfigStore.store = of_hydra  # type: ignore[method-assign]
        del ConfigStore.__deepcopy__  # type: ignore[attr-defined]
        for cls, method in of_omegaconf.items():
            cls.__deepcopy__ = method  # type: ignore[attr-defined]


# Nearly all nodes.
_QUICKLY_COPIED: tuple[Any, ...] = (DictConfig, ListConfig, AnyNode, BooleanNode, FloatNode, IntegerNode, StringNode)


def _copied(node: Any, memo: dict[int, Any]) -> Any:
    """What ``__deepcopy__`` of these classes returns: nodes and metadata are new, values and the parent are shared."""
    new = object.__new__(type(node))
    state = new.__dict__
    state.update(node.__dict__, _metadata=_copied_metadata(node.__dict__["_metadata"], memo), _flags_cache=None)
    content = state.get("_content")  # a string or None where a container is an interpolation, "???" or null
    if isinstance(content, dict):
        state["_content"] = {key: _copied_child(child, new, memo) for key, child in content.items()}
    elif isinstance(content, list):
        state["_content"] = [_copied_child(child, new, memo) for child in content]
    return new


def _copied_child(child: Any, parent: Any, memo: dict[int, Any]) -> Any:
    new = _copied(child, memo) if type(child) in _QUICKLY_COPIED else copy.deepcopy(child, memo)
    new.__dict__["_parent"] = parent
    return new


def _copied_metadata(metadata: Any, memo: dict[int, Any]) -> Any:
    new = object.__new__(type(metadata))
    new.__dict__.update(metadata.__dict__)  # types, a key and truth values, but for two dictionaries
    new.flags = copy.copy(metadata.flags)
    cache = metadata.resolver_cache
    new.resolver_cache = copy.deepcopy(cache, memo) if cache else defaultdict(dict)
    return new
