# SPDX-License-Identifier: Apache-2.0
"""Nodes with a class behind them: which class, which fields, and the object that a node describes.

OmegaConf checks the types of such a node, but its own ``to_object`` drops unknown keys in silence, and only making the
object runs the validators. Both are done here, with the full key in every message.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import attrs
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from imaginaire.errors import ConfigError, near

# The flag of nodes that may hold classes, functions and dtypes. A node changes the dictionary it is given: copy it.
OBJECTS = MappingProxyType({"allow_objects": True})


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


def full_key(node: Any) -> str:
    """Where a node lies in its tree; empty for one that stands alone."""
    key = ""
    while (parent := node._get_parent()) is not None:
        own = node._key()
        if isinstance(parent, ListConfig):
            key = f"[{own}]{key}"
        elif own is not None:
            key = f".{own}{key}"
        node = parent
    return key.lstrip(".")


def check_fields(cls: type, names: Iterable[Any], key: str) -> None:
    """ConfigError for the first name that is no field of the class."""
    known = fields_of(cls)
    for name in names:
        if name not in known:
            offered = [field for field in known if field != "defaults"]  # Hydra's list, not for users
            raise ConfigError(
                f"Unknown key {join(key, name)}: {cls.__qualname__} has no such field.{near(str(name), offered)}"
            )


def to_object(node: DictConfig, key: str = "", keep_nodes: bool = False) -> Any:
    """The object of a typed node, its validators run; a wrong value is a ConfigError with the full key.

    Lazy nodes inside stay nodes. Other mappings become dictionaries; with ``keep_nodes`` only where the field says so.
    """
    cls = typed_class(node)
    assert cls is not None, f"{node!r} has no class behind it"
    check_fields(cls, node.keys(), key)
    fields = fields_of(cls)
    by_init: dict[str, Any] = {}
    afterwards: dict[str, Any] = {}
    for name in node:
        value = _plain(node[name], join(key, name), keep_nodes)
        field = fields[str(name)]
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


def _with_key(error: Exception, fields: Mapping[str, Any], key: str) -> str:
    """The text of a validator's error, led by the full key of the field that it names."""
    text = str(error.args[0]) if error.args else str(error)
    bare = text.lstrip("'\"")
    first = next(
        (name for name in fields if bare.startswith(name) and bare[len(name) :][:1] in ("=", "'", '"', " ")), ""
    )
    if not first or not key or bare.startswith(key):
        return text if not key or bare.startswith(f"{key}.") else f"{key}: {text}"
    return f"{key}.{bare}" if bare is text or bare == text else f"{key}.{first}: {text}"


def _plain(value: Any, key: str, keep_nodes: bool) -> Any:
    if typed_class(value) is not None:
        return to_object(value, key, keep_nodes)
    if isinstance(value, ListConfig):
        return [_plain(item, f"{key}[{i}]", keep_nodes) for i, item in enumerate(value)]
    if isinstance(value, DictConfig) and "_target_" not in value:
        if keep_nodes and value._metadata.ref_type is Any:
            return value
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
    if isinstance(field, attrs.Attribute):
        if field.default is attrs.NOTHING:
            return "???"
        if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
            factory: Any = field.default
            return factory.factory(made) if factory.takes_self else factory.factory()
        return field.default
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else "???"


def explain_value(error: OmegaConfBaseException, prefix: str = "") -> str:
    """An error of OmegaConf about one key, in our words: the full key, what was found, what is expected."""
    key = join(prefix, error.full_key or str(error.key or ""))
    cls = error.object_type if is_config_class(error.object_type) else None
    name = str(error.key)
    if key == "experiment" and "not in" in str(error.msg):
        return 'it was stored without package="_global_". Add that to its store(...), or use register_experiment.'
    if "not in" in str(error.msg) and cls is not None:
        return f"Unknown key {key}: {cls.__qualname__} has no such field.{near(name, fields_of(cls))}"
    if "does not support deletion" in str(error.msg):
        default = f" Set it instead: {key}=VALUE." if cls is not None else ""
        return f"~{key}: a field of {cls.__qualname__ if cls else 'a typed section'} cannot be removed.{default}"
    if isinstance(error, ValidationError) or "conver" in str(error.msg) or "not a subclass" in str(error.msg):
        found = f"{error.value!r} ({type(error.value).__name__})" if error.value is not None else "null"
        return f"{key}={found} has the wrong type: {_expected(cls, name, error)}"
    return f"{key}: {str(error.msg or error).splitlines()[0]}"


def _expected(cls: type | None, name: str, error: OmegaConfBaseException) -> str:
    field = fields_of(cls).get(name) if cls is not None else None
    if field is None:
        return str(error.msg or error).splitlines()[0]
    declared = field.type
    if is_config_class(declared):
        return f"it is a section ({declared.__qualname__}) with the fields {', '.join(list(fields_of(declared))[:12])}."
    kind = declared.__name__ if isinstance(declared, type) and not hasattr(declared, "__args__") else str(declared)
    hint = ""
    if isinstance(error.value, float) and "int" in kind and error.value.is_integer():
        hint = f" Write {int(error.value)}."
    return f"{kind.replace('typing.', '')} is expected.{hint}"
