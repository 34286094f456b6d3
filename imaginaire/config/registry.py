# SPDX-License-Identifier: Apache-2.0
"""What config files register: experiments and the entries of the other groups, in Hydra's store, one per process.

An entry keeps its name for the file that registered it first. Where a second file registers another entry of that name
(published experiment files bring data of their own), the experiments of that file take its entry, all others the first.
"""

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, ListConfig, OmegaConf

from imaginaire.config.files import broken_modules, silent_modules
from imaginaire.config.names import describe
from imaginaire.config.overrides import RENAMED
from imaginaire.config.schema import Config
from imaginaire.config.typed_nodes import OBJECTS
from imaginaire.errors import ConfigError, near

log = logging.getLogger(__name__)

LAZY_MEMBERS = ("model", "optimizer", "scheduler", "dataloader_train", "dataloader_val")

_registered: dict[str, tuple[str, str]] = {}  # experiment name -> (content, module that registered it)
_absent: dict[str, str] = {}  # a word of names -> what they are of


def register_absent(words: Mapping[str, str]) -> None:
    """Names with one of these words are of something that exists elsewhere and is not here yet: whoever asks for one is
    told so, and no name of something else."""
    _absent.update(words)


def register_experiment(name: str, node: Mapping[str, Any]) -> None:
    """Make ``experiment=name`` known. The same content again is harmless, other content is refused."""
    if not name or not re.fullmatch(r"[\w.\-+]+", name):
        raise ConfigError(f"'{name}' cannot name an experiment: use letters, digits, '_', '-' and '.'.")
    if not isinstance(node, (Mapping, DictConfig)):
        raise ConfigError(f"Experiment '{name}' must be a dictionary, not {node!r}.")
    module = sys._getframe(1).f_globals.get("__name__", "?")
    _note(name, node, module)
    tree = node if isinstance(node, DictConfig) else DictConfig(dict(node), flags=dict(OBJECTS))
    ConfigStore.instance().store(group="experiment", package="_global_", name=name, node=tree, provider=module)


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


@contextlib.contextmanager
def forgiving_store() -> Iterator[None]:
    """Hydra's own ``store`` as experiment files in the wild use it: a plain dictionary may hold classes and functions,
    and nothing takes the place of what another file registered without a word."""
    of_hydra = ConfigStore.store

    def store(
        self: ConfigStore,
        name: str,
        node: Any,
        group: str | None = None,
        package: str | None = None,
        provider: str | None = None,
    ) -> None:
        if isinstance(node, dict):
            node = DictConfig(dict(node), flags=dict(OBJECTS))
        module = provider or sys._getframe(1).f_globals.get("__name__", "?")
        if group == "experiment" and provider is None:  # register_experiment has looked already
            _note(name.removesuffix(".yaml"), node, module, may_replace_own=True)
        elif group not in (None, "experiment"):
            name = _own_name(str(group), name.removesuffix(".yaml"), node, module)
        of_hydra(self, name, node, group, package, module)

    ConfigStore.store = store  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigStore.store = of_hydra  # type: ignore[method-assign]


def _own_name(group: str, name: str, node: Any, module: str) -> str:
    """The name to store an entry under: its own, or one with the module where another file's other entry has it."""
    first = _entry(RENAMED.get(group, group), name) or _entry(group, name)
    if first is None or first.provider in (None, module):
        return name
    tree = node if isinstance(node, DictConfig) else OmegaConf.structured(node)
    if _content(tree) == _content(first.node):
        return name
    own = f"{name}@{module}"
    group = RENAMED.get(group, group)
    if _entry(group, own) is None and os.environ.get("RANK", "0") == "0":
        log.warning(
            "%s registers %s=%s, but %s has registered another entry of that name, which stays. The experiments of"
            " %s that choose it take their file's own, called %s=%s on the command line.",
            *(_file(module), group, name, _file(str(first.provider)), _file(module), group, own),
        )
    return own


def node_of(group: str, name: str) -> Any:
    """What is registered under a name, before it is composed; None where nothing is."""
    return None if (entry := _entry(group, name)) is None else entry.node


def _entry(group: str, name: str) -> ConfigNode | None:
    node: Any = ConfigStore.instance().repo
    for part in (*group.strip("/").split("/"), f"{name}.yaml"):
        node = node.get(part) if isinstance(node, dict) else None
    return node if isinstance(node, ConfigNode) else None


def _file(module: str) -> str:
    """Where a module lies, relative to the working directory if it is inside."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module
    return os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else str(file)


@contextlib.contextmanager
def uncopied_store() -> Iterator[None]:
    """Hydra's store, shared with each composition: else Hydra copies every entry first, and what it loads once more."""
    store = ConfigStore.instance()
    store.__deepcopy__ = lambda memo: store  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del store.__deepcopy__  # type: ignore[attr-defined]


def _content(value: Any) -> str:
    """A text that is equal for equal nodes, also after their modules were loaded again."""
    if isinstance(value, (DictConfig, ListConfig)):
        value = OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_content(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_content(item) for item in value) + "]"
    return describe(value) if callable(value) else repr(value)


def groups() -> list[str]:
    return [name for name, node in ConfigStore.instance().repo.items() if isinstance(node, dict)]


def entries(group: str) -> list[str]:
    node: Any = ConfigStore.instance().repo
    for part in group.strip("/").split("/"):
        node = node.get(part) if isinstance(node, dict) else None
    return sorted(name.removesuffix(".yaml") for name in node) if isinstance(node, dict) else []


