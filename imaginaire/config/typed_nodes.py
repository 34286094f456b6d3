# SPDX-License-Identifier: Apache-2.0
"""Nodes with a class behind them: which class, which fields, and the object that a node describes.

OmegaConf checks the types of such a node, but its own ``to_object`` drops unknown keys in silence, and only making the
object runs the validators. Both are done here, with the full key in every message.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException

from imaginaire.config.internals import OBJECTS, is_empty, raw
from imaginaire.errors import ConfigError, near


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


def check_fields(cls: type, names: Iterable[Any], key: str) -> None:
    """ConfigError for the first name that is no field of the class."""
    known = fields_of(cls)
    for name in names:
        if name not in known:
            raise ConfigError(_no_field(cls, name, key))


def _no_field(cls: type, name: Any, key: str) -> str:
    offered = [field for field in fields_of(cls) if field != "defaults"]  # Hydra's list, not for users
    return f"Unknown key {join(key, name)}: {cls.__qualname__} has no such field.{near(str(name), offered)}"


def to_object(node: DictConfig, key: str = "", keep_nodes: bool = False) -> Any:
    """The object of a typed node, its validators run; a wrong value is a ConfigError with the full key.

    Lazy nodes inside stay nodes. Other mappings become dictionaries; with ``keep_nodes`` only in fields of type Any.
    """
    cls = typed_class(node)
    assert cls is not None, f"{node!r} has no class behind it"
    check_fields(cls, node.keys(), key)
    fields = fields_of(cls)
    by_init: dict[str, Any] = {}
    afterwards: dict[str, Any] = {}
    for name in node:
        field = fields[str(name)]
        value, is_node = node[name], isinstance(node[name], DictConfig) and typed_class(node[name]) is None
        if not (keep_nodes and is_node and field.type in (Any, "Any")):
            value = _plain(value, join(key, name), keep_nodes)
        if field.init:
            by_init[getattr(field, "alias", None) or field.name] = value
        else:
            afterwards[field.name] = value
    make: Callable[..., Any] = cls
    try:
        made = make(**by_init)
        for name, value in afterwards.items():
            setattr(made, name, value)
    except (ValueError, TypeError) as error:
        raise ConfigError(_with_key(error, fields, key)) from error
    return made


def as_config(cls: type, value: Any, key: str) -> Any:
    """An object of a config class: ``value`` itself, what its node describes, or its class filled from a mapping."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise ConfigError(f"{key} is {kind}, but it is a section ({cls.__qualname__}) or a mapping of its fields.")
    own = typed_class(value)
    if own is not None and not issubclass(own, cls):
        raise ConfigError(f"{key} is a {own.__qualname__}, but {cls.__qualname__} is expected here.")
    try:
        if own is None:
            value = OmegaConf.merge(OmegaConf.structured(unchecked(cls, {}), flags=dict(OBJECTS)), value)
        return to_object(value, key)
    except OmegaConfBaseException as error:
        raise ConfigError(explain_value(error, key)) from error


def _with_key(error: Exception, fields: Iterable[str], key: str) -> str:
    """The text of a validator's error, led by the full key of the field that it names."""
    text = str(error.args[0]) if error.args else str(error)
    if not key or text.startswith(f"{key}."):
        return text
    for name in fields:
        if text.startswith((f"{name}=", f"{name} ")):
            return f"{key}.{text}"
        if text.startswith((f"'{name}'", f'"{name}"')):
            return f"{key}.{name}: {text}"
    return f"{key}: {text}"


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
    make = getattr(field, "default_factory", dataclasses.MISSING)
    return "???" if make is dataclasses.MISSING else make()


def explain_value(error: OmegaConfBaseException, prefix: str = "") -> str:
    """An error of OmegaConf about one key, in our words: the full key, what was found, what is expected."""
    key = join(prefix, error.full_key or str(error.key or ""))
    first_line = str(error.msg or error).splitlines()[0]
    if isinstance(error, ConfigTypeError):
        return f"{key} is a section where a list is given, or a list where a section is: {first_line}."
    cls: Any = error.object_type
    if not is_config_class(cls):
        return f"{key}: {first_line}"
    if (field := fields_of(cls).get(str(error.key))) is None:
        return _no_field(cls, error.key, key.rpartition(".")[0])
    found = f"{error.value!r} ({type(error.value).__name__})" if error.value is not None else "null"
    return f"{key}={found} has the wrong type: {_expected(field.type, error.value)}"


def _expected(declared: Any, value: Any) -> str:
    if is_config_class(declared):
        return f"it is a section ({declared.__qualname__}) with the fields {', '.join(list(fields_of(declared))[:12])}."
    kind = declared.__name__ if isinstance(declared, type) and not hasattr(declared, "__args__") else str(declared)
    hint = f" Write {int(value)}." if isinstance(value, float) and "int" in kind and value.is_integer() else ""
    return f"{kind.replace('typing.', '')} is expected.{hint}"
