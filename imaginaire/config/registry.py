# SPDX-License-Identifier: Apache-2.0
"""The experiments and entries of other groups that config files register, in Hydra's store, one per process.

An entry keeps its name for the file that registered it first. Where a second file registers another entry of that name
(published experiment files bring data of their own), the experiments of that file take its entry, all others the first.
"""

import contextlib
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf, read_write

from imaginaire.buildable import describe
from imaginaire.config.files import broken_modules
from imaginaire.config.nodes import OBJECTS, move_keys, raw
from imaginaire.config.schema import Config
from imaginaire.errors import ConfigError, near

log = logging.getLogger(__name__)

RENAMED = {"data_train": "dataloader_train", "data_val": "dataloader_val"}  # both spellings are in guides
LAZY_MEMBERS = ("model", "optimizer", "scheduler", "dataloader_train", "dataloader_val")

_absent: list[Callable[[str], str | None]] = []  # why a name is not registered
_registered: dict[str, tuple[Callable[[], Any], str]] = {}  # experiment name -> (what builds it, its module)


class Entry(ConfigNode):
    """An entry of the store that is built when somebody looks at it: of all that are there, a run needs a few."""

    def __init__(self, group: str, name: str, package: str, module: str, build: Callable[[], Any]) -> None:
        self.name, self.group, self.package, self.provider = f"{name}.yaml", group, package, module
        self._tree = functools.cache(lambda: _as_node(build()))

    @functools.cached_property
    def node(self) -> DictConfig:  # type: ignore[override]
        tree = self._tree()
        if "defaults" in tree:
            _rename_defaults(tree, self.provider)
        move_keys(tree)
        return tree


def register_experiment(name: str, build: Callable[[], Mapping[str, Any]] | Mapping[str, Any]) -> None:
    """Make ``experiment=name`` available: a function that returns its dictionary, called when it is chosen, or the
    dictionary. The same content again is harmless, other content is refused."""
    if not re.fullmatch(r"[\w.\-+]+", name):
        raise ConfigError(f"'{name}' cannot name an experiment: use letters, digits, '_', '-' and '.'.")
    module = sys._getframe(1).f_globals.get("__name__", "?")
    if _registered.get(name) == (build, module) and entry_of("experiment", name) is not None:
        return  # make_config() may register at each composition
    _add_experiment(name, build, module)
    _store("experiment", name, build, "_global_", module)


def register_group(group: str, nodes: Mapping[str, Any], package: str = "") -> None:
    """Make ``group=name`` available for each node, or function that returns one; what is chosen fills the key
    ``package``, by default ``group``."""
    module = sys._getframe(1).f_globals.get("__name__", "?")
    for name, node in nodes.items():
        _store(group, name, node, package or group, module)


def register_absent(explain: Callable[[str], str | None]) -> None:
    """Let a function explain names that are not registered, such as published ones; None: it knows nothing of one."""
    if explain not in _absent:
        _absent.append(explain)


def _store(group: str, name: str, node: Any, package: str, module: str) -> None:
    made = node if callable(node) else _as_node(node)  # now: whoever stored a dictionary may go on with it
    entry = Entry(group, name, package, module, made if callable(made) else lambda: made)
    ConfigStore.instance().repo.setdefault(group, {})[entry.name] = entry


def _as_node(node: Any) -> DictConfig:
    is_plain = isinstance(node, Mapping) and not isinstance(node, DictConfig)
    return DictConfig(dict(node), flags=dict(OBJECTS)) if is_plain else OmegaConf.structured(node)


def _add_experiment(name: str, node: Any, module: str, may_replace_own: bool = False) -> None:
    build = node if callable(node) else lambda: node
    if name in _registered and entry_of("experiment", name) is not None:
        first, other = _registered[name]
        if not (may_replace_own and other == module) and _content(_as_node(first())) != _content(_as_node(build())):
            raise ConfigError(f"Two experiments are called '{name}', from {other} and from {module}. Rename one.")
    _registered[name] = (build, module)


@contextlib.contextmanager
def forgiving_store() -> Iterator[None]:
    """Hydra's own ``store`` as published experiment files use it: a plain dictionary may hold classes and functions,
    and no file silently replaces what another file registered, unless it names itself as ``provider``.

    Compositions share the store: Hydra copies every entry at each one, which would build them all.
    """
    of_hydra = ConfigStore.store

    def store(self: ConfigStore, name: str, node: Any, group: str | None = None, *more: Any, **options: Any) -> None:
        if isinstance(node, dict):
            node = DictConfig(dict(node), flags=dict(OBJECTS))
        if not (more[1:] or options.get("provider")):
            options["provider"] = sys._getframe(1).f_globals.get("__name__", "?")
            name = _name_in_store(group, name.removesuffix(".yaml"), node, options["provider"])
        of_hydra(self, name, node, group, *more, **options)

    ConfigStore.store = store  # type: ignore[method-assign]
    ConfigStore.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    try:
        yield
    finally:
        ConfigStore.store = of_hydra  # type: ignore[method-assign]
        del ConfigStore.__deepcopy__  # type: ignore[attr-defined]


