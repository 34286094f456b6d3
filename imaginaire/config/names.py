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
    asks = f"{key} names" if key else "This configuration names"
    parts = name.split(".")
    if len(parts) < 2 or not all(parts):
        raise ConfigError(f"{asks} '{name}', but a full dotted name such as package.module.Class is needed.")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
                continue  # this much is no module; a shorter part may be one that holds a class
            raise ConfigError(f"{asks} '{name}', but importing {module_name} failed: {error}.") from error
        except Exception as error:  # any module may be named, so anything may go wrong in it
            raise ConfigError(
                f"{asks} '{name}', but importing {module_name} failed: {type(error).__name__}: {error}."
            ) from error
        for depth, part in enumerate(parts[cut:], start=cut):
            if not hasattr(found, part):
                where = ".".join(parts[:depth])
                public = [member for member in dir(found) if not member.startswith("_")]
                raise ConfigError(f"{asks} '{name}', but {where} has no '{part}'.{near(part, public)}")
            found = getattr(found, part)
        return found
    raise ConfigError(
        f"{asks} '{name}', but no module '{parts[0]}' can be imported."
        " Run from the folder it lies in, or install the package that brings it."
    )


def target_of(node: Any, key: str = "") -> Any:
    """What a lazy node builds, imported where its ``_target_`` is a name; None of a node without one, and of None.

    ``key`` is the node's place, for the message.
    """
    target = node.get("_target_") if node is not None else None
    return locate(target, f"{key}._target_" if key else "_target_") if isinstance(target, str) else target


def parameters_of(target: Any) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a target by name; None where Python cannot read them."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return None


def signature(target: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a target by name; empty where Python cannot read them."""
    return parameters_of(target) or {}


def takes(parameters: Mapping[str, inspect.Parameter] | None) -> tuple[list[str], bool]:
    """The names of the arguments that can be given by keyword, and whether any other can."""
    if parameters is None:
        return [], True
    names = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def takes_with_bases(target: Any) -> tuple[list[str], bool]:
    """As ``takes``, for a class that hands its ``**kwargs`` on: with the arguments of the classes it is derived from,
    up to the first that takes no others."""
    found: list[str] = []
    for cls in target.__mro__[:-1] if isinstance(target, type) else ():
        if isinstance(init := vars(cls).get("__init__"), types.FunctionType):
            names, takes_any = takes(inspect.signature(init).parameters)
            found += [name for name in names[1:] if name not in found]
            if not takes_any:
                return found, False
    return (found, True) if found else takes(parameters_of(target))


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


def find_name(value: Any) -> str | None:
    """A dotted name by which another process finds this very object, or None."""
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
    return None


def name_of(value: Any, key: str = "") -> str:
    """The verified dotted name of an object; ConfigError with the key path where there is none."""
    if (name := find_name(value)) is not None:
        return name
    at = f"{key}: " if key else ""
    shown = describe(value)
    if getattr(value, "__module__", None) == "__main__":
        why = (
            "is defined in the program that was started, so no saved configuration can name it. Move it into a module."
        )
    elif "<lambda>" in shown or "<locals>" in shown:
        why = "has no name that a saved configuration can hold. Define it at the top level of a module, without lambda."
    else:
        shown = f"{value!r} (a {type(value).__qualname__})"
        why = (
            "cannot be written to a configuration file. Use plain values, or L(TheClass)(...), built when it is needed."
        )
    raise ConfigError(f"{at}{shown} {why}")


def describe(value: Any) -> str:
    """A name for messages, found again or not."""
    if isinstance(value, str):
        return value
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or repr(value)
    return f"{module}.{name}" if module else str(name)
