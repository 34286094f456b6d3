# SPDX-License-Identifier: Apache-2.0
"""What config files register: experiments and the entries of the other groups, in Hydra's store, one per process.

An entry keeps its name for the file that registered it first. Where a second file registers another entry of that name
(published experiment files bring data of their own), the experiments of that file take its entry, all others the first.
"""

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf, read_write

from imaginaire.config.files import broken_modules, silent_modules
from imaginaire.config.internals import OBJECTS, patched_store
from imaginaire.config.names import describe
from imaginaire.config.overrides import RENAMED
from imaginaire.config.schema import Config
from imaginaire.errors import ConfigError, near

log = logging.getLogger(__name__)

LAZY_MEMBERS = ("model", "optimizer", "scheduler", "dataloader_train", "dataloader_val")

_registered: dict[str, tuple[str, str]] = {}  # experiment name -> (content, module that registered it)
_absent: dict[str, str] = {}  # a word of names -> what they are of


def register_absent(words: Mapping[str, str]) -> None:
    """Names with one of these words belong to something that exists elsewhere and is not here yet: the message for such
    a name reports that, and proposes no other name."""
    _absent.update(words)


def register_experiment(name: str, node: Mapping[str, Any]) -> None:
    """Make ``experiment=name`` available. The same content again is harmless, other content is refused."""
    if not name or not re.fullmatch(r"[\w.\-+]+", name):
        raise ConfigError(f"'{name}' cannot name an experiment: use letters, digits, '_', '-' and '.'.")
    if not isinstance(node, (Mapping, DictConfig)):
        raise ConfigError(f"Experiment '{name}' must be a dictionary, not {node!r}.")
    module = sys._getframe(1).f_globals.get("__name__", "?")
    _note(name, node, module)
    tree = node if isinstance(node, DictConfig) else DictConfig(dict(node), flags=dict(OBJECTS))
    ConfigStore.instance().store(group="experiment", package="_global_", name=name, node=tree, provider=module)


def register_group(group: str, nodes: Mapping[str, Any], package: str = "") -> None:
    """Make ``group=name`` available for each node; what is chosen fills the key ``package``, by default ``group``."""
    module = sys._getframe(1).f_globals.get("__name__", "?")
    for name, node in nodes.items():
        tree = DictConfig(dict(node), flags=dict(OBJECTS)) if isinstance(node, dict) else node
        ConfigStore.instance().store(group=group, package=package or group, name=name, node=tree, provider=module)


def _note(name: str, node: Any, module: str, may_replace_own: bool = False) -> None:
    content = _content(node)
    if name in _registered and _registered[name][0] != content and is_registered("experiment", name):
        other = _registered[name][1]
        if not (may_replace_own and other == module):
            raise ConfigError(
                f"Two experiments are called '{name}', with different content: from {other} and from {module}."
                " Rename one."
            )
    _registered[name] = (content, module)


def forgiving_store() -> AbstractContextManager[None]:
    """Hydra's own ``store`` as published experiment files use it: a plain dictionary may hold classes and functions,
    and no file silently replaces what another file registered."""
    return patched_store(_enter)


def _enter(group: str | None, name: str, node: Any, module: str) -> str:
    """The name to store an entry under: its own, or one with the module where another file's other entry has it."""
    if group == "experiment":
        _note(name, node, module, may_replace_own=True)
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
            "%s registers %s=%s, but %s has registered another entry of that name, which stays. The experiments of"
            " %s that choose it take their file's own, called %s=%s on the command line.",
            *(_file(module), renamed, name, _file(str(first.provider)), _file(module), renamed, own),
        )
    return own


def _file(module: str) -> str:
    """Where a module lies, relative to the working directory if it is inside."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module
    return os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else str(file)


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
    node: Any = ConfigStore.instance().repo
    for part in name.strip("/").split("/"):
        node = node.get(part) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def entry_of(group: str, name: str) -> ConfigNode | None:
    """What Hydra's store holds under a name: the node, its package, and as its provider the module."""
    node = _group(group).get(f"{name}.yaml")
    return node if isinstance(node, ConfigNode) else None


def node_of(group: str, name: str) -> Any:
    """What is registered under a name, before it is composed; None where nothing is."""
    return None if (entry := entry_of(group, name)) is None else entry.node


def groups() -> list[str]:
    return [name for name, node in ConfigStore.instance().repo.items() if isinstance(node, dict)]


def entries(group: str) -> list[str]:
    return sorted(name.removesuffix(".yaml") for name in _group(group))


def is_registered(group: str, name: str) -> bool:
    return name in entries(group)


def package_of(group: str) -> str:
    """The key that a group fills."""
    if group in LAZY_MEMBERS:
        return group
    packages = {entry.package for entry in _group(group).values() if isinstance(entry, ConfigNode)}
    named = sorted(package for package in packages if package not in (None, "_global_", "_group_"))
    return named[0] if named else group


class Choice(NamedTuple):
    """An item of a defaults list, such as ``{"override /group": name}`` or ``/group/name``."""

    group: str
    names: list[Any]
    is_override: bool