def summary(name: str) -> str:
    """A line on an experiment, without composing it: what its file says of itself, its model, data and length."""
    entry = _entry("experiment", name)
    module = sys.modules.get(str(entry.provider)) if entry is not None else None
    paragraph = " ".join((getattr(module, "__doc__", None) or "").partition("\n\n")[0].split())
    about = paragraph.partition(". ")[0].rstrip(".").replace("``", "")
    facts = ", ".join(f"{key}={value}" for key, value in _facts(name).items())
    return " ".join(part for part in (about, f"({facts})" if facts else "") if part)


def _facts(name: str) -> dict[str, Any]:
    """Model, data and number of iterations of an experiment, its own or those of the one that it starts from."""
    facts: dict[str, Any] = {}
    entry = _entry("experiment", name)
    tree = entry.node if entry is not None else None
    if not isinstance(tree, DictConfig):
        return facts
    defaults: Any = OmegaConf.to_container(tree._get_node("defaults") or ListConfig([]), resolve=False)  # type: ignore[arg-type]
    for item in defaults:
        group, choice = next(iter(item.items())) if isinstance(item, dict) else str(item).rpartition("/")[::2]
        group = _renamed(str(group)).removeprefix("override ").strip("/")
        if group == "experiment" or (not group and is_registered("experiment", str(choice))):
            facts |= _facts(str(choice))
        elif group in ("model", "dataloader_train"):
            facts[group] = choice
    for key, inner in (("model", "model._target_"), ("dataloader_train", "dataloader_train.dataset._target_")):
        if target := OmegaConf.select(tree, inner):
            facts[key] = describe(target).rpartition(".")[2]
    if iterations := OmegaConf.select(tree, "trainer.max_iter"):
        facts["trainer.max_iter"] = iterations
    return facts


def is_registered(group: str, name: str) -> bool:
    return name in entries(group)


def package_of(group: str) -> str:
    """The key that a group fills."""
    if group in LAZY_MEMBERS:
        return group
    node: Any = ConfigStore.instance().repo.get(group, {})
    packages = {entry.package for entry in node.values() if isinstance(entry, ConfigNode)}
    named = sorted(package for package in packages if package not in (None, "_global_", "_group_"))
    return named[0] if named else group


def unknown_entry(group: str, name: str) -> str:
    for word, what in _absent.items():
        if word in name.lower() and not any(word in other.lower() for other in entries(group)):
            return f"{group}={name} is not yet here: this version has no {what} models."
    if group != "experiment":
        return f"The group '{group}' has no entry '{name}'.{near(name, entries(group))}"
    text = f"No experiment is called '{name}'.{_near_experiment(name, entries(group))}"
    if broken_modules:
        shown = [f"{module}: {_short(cause)}" for module, cause in broken_modules.items()]
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


def _short(text: str, limit: int = 300) -> str:
    return text if len(text) <= limit else text[:limit] + " ..."


def prepare_store(root: Config) -> None:
    """Bring what was registered into one form: one name per data group, entries that clear, no group without entry."""
    repo: dict[str, Any] = ConfigStore.instance().repo
    for old, new in RENAMED.items():
        for entry, node in (repo.pop(old, None) or {}).items():
            package = new if node.package in (None, "_group_", old) else node.package
            kept = ConfigNode(name=entry, node=node.node, group=new, package=package, provider=node.provider)
            repo.setdefault(new, {}).setdefault(entry, kept)
    for group_entries in repo.values():
        for entry in group_entries.values() if isinstance(group_entries, dict) else ():
            if isinstance(entry, ConfigNode) and isinstance(entry.node, DictConfig) and "defaults" in entry.node:
                _rename_defaults(entry.node, entry.provider)
    clear: dict[str, Any] = {name: {name: None} for name in LAZY_MEMBERS}
    clear["callbacks"] = {"trainer": {"callbacks": None}}
    for name, node in clear.items():
        ConfigStore.instance().store(group="clear", package="_global_", name=name, node=node)
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
    found: list[Any] = OmegaConf.to_container(node._get_node("defaults"), resolve=False)  # type: ignore[arg-type,assignment]
    defaults = [_renamed(item) if isinstance(item, str) else item for item in found]
    defaults = [
        {_renamed(str(k)): _own_choice(_renamed(str(k)), v, module) for k, v in i.items()} if isinstance(i, dict) else i
        for i in defaults
    ]
    if defaults != found:
        was_readonly, node._metadata.flags = node._metadata.flags, {**(node._metadata.flags or {}), "readonly": False}
        node["defaults"] = defaults
        node._metadata.flags = was_readonly


def _renamed(entry: str) -> str:
    """``override /data_val`` as ``override /dataloader_val``."""
    return re.sub(r"(^|[\s/])(data_train|data_val)(?=$|[\s/@])", lambda m: m.group(1) + RENAMED[m.group(2)], entry)


def _own_choice(key: str, choice: Any, module: str | None) -> Any:
    """A choice of a defaults list, ``override /group: choice``: the entry of its own file, where that has one."""
    if isinstance(choice, list):
        return [_own_choice(key, name, module) for name in choice]
    group = key.rsplit(maxsplit=1)[-1].partition("@")[0].strip("/")
    own = f"{choice}@{module}"
    return own if isinstance(choice, str) and _entry(group, own) is not None else choice
