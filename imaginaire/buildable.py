# SPDX-License-Identifier: Apache-2.0
"""Classes and functions by name: what flags, configurations and files may ask for.

# my_robot.py: what it registers has its name after --import my_robot
@buildable("suite", "my_arm")
class MyArm: ...

resolve("my_arm", "suite")
resolve("my_robot:MyArm", "suite")  # imports it
resolve({"_target_": "my_robot.MyArm"}, "suite")
"""

import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from imaginaire.config.names import locate, takes, target_of
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
    return make(**{**{name: value for name, value in offered.items() if name in known}, **required})


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
