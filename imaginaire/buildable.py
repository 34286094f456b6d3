# SPDX-License-Identifier: Apache-2.0
"""Classes and functions by name: what flags, configurations and files may ask for.

# my_robot.py: what it registers has its name after --import my_robot
@buildable("suite", "my_arm")
class MyArm: ...

resolve("my_arm", "suite")
resolve("my_robot:MyArm", "suite")  # imports it
resolve({"_target_": "my_robot.MyArm"}, "suite")

Below them dotted names of any importable thing: find one by its name, give one a name that finds it again, read its
arguments.
"""

import enum
import importlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from imaginaire.errors import ConfigError, near

T = TypeVar("T")

_TABLES: dict[str, dict[str, Any]] = {}  # by kind


def shipped(kind: str, names: dict[str, Any]) -> dict[str, Any]:
    """The table of a kind: ``names``, whose paths "module:Thing" are imported when resolved, and what is registered."""
    for name, thing in _TABLES.get(kind, {}).items():
        _add(kind, name, thing, names)
    _TABLES[kind] = names
    return names


def buildable(kind: str, name: str = "") -> Callable[[T], T]:
    """Decorator that gives a class, a function or an object a name; by default "module.Thing"."""

    def register(thing: T) -> T:
        _add(kind, name or path_of(thing).replace(":", "."), thing, _TABLES.setdefault(kind, {}))
        return thing

    return register


def completed(thing: T, defaults: type) -> T:
    """The same object or class, whose class has the optional members of ``defaults`` from now on; None stays None."""
    for name, default in vars(defaults).items():
        if thing is not None and not name.startswith("_") and not hasattr(thing, name):
            cls = thing if isinstance(thing, type) else type(thing)
            try:
                setattr(cls, name, default)
            except TypeError as error:  # of a built-in type
                raise ConfigError(f"A {cls.__name__} has no '{name}' and can be given none: use a class.") from error
    return thing


def _add(kind: str, name: str, thing: Any, table: dict[str, Any]) -> None:
    if name in table and path_of(table[name]) != path_of(thing):  # an equal one: its module was imported anew
        raise ConfigError(
            f"Two of the kind {kind} are called '{name}': {path_of(table[name])}, {path_of(thing)}. What ships has"
            f' names, too: give yours another one, @buildable("{kind}", "my_{name}").'
        )
    table[name] = thing


def find(name: str, kind: str) -> Any:
    """The thing registered under a name, or the name itself where it is a path; nothing is imported."""
    table = _TABLES.get(kind, {})
    if name not in table and not {":", "."} & {*name}:
        raise ConfigError(
            f"No {kind} is called '{name}'.{near(name, table)} One of your own: module:Name, or the name that it has"
            " after --import MODULE."
        )
    return table.get(name, name)


def resolve(value: Any, kind: str) -> Any:
    """The class or function of a registered name, of module:Thing or module.Thing, or of a lazy node.

    What is none of these is the value itself.
    """
    if isinstance(value, Mapping):
        return target_of(value, kind)
    found = find(value, kind) if isinstance(value, str) else value
    if isinstance(found, str):
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        found = locate(found.replace(":", "."), f"The {kind}")
    return found


def recorded(name: str, kind: str) -> Any | None:
    """The registered thing that a file calls module.Thing, or None; nothing else that a file names is imported."""
    table = _TABLES.get(kind, {})
    return next((resolve(own, kind) for own in table if path_of(table[own]).replace(":", ".") == name), None)


def made(make: Callable[..., T], required: Mapping[str, Any], what: str, **offered: Any) -> T:
    """The result of a call with all ``required`` arguments, which it must take, and those offered that it takes."""
    known = require_taken(make, required, what)
    given = {**{name: value for name, value in offered.items() if name in known}, **required}
    for name in known:
        if name not in given and signature(make)[name].default is inspect.Parameter.empty:
            raise ConfigError(f"{what}{name} has no default: give it.")
    return make(**given)


def require_taken(make: Callable[..., Any], required: Iterable[str], what: str) -> Collection[str]:
    """The names of what ``make`` takes; raises where it does not take all ``required``, ``what`` before a wrong one."""
    known, takes_others = takes(make)
    if wrong := [name for name in required if name not in known and not takes_others]:
        raise ConfigError(f"{what}{wrong[0]} has no meaning here: leave it out.{near(wrong[0], known)}")
    return known


def path_of(thing: Any) -> str:
    """The path "module:Thing" of a class or function, or of what `find` gives for one."""
    if isinstance(thing, str):
        return thing if ":" in thing else ":".join(thing.rsplit(".", 1))
    return f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', repr(thing))}"


# --- dotted names


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


def signature(target: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a target by name; where Python cannot read them, one that takes anything."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {"arguments": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}


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
