# SPDX-License-Identifier: Apache-2.0
"""Dotted names of importable things: find one by its name, give one a name that finds it again, read its arguments."""

import enum
import importlib
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any

from imaginaire.errors import ConfigError, near


def locate(name: str, key: str = "") -> Any:
    """The class, function or object called ``package.module.Thing``; ``key`` is who asks, for the message."""
    asks = f"{key or 'This configuration'} names '{name}', but"
    parts = name.split(".")
    if len(parts) < 2 or not all(parts):
        raise ConfigError(f"{asks} a full dotted name such as package.module.Class is needed.")
    for cut in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module)
        except Exception as error:  # any module may be named, so anything may go wrong in it
            if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
                continue  # this much is no module; a shorter part may be one that holds a class
            raise ConfigError(f"{asks} importing {module} failed: {type(error).__name__}: {error}.") from error
        for part in parts[cut:]:
            if not hasattr(found, part):
                public = [member for member in dir(found) if not member.startswith("_")]
                raise ConfigError(f"{asks} {describe(found)} has no '{part}'.{near(part, public)}")
            found = getattr(found, part)
        return found
    raise ConfigError(
        f"{asks} no module '{parts[0]}' can be imported."
        " Run from the folder it lies in, or install the package that brings it."
    )


def target_of(node: Any, key: str = "") -> Any:
    """The target of a lazy node, imported where ``_target_`` is a name; None for a node without one, and for None.

    ``key`` is the node's place, for the message.
    """
    target = node.get("_target_") if node is not None else None
    return locate(target, f"{key}._target_" if key else "_target_") if isinstance(target, str) else target


def arguments_of(node: Mapping[Any, Any]) -> dict[str, Any]:
    """The arguments of a lazy node by name, without its target and other marks."""
    return {str(name): node[name] for name in node if not str(name).startswith("_")}


_ANYTHING = {"arguments": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}


def signature(target: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a target by name; where Python cannot read them, one that takes anything."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return _ANYTHING


def takes(target: Any) -> tuple[list[str], bool]:
    """The names of the arguments that can be given by keyword, and whether any other can."""
    parameters = signature(target).values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _candidates(value: Any) -> list[str]:
    if isinstance(value, enum.Enum):
        return [f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"]
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "memory_format", "layout"):
        return [str(value)]
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    qualname = getattr(value, "__qualname__", name)
    if not isinstance(qualname, str):
        return []
    if not isinstance(module, str):  # some built-in functions of extension modules
        return [f"{root}.{name}" for root in ("torch", "builtins") if root in sys.modules]
    return [f"{module}.{qualname}", f"{module}.{name}", f"{module.split('.')[0]}.{name}"]


def name_of(value: Any, key: str = "") -> str:
    """A dotted name by which another process finds this very object; ConfigError where there is none."""
    for name in _candidates(value):
        if name.split(".")[0] == "__main__" or "<" in name:
            continue
        try:
            found = locate(name)
        except ConfigError:
            continue
        # Every access to a class method makes a new object, equal to the others.
        if found is value or (isinstance(value, types.MethodType) and found == value):
            return name
    raise ConfigError(
        f"{f'{key}: ' if key else ''}{describe(value)} has no name that a saved configuration can hold. Use plain"
        " values, what stands at the top level of a module that can be imported, or L(TheClass)(...)."
    )


def describe(value: Any) -> str:
    """A name for messages, found again or not."""
    if isinstance(value, str):
        return value
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or repr(value)
    return f"{module}.{name}" if module else str(name)