def _name_in_store(group: str | None, name: str, node: Any, module: str) -> str:
    """The name to store an entry under: its own, or one with the module where another file's other entry has it."""
    if group == "experiment":
        _add_experiment(name, node, module, may_replace_own=True)
    if group in (None, "experiment"):
        return name
    renamed = RENAMED.get(str(group), str(group))
    first = entry_of(renamed, name) or entry_of(str(group), name)
    if first is None or first.provider in (None, module):
        return name
    if _content(node if isinstance(node, DictConfig) else OmegaConf.structured(node)) == _content(first.node):
        return name
    own = f"{name}@{module}"
    if entry_of(renamed, own) is None and os.environ.get("RANK", "0") == "0":
        log.warning(
            "%s registers %s=%s, which %s has registered already. It is %s=%s here: only its own experiments take it.",
            *(module, renamed, name, first.provider, renamed, own),
        )
    return own


def _content(value: Any) -> str:
    """A text that is equal for equal nodes, also after their modules were loaded again."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_content(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_content(item) for item in value) + "]"
    return describe(value) if callable(value) else repr(value)


# --- what is there --------------------------------------------------------------------------------------------------


def _group(name: str) -> dict[str, Any]:
    node = ConfigStore.instance().repo.get(name.strip("/"))
    return node if isinstance(node, dict) else {}


def entry_of(group: str, name: str) -> ConfigNode | None:
    """The entry of Hydra's store under a name: the node, its package, and as its provider the module."""
    return _group(group).get(f"{name}.yaml")


def node_of(group: str, name: str) -> Any:
    """The node registered under a name, before it is composed; None where there is none."""
    return None if (entry := entry_of(group, name)) is None else entry.node


def groups() -> list[str]:
    """The groups that have entries, but for Hydra's own and the one that clears."""
    found = ConfigStore.instance().repo
    return [name for name, node in found.items() if isinstance(node, dict) and name not in ("hydra", "clear")]


def entries(group: str) -> list[str]:
    return sorted(name.removesuffix(".yaml") for name in _group(group))


def package_of(group: str) -> str:
    """The key that a group fills."""
    if group in LAZY_MEMBERS:
        return group
    packages = {entry.package for entry in _group(group).values()} - {None, "_global_", "_group_"}
    return min(packages, default=group)


def summary(name: str) -> str:
    """A line on an experiment, without composing it: the docstring of its file, its model, data and length."""
    entry = entry_of("experiment", name)
    module = sys.modules.get(str(entry.provider)) if entry is not None else None
    paragraph = " ".join((getattr(module, "__doc__", None) or "").partition("\n\n")[0].split())
    about = paragraph.partition(". ")[0].rstrip(".").replace("``", "")
    shown = ", ".join(f"{key}={value}" for key, value in _facts(name).items())
    return " ".join(part for part in (about, f"({shown})" if shown else "") if part)


def _facts(name: str) -> dict[str, Any]:
    """The model, data and length that an experiment names, or one that it starts from."""
    facts: dict[str, Any] = {}
    tree: Any = node_of("experiment", name) or DictConfig({})
    for item in tree.get("defaults") or ():
        if isinstance(item, str):
            facts |= _facts(item.rpartition("/")[2]) if item.startswith("/experiment/") else {}
        else:
            facts |= {key.split("/")[-1]: choice for key, choice in item.items()}
    for key, inner in (("model", "model._target_"), ("dataloader_train", "dataloader_train.dataset._target_")):
        if target := OmegaConf.select(tree, inner):
            facts[key] = describe(target).rpartition(".")[2]
    facts["trainer.max_iter"] = OmegaConf.select(tree, "trainer.max_iter") or facts.get("trainer.max_iter")
    return {key: facts[key] for key in ("model", "dataloader_train", "trainer.max_iter") if facts.get(key)}


def clears(name: str, group: str) -> bool:
    """True if an experiment, or one that it starts from, clears a group by ``/clear/GROUP`` in its defaults."""
    return f"/clear/{group}" in _defaults(name) or any(clears(parent, group) for parent in _parents(name))


