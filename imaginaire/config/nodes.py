# SPDX-License-Identifier: Apache-2.0
"""Nodes of OmegaConf: their raw items and keys, the class behind a typed one, and the object that it describes.

OmegaConf has no public way to recognise a null node without resolving it, nor to ask a node for its place in the tree.
It checks the types of a typed node, but its own ``to_object`` drops unknown keys in silence, and only making the object
runs the validators. Both are done here, with the full key in every message.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs
from omegaconf import Container, DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException

from imaginaire.errors import ConfigError, near
from imaginaire.renamed import KEYS

# The flag of nodes that may hold classes, functions and dtypes. A node changes the dictionary it is given: copy it.
OBJECTS = MappingProxyType({"allow_objects": True})


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


def is_config_class(cls: Any) -> bool:
    return isinstance(cls, type) and (attrs.has(cls) or dataclasses.is_dataclass(cls))


def typed_class(node: Any) -> type | None:
    """The attrs class or dataclass behind a node, or None."""
    if not isinstance(node, DictConfig) or node._is_none() or node._is_missing():
        return None
    cls = OmegaConf.get_type(node)
    return cls if is_config_class(cls) else None


def fields_of(cls: type) -> dict[str, Any]:
    """The fields of an attrs class or dataclass by name."""
    fields: Iterable[Any] = attrs.fields(cls) if attrs.has(cls) else dataclasses.fields(cls)
    return {field.name: field for field in fields}


def join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def everything(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every item of a tree with its key, parents first, each as it is written: nothing is resolved."""
    yield key, node
    if isinstance(node, DictConfig) and not is_empty(node):
        for name in node:
            yield from everything(raw(node, name), join(key, name))
    elif isinstance(node, ListConfig) and not is_empty(node):
        for i in range(len(node)):
            yield from everything(raw(node, i), f"{key}[{i}]")


def nodes(node: Any, key: str = "") -> Iterator[tuple[str, DictConfig]]:
    """Every mapping of a tree with its key, parents first."""
    return ((at, found) for at, found in everything(node, key) if isinstance(found, DictConfig) and not is_empty(found))


def unknown(key: str, owner: str, known: Iterable[str], cure: str = "") -> ConfigError:
    """The error for a key that its owner does not have, with near names."""
    name = key.rpartition(".")[2]
    offered = [other for other in known if other != "defaults"]  # Hydra's list, not for users
    return ConfigError(f"Unknown key {key}: {owner} has no '{name}'.{near(name, offered)}{cure}")


def check_fields(cls: type, names: Iterable[Any], key: str) -> None:
    """ConfigError for the first name that is no field of the class."""
    known = fields_of(cls)
    for name in names:
        if name not in known:
            raise unknown(join(key, name), cls.__qualname__, known)


def to_object(node: DictConfig, key: str = "", keep_nodes: bool = False) -> Any:
    """The object of a typed node, its validators run; a wrong value is a ConfigError with the full key.

    Lazy nodes inside stay nodes. Other mappings become dictionaries; with ``keep_nodes`` only in fields of type Any.
    """
    cls: Any = typed_class(node)
    check_fields(cls, node.keys(), key)
    fields = fields_of(cls)
    values: dict[str, Any] = {}
    for name in node:
        field, value = fields[str(name)], node[name]
        is_node = isinstance(value, DictConfig) and typed_class(value) is None
        if not (keep_nodes and is_node and field.type in (Any, "Any")):
            value = _plain(value, join(key, name), keep_nodes)
        values[getattr(field, "alias", None) or field.name] = value
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        text = str(error.args[0]) if error.args else str(error)
        starts_with_field = text.startswith(tuple(f"{name}{sign}" for name in fields for sign in "= "))
        raise ConfigError(f"{key}{'.' if starts_with_field else ': '}{text}" if key else text) from error


def as_config(cls: type, value: Any, key: str) -> Any:
    """An object of a config class: ``value`` itself, what its node describes, or its class filled from a mapping."""
    if isinstance(value, cls):
        return value
    own = typed_class(value)
    if not isinstance(value, Mapping) or (own is not None and not issubclass(own, cls)):
        kind = "null" if value is None else f"a {(own or type(value)).__qualname__}"
        raise ConfigError(f"{key} is {kind}, but it is a section ({cls.__qualname__}) or a mapping of its fields.")
    try:
        if own is None:
            value = OmegaConf.merge(OmegaConf.structured(unchecked(cls, {}), flags=dict(OBJECTS)), value)
        return to_object(value, key)
    except OmegaConfBaseException as error:
        raise explained(error, key) from error


def _plain(value: Any, key: str, keep_nodes: bool) -> Any:
    if typed_class(value) is not None:
        return to_object(value, key, keep_nodes)
    if isinstance(value, ListConfig):
        return [_plain(item, f"{key}[{i}]", keep_nodes) for i, item in enumerate(value)]
    if isinstance(value, DictConfig) and "_target_" not in value:
        return {name: _plain(item, join(key, name), keep_nodes) for name, item in value.items()}
    return value


def unchecked(cls: type, values: Mapping[str, Any], key: str = "") -> Any:
    """An instance with these values, else the class's defaults, made without validators: composing runs them later.

    A field that has neither is "???", which composing reports as missing.
    """
    check_fields(cls, values, key)
    made: Any = object.__new__(cls)
    for name, field in fields_of(cls).items():
        object.__setattr__(made, name, values[name] if name in values else default_of(field, made))
    return made


def default_of(field: Any, made: Any = None) -> Any:
    """The default of a field of an attrs class or dataclass; "???" where it has none."""
    if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
        factory: Any = field.default
        return factory.factory(made) if factory.takes_self else factory.factory()
    if field.default is not attrs.NOTHING and field.default is not dataclasses.MISSING:
        return field.default
    make: Any = getattr(field, "default_factory", dataclasses.MISSING)
    return "???" if make is dataclasses.MISSING else make()


def explained(error: OmegaConfBaseException, prefix: str = "") -> ConfigError:
    """An error of OmegaConf about one key, with the full key, what was found, and what is expected."""
    key = join(prefix, error.full_key or str(error.key or ""))
    cls: Any = error.object_type
    if not is_config_class(cls) or isinstance(error, ConfigTypeError):  # a list for a section, or a section for a list
        return ConfigError(f"{key}: {str(error.msg or error).splitlines()[0]}")
    if (field := fields_of(cls).get(str(error.key))) is None:
        return unknown(key, cls.__qualname__, fields_of(cls))
    found = "null" if error.value is None else repr(error.value)
    expected = field.type.__name__ if type(field.type) is type else str(field.type).replace("typing.", "")
    if is_config_class(field.type):
        expected += f", a section with the fields {', '.join(fields_of(field.type))},"
    return ConfigError(f"{key}={found} has the wrong type: {expected} is expected.")


# --- values under earlier keys ---------------------------------------------------------------------------------------


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
