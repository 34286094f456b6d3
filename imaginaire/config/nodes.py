# SPDX-License-Identifier: Apache-2.0
"""Nodes of OmegaConf: their raw items and keys, the object that a typed one describes, and the checks of a whole tree.

OmegaConf has no public way to recognise a null node without resolving it, nor to ask a node for its place in the tree.
It checks the types of a typed node, but its own ``to_object`` drops unknown keys in silence, and only making the object
runs the validators. Both are done here, with the full key in every message.

Before a tree becomes a Config it is walked three times: as it is written (``check_present``), by OmegaConf to resolve
it, and with its values (``check_values``). ``faults`` are what a dry run reports besides.
"""

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
from omegaconf import Container, DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException

from imaginaire.buildable import describe, signature, takes, target_of
from imaginaire.config.schema import LAZY_MEMBERS, NEVER, Config
from imaginaire.errors import ConfigError, near
from imaginaire.renamed import KEYS

# The flag of nodes that may hold classes, functions and dtypes. A node changes the dictionary it is given: copy it.
OBJECTS = types.MappingProxyType({"allow_objects": True})


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


def move_keys(tree: DictConfig) -> None:
    """Rename keys of a node that may hold a part of a configuration, in place."""
    with read_write(tree), open_dict(tree):
        for old, new in KEYS.items():
            where, _, name = old.rpartition(".")
            section = OmegaConf.select(tree, where)
            if isinstance(section, DictConfig) and not is_empty(section) and name in section:
                value = raw(section, name)
                del section[name]
                if OmegaConf.select(tree, new) is None:  # else what is given by its present name counts
                    OmegaConf.update(tree, new, value, force_add=True)


# --- as it is written -----------------------------------------------------------------------------------------------


def check_present(tree: DictConfig) -> None:
    """No value is still "???"."""
    if missing := [key for key, value in everything(tree) if isinstance(value, str) and value == "???"]:
        shown = "".join(f"\n  {key}=VALUE" for key in sorted(missing))
        raise ConfigError(f"Values are missing (marked ??? in the experiment). Give on the command line:{shown}")


def resolve(tree: DictConfig) -> None:
    """Replace every interpolation by its value."""
    try:
        OmegaConf.resolve(tree)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        left = (f"{key}={value}" for key, value in everything(tree) if isinstance(value, str) and "${" in value)
        raise ConfigError(f"{next(left, '')} cannot be resolved: {str(error).splitlines()[0]}.") from error


# --- with its values ------------------------------------------------------------------------------------------------

# Arguments that mean the same in every class of ours and of torch's, with the least that they can be.
_LEAST = {"lr": 0.0, "adam_lr": 0.0, "weight_decay": 0.0, "eps": 0.0, "timeout": 0.0}
_LEAST |= {"num_workers": 0, "batch_size": 1, "prefetch_factor": 1}
_OURS = ("imaginaire", "cosmos_predict2", "torch")


def check_values(tree: DictConfig) -> None:
    """Lazy members and callbacks have a target and each lazy node takes its arguments, numbers are in their range,
    typed nodes are valid. A class from elsewhere may mean something by -1 or nan, but not as an optimizer."""
    _check_built(tree)
    foreign: list[str] = []
    not_taken: list[str] = []
    for key, node in everything(tree):
        is_ours = not key.startswith(tuple(foreign))
        if isinstance(node, float) and math.isnan(node) and is_ours:
            raise ConfigError(f"{key}={node}, but it must be a finite number.")
        if not isinstance(node, DictConfig) or is_empty(node) or not key:
            continue
        if "_target_" in set(node):  # OmegaConf takes long to say that a key is not there
            target = target_of(node, key)
            if not isinstance(target, DictConfig):  # a node that makes the callable
                not_taken += _check_call(key, node, target)
            is_ours = str(getattr(target, "__module__", "")).split(".")[0] in _OURS
            if not is_ours:
                foreign += [f"{key}.", f"{key}["]
            if is_ours or key == "optimizer":
                _check_ranges(key, node)
        elif typed_class(node) is not None and typed_class(node._get_parent()) is None:
            to_object(node, key)  # runs the validators of all that it holds
    if not_taken:
        raise ConfigError("\n".join(not_taken))