def cleared_choice(name: str) -> tuple[str, str] | None:
    """(experiment, group) of an ``override /GROUP`` without effect, because a parent clears the group."""
    parents = _parents(name)
    for item in _defaults(name):
        for key, choice in item.items() if isinstance(item, dict) else ():
            group = str(key).removeprefix("override ").removeprefix("/")
            if choice is not None and any(clears(parent, group) for parent in parents):
                return name, group
    return next(filter(None, map(cleared_choice, parents)), None)


def _defaults(name: str) -> list[Any]:
    tree: Any = node_of("experiment", name) or {}
    return [dict(item) if isinstance(item, Mapping) else item for item in tree.get("defaults") or ()]


def _parents(name: str) -> list[str]:
    listed = [item for item in _defaults(name) if isinstance(item, str)]
    return [item.removeprefix("/experiment/") for item in listed if item.startswith("/experiment/")]


def table() -> str:
    """The registered experiments, a line for each file that registers some: the smallest, and how many more."""
    families: dict[str, list[str]] = {}
    for name in entries("experiment"):
        entry = entry_of("experiment", name)
        families.setdefault(str(entry.provider if entry else ""), []).append(name)
    rows = [sorted(names, key=lambda name: ("tiny" not in name, len(name))) for names in families.values()]
    lines = [f"\n  {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}" for names in rows]
    return "".join(sorted(lines)) or " none"


def unknown_entry(group: str, name: str) -> ConfigError:
    """The error for a choice that is not registered, with near names."""
    if why := next(filter(None, (explain(name) for explain in _absent)), None):
        return ConfigError(f"{group}={name}: {why}.")
    known = entries(group)
    holding = [other for other in known if len(name) > 2 and name.lower() in other.lower()]
    what = "No experiment is called" if group == "experiment" else f"The group '{group}' has no entry"
    text = f"{what} '{name}'.{near(name, holding or known, limit=5)}"
    if group == "experiment":
        text += " One of a file of yours: --config=FILE."
    if group == "experiment" and broken_modules:
        lines = "".join(f"\n  {module}: {cause[:300]}" for module, cause in broken_modules.items())
        text += f"\nThese modules did not import, it may be in one of them:{lines}"
    return ConfigError(text)


# --- before a composition -------------------------------------------------------------------------------------------


def prepare_store(root: Config) -> None:
    """Bring what was registered into one form: one name per data group, entries that clear, no group without entry."""
    store = ConfigStore.instance()
    for old, new in RENAMED.items():
        for name, entry in store.repo.pop(old, {}).items():
            entry.group = new
            entry.package = new if entry.package in (None, "_group_", old) else entry.package
            store.repo.setdefault(new, {}).setdefault(name, entry)
    for group in store.repo.values():
        for entry in group.values() if isinstance(group, dict) else ():
            if type(entry) is ConfigNode and isinstance(entry.node, DictConfig):
                move_keys(entry.node)
                if "defaults" in entry.node:
                    _rename_defaults(entry.node, entry.provider)
    for name in LAZY_MEMBERS:
        store.store(group="clear", package="_global_", name=name, node={name: None}, provider=__name__)
    store.store(group="clear", package="trainer", name="callbacks", node={"callbacks": None}, provider=__name__)
    listed = []
    for item in root.defaults:
        if isinstance(item, Mapping) and len(item) == 1:
            (group, choice), *_ = item.items()
            group = RENAMED.get(str(group), str(group))
            if choice is None and not entries(group):
                continue  # a group that has no entry would let any value through
            item = {group: choice}
        listed.append(item)
    root.defaults = listed


def _rename_defaults(node: DictConfig, module: str | None) -> None:
    found: Any = OmegaConf.to_container(raw(node, "defaults"), resolve=False)  # not all of the node: it is large
    defaults = [
        {_renamed(str(key)): _own_choice(_renamed(str(key)), name, module) for key, name in item.items()}
        if isinstance(item, dict)
        else _renamed(str(item))
        for item in found
    ]
    if defaults != found:
        with read_write(node):
            node["defaults"] = defaults


def _renamed(entry: str) -> str:
    """``override /data_val`` as ``override /dataloader_val``."""
    return re.sub(r"(^|[\s/])(data_train|data_val)(?=$|[\s/@])", lambda m: m.group(1) + RENAMED[m.group(2)], entry)


def _own_choice(key: str, choice: Any, module: str | None) -> Any:
    """A choice of a defaults list, ``override /group: choice``: the entry of its own file, where that has one."""
    if isinstance(choice, list):
        return [_own_choice(key, name, module) for name in choice]
    group = key.rsplit(maxsplit=1)[-1].partition("@")[0].strip("/")
    own = f"{choice}@{module}"
    return own if isinstance(choice, str) and entry_of(group, own) is not None else choice
