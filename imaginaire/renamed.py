# SPDX-License-Identifier: Apache-2.0
"""Modules that moved: their old names can still be imported, and named by the ``_target_`` of a saved configuration.

Each package lists its own: ``add({"package.old": "package.new"})``. The old name gives the very same module. ``KEYS``
are those of configurations, in full: overrides, experiments and saved configurations may have the old one.

``NAMES`` are single names, by the module that code elsewhere imports them from, which may exist here or not. Each has a
place, "package.module" where it is called the same, "package.module:attribute", "package.module:" for the module
itself, "package.module:function()" for what that gives; or a sentence on what to use, with which its import fails.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

RENAMED: dict[str, str] = {}
KEYS: dict[str, str] = {}
NAMES: dict[str, dict[str, str]] = {}
_ABOVE_NAMES: set[str] = set()  # packages that are there for modules of NAMES alone


class _Renamed(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in RENAMED:
            return ModuleSpec(name, self)
        if name not in NAMES and name not in _ABOVE_NAMES:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return ModuleSpec(name, self, is_package=name in _ABOVE_NAMES)
        if name in NAMES and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if module.__name__ == name:  # the loader of an archive serves others, too
                    _answer_for(module, name)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader
        return spec

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in RENAMED:
            module = sys.modules[name] = importlib.import_module(RENAMED[name])
            if not hasattr(module, "__path__"):
                module.__path__ = []  # modules of NAMES may lie below
        else:
            _answer_for(module, name)


class _OfOthers(MetaPathFinder):
    """Asked last: names of this package that another lists are known once it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        is_ours = name.startswith("imaginaire.")
        return _FINDER.find_spec(name, path, target) if is_ours and _lists_of_others() else None


_FINDER = _Renamed()


def _lists_of_others() -> bool:
    try:
        importlib.import_module("cosmos_predict2")
    except ModuleNotFoundError:
        return False
    return True


def _answer_for(module: ModuleType, published: str) -> None:
    """Let the module have the names of NAMES besides its own."""
    own: Callable[[str], Any] | None = vars(module).get("__getattr__")

    def answer(name: str) -> Any:
        if name in NAMES.get(published, {}) or own is None:
            return named(published, name)
        return own(name)

    vars(module)["__getattr__"] = answer


def named(module: str, name: str) -> Any:
    """The thing that a published module has under a name; an ImportError with what to use where it is not here."""
    if not name.startswith("__"):
        _lists_of_others()
    place = NAMES.get(module, {}).get(name)
    if place is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    if " " in place:
        raise ImportError(f"{module}.{name}: {place}")
    target, colon, attribute = place.partition(":")
    found = importlib.import_module(target)
    if colon and not attribute:
        return found
    value = getattr(found, attribute.removesuffix("()") or name)
    return value() if attribute.endswith("()") else value


def add(table: Mapping[str, str]) -> None:
    """Make each old name of ``table`` importable.

    The finder comes first: below a package that moved, the usual one would load a second copy from the new folder.
    """
    RENAMED.update(table)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
        sys.meta_path.append(_OfOthers())


def add_names(table: Mapping[str, Mapping[str, str]]) -> None:
    """Make names importable, or refused with a sentence, from where ``table`` has them: several of a place together,
    with spaces between them."""
    for module, places in table.items():
        NAMES.setdefault(module, {}).update({name: place for names, place in places.items() for name in names.split()})
        words = module.split(".")
        _ABOVE_NAMES.update(".".join(words[:i]) for i in range(2, len(words)))


add(
    {
        "imaginaire.callbacks": "imaginaire.training.callbacks",
        "imaginaire.callbacks.base": "imaginaire.training.callbacks.base",
        "imaginaire.compose": "imaginaire.config.compose",
        "imaginaire.lazy_config": "imaginaire.config.lazy_config",
        "imaginaire.model": "imaginaire.training.model",
        "imaginaire.optim.ema": "imaginaire.training.model",  # what an example imported
        "imaginaire.trainer": "imaginaire.training.trainer",
    }
)