def _check_built(tree: DictConfig) -> None:
    """Lazy members and callbacks are null or have a target."""
    callbacks = tree.trainer.callbacks
    if not (callbacks is None or isinstance(callbacks, DictConfig)):
        raise ConfigError(f"trainer.callbacks={callbacks!r}, but it is a section: set trainer.callbacks.NAME.")
    built = {name: tree[name] for name in LAZY_MEMBERS}
    built |= {f"trainer.callbacks.{name!s}": node for name, node in (callbacks or {}).items()}
    for key, node in built.items():
        is_plain = isinstance(node, (DictConfig, ListConfig, str, int, float))  # else an object that is built already
        if is_plain and typed_class(node) is None and not (isinstance(node, DictConfig) and "_target_" in node):
            raise ConfigError(f"{key} is {node!r}, but must have a _target_. Choose an entry of its group, or ~{key}.")


def _check_call(key: str, node: DictConfig, target: Any) -> Iterator[str]:
    """A message on each argument of a lazy node that its target does not take; raises for text in place of a number."""
    if not callable(target):
        raise ConfigError(f"{join(key, '_target_')} is {target!r}, which cannot be called.")
    (names, takes_any), parameters = takes(target), signature(target)
    group = "callbacks" if key.startswith("trainer.callbacks.") else key.partition(".")[0]
    for name in map(str, node):
        at = join(key, name)
        if name in names:
            if isinstance(node[name], str):
                _check_text(at, node[name], parameters[name], target)
        elif not takes_any and not name.startswith("_"):
            cure = (
                f" If it is left from a node that this one was merged over, remove it with ~{at}, or all of them with"
                f" '/clear/{group}' in the experiment's defaults."
            )
            yield str(unknown(at, describe(target), names, cure))


def _check_text(key: str, value: str, parameter: inspect.Parameter, target: Any) -> None:
    """Text for an argument that is declared as a number or bool: ``no`` would be true, 2**-14.5 is not evaluated."""
    declared = parameter.annotation
    if isinstance(declared, str):
        declared = {"int": int, "float": float, "bool": bool}.get(declared)
    is_union = isinstance(declared, types.UnionType) or typing.get_origin(declared) is typing.Union
    kinds = set(typing.get_args(declared) if is_union else [declared]) - {types.NoneType}
    if kinds and kinds <= {int, float, bool}:
        expected = " or ".join(sorted(kind.__name__ for kind in kinds))
        cure = "Give true or false." if kinds == {bool} else "Give the number: expressions are not evaluated."
        raise ConfigError(f"{key}={value!r} is text, but {describe(target)} expects {expected}. {cure}")


def _check_ranges(key: str, node: DictConfig) -> None:
    present = set(node)
    for name, least in _LEAST.items():
        value, is_whole = node[name] if name in present else None, isinstance(least, int)
        is_wrong_kind = isinstance(value, (bool, str)) or (is_whole and isinstance(value, float))
        if is_wrong_kind or (isinstance(value, int | float) and not least <= value < math.inf):
            kind = "whole number" if is_whole else "number"
            raise ConfigError(f"{join(key, name)}={value!r}, but it must be a finite {kind} of at least {least:g}.")


# --- the typed sections ---------------------------------------------------------------------------------------------


def check_sections(config: Config) -> None:
    """The run has a folder, and no field that has no effect is set."""
    _check_effects(config, "", "")
    for name in ("project", "group", "name"):
        value = getattr(config.job, name)
        parts = value.split("/")  # a part that is empty or "." would make two names the same folder
        if not {"", ".", ".."}.isdisjoint(parts) or any(ord(letter) < 32 for letter in value) or not value.strip():
            raise ConfigError(f"job.{name}={value!r}, but it must be a part of the run folder project/group/name.")


def _check_effects(section: Any, key: str, reason: str) -> None:
    for name, field in fields_of(type(section)).items():
        value = getattr(section, name)
        why = field.metadata.get("no_effect", reason)
        if is_config_class(type(value)):
            _check_effects(value, join(key, name), why)
        elif why and value != (default := default_of(field)):
            shown = {"None": "null", "True": "true", "False": "false"}.get(str(default), repr(default))
            raise ConfigError(f"{join(key, name)} has no effect here: {why}. Leave it at its default, {shown}.")


# --- what is odd on any machine -------------------------------------------------------------------------------------

_TIME_STAMP = re.compile(r"\d{4}-\d{2}-\d{2}|\d{2}[-:]\d{2}[-:]\d{2}|20\d{6}|\d{8,}")


def faults(config: Config) -> Iterator[tuple[str, str]]:
    """(config key, sentence) of what the author of an experiment should mend, though it runs."""
    max_iter, save_iter = config.trainer.max_iter, config.checkpoint.save_iter
    if _TIME_STAMP.search(config.job.name):
        yield "job.name", f"{config.job.name} has a time stamp: the next start gets another folder, and does not resume"
    if max_iter < save_iter < NEVER:
        yield "checkpoint.save_iter", f"{save_iter} is beyond trainer.max_iter={max_iter}: only the end is saved"