def choices(defaults: Any, within: str = "") -> Iterator[Choice]:
    """The items of a defaults list that stands in the group ``within``, but for those that only Hydra understands."""
    listed = OmegaConf.to_container(defaults, resolve=False) if OmegaConf.is_config(defaults) else defaults
    for item in listed or ():
        key, names = next(iter(item.items())) if isinstance(item, Mapping) and item else str(item).rpartition("/")[::2]
        if item == "_self_" or "@" in str(key) or str(key).startswith("optional "):
            continue
        path = _renamed(str(key)).removeprefix("override ").strip()
        group = path.strip("/") if path.startswith("/") or item == f"/{names}" else f"{within}/{path}".strip("/")
        yield Choice(group, names if isinstance(names, list) else [names], str(key).startswith("override "))


def parents(name: str) -> Iterator[tuple[str, list[Choice]]]:
    """An experiment and those that it starts from, the first of all first, each with its defaults list."""
    tree = node_of("experiment", name)
    own = list(choices(tree.get("defaults"), "experiment")) if isinstance(tree, DictConfig) else []
    for choice in own:
        for parent in choice.names if choice.group == "experiment" else ():
            yield from parents(str(parent))
    yield name, own


# --- messages -------------------------------------------------------------------------------------------------------


def summary(name: str) -> str:
    """A line on an experiment, without composing it: the docstring of its file, its model, data and length."""
    entry = entry_of("experiment", name)
    module = sys.modules.get(str(entry.provider)) if entry is not None else None
    paragraph = " ".join((getattr(module, "__doc__", None) or "").partition("\n\n")[0].split())
    about = paragraph.partition(". ")[0].rstrip(".").replace("``", "")
    facts: dict[str, Any] = {}
    for parent, own in parents(name):
        facts |= {c.group: c.names[0] for c in own if c.group in ("model", "dataloader_train")}
        tree = node_of("experiment", parent)
        for key, inner in (("model", "model._target_"), ("dataloader_train", "dataloader_train.dataset._target_")):
            if isinstance(tree, DictConfig) and (target := OmegaConf.select(tree, inner)):
                facts[key] = describe(target).rpartition(".")[2]
        if isinstance(tree, DictConfig) and (iterations := OmegaConf.select(tree, "trainer.max_iter")):
            facts["trainer.max_iter"] = iterations
    shown = ", ".join(f"{key}={value}" for key, value in facts.items())
    return " ".join(part for part in (about, f"({shown})" if shown else "") if part)


def table() -> str:
    """The registered experiments, a line for each file that registers some: the smallest, and how many more."""
    families: dict[str, list[str]] = {}
    for name in entries("experiment"):
        entry = entry_of("experiment", name)
        families.setdefault(str(entry.provider if entry else ""), []).append(name)
    rows = [sorted(names, key=lambda name: ("tiny" not in name, len(name))) for names in families.values()]
    lines = [f"\n  {names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}" for names in rows]
    return "".join(sorted(lines)) or " none"


def unknown_entry(group: str, name: str) -> str:
    for word, what in _absent.items():
        if word in name.lower() and not any(word in other.lower() for other in entries(group)):
            return f"{group}={name} is not yet here: this version has no {what} models."
    if group != "experiment":
        return f"The group '{group}' has no entry '{name}'.{near(name, entries(group))}"
    text = f"No experiment is called '{name}'.{_near_experiment(name, entries(group))}"
    if broken_modules:
        shown = [f"{module}: {cause[:300]}" for module, cause in broken_modules.items()]
        text += f"\nThese modules did not import, it may be in one of them:{_lines(shown)}"
    if silent_modules:
        text += f"\nThese files of the experiment folder register nothing:{_lines(sorted(silent_modules.values()))}"
    return text


def _near_experiment(name: str, known: list[str]) -> str:
    """Close names, those that hold the asked one, or a few: there are many, and they are long."""
    if holding := [other for other in known if len(name) > 2 and name.lower() in other.lower()]:
        return near(name, holding, limit=5)
    hint = near(name, known, limit=3)
    if hint.endswith(" more."):
        return f"{hint} (python -m scripts.train --list prints all.)"
    return hint or " None is registered."


def _lines(items: list[str], limit: int = 8) -> str:
    more = f"\n  and {len(items) - limit} more" if len(items) > limit else ""
    return "".join(f"\n  {item}" for item in items[:limit]) + more


# --- before a composition -------------------------------------------------------------------------------------------


def prepare_store(root: Config) -> None:
    """Bring what was registered into one form: one name per data group, entries that clear, no group without entry."""
    store = ConfigStore.instance()
    for old, new in RENAMED.items():
        for name, entry in store.repo.pop(old, {}).items():
            package = new if entry.package in (None, "_group_", old) else entry.package
            kept = ConfigNode(name=name, node=entry.node, group=new, package=package, provider=entry.provider)
            store.repo.setdefault(new, {}).setdefault(name, kept)
    for group in store.repo.values():
        for entry in group.values() if isinstance(group, dict) else ():
            if isinstance(entry, ConfigNode) and isinstance(entry.node, DictConfig) and "defaults" in entry.node:
                _rename_defaults(entry.node, entry.provider)
    for name in LAZY_MEMBERS:
        store.store(group="clear", package="_global_", name=name, node={name: None})
    store.store(group="clear", package="_global_", name="callbacks", node={"trainer": {"callbacks": None}})
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
    found: list[Any] = OmegaConf.to_container(node, resolve=False)["defaults"]  # type: ignore[call-overload,index,assignment]
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
