# SPDX-License-Identifier: Apache-2.0
"""Config files, and the experiments and entries of other groups that they register, in Hydra's store, one per process.

An entry keeps its name for the file that registered it first. Where a second file registers another entry of that name
(published experiment files bring data of their own), the experiments of that file take its entry, all others the first.
"""

import contextlib
import functools
import gc
import importlib
import importlib.util
import logging
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import Container, DictConfig, OmegaConf, read_write

from imaginaire.buildable import describe
from imaginaire.config.lazy_config import add_import_folder
from imaginaire.config.nodes import OBJECTS, everything, is_empty, move_keys, raw
from imaginaire.config.schema import LAZY_MEMBERS, Config
from imaginaire.errors import ConfigError, UserError, near, optional_module

log = logging.getLogger(__name__)

RENAMED = {"data_train": "dataloader_train", "data_val": "dataloader_val"}  # both spellings are in guides

# top-level packages of the optional extras, for the cure in a message
EXTRAS = {"megatron": "compat", "transformer_engine": "te", "flash_attn": "flash", "apex": "gpu"}
EXTRAS |= {"ray": "rl", "robosuite": "vla", "s3fs": "s3"}

HOME = Path(__file__).resolve().parents[2]  # of our packages

# Experiment modules that did not import, with the cause: named when an experiment cannot be found.
broken_modules: dict[str, str] = {}
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
    if _content(_as_node(node)) == _content(first.node):
        return name
    own = f"{name}@{module}"
    if entry_of(renamed, own) is None and os.environ.get("RANK", "0") == "0":
        log.warning(
            "%s registers %s=%s, which %s has registered already. It is %s=%s here: only its own experiments take it.",
            *(module, renamed, name, first.provider, renamed, own),
        )
    return own


def _content(node: DictConfig) -> list[tuple[str, str]]:
    """Keys and values that are equal for equal nodes, also after their modules were loaded again."""
    values = ((key, value) for key, value in everything(node) if not isinstance(value, Container) or is_empty(value))
    return [(key, describe(value) if callable(value) else repr(value)) for key, value in values]


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
    for child, defaults in reversed([*_ancestry(name)]):
        for item in defaults:
            facts |= {key.split("/")[-1]: choice for key, choice in item.items()} if isinstance(item, Mapping) else {}
        tree = node_of("experiment", child)
        for key, inner in (("model", "model._target_"), ("dataloader_train", "dataloader_train.dataset._target_")):
            if target := OmegaConf.select(tree, inner):
                facts[key] = describe(target).rpartition(".")[2]
        facts["trainer.max_iter"] = OmegaConf.select(tree, "trainer.max_iter") or facts.get("trainer.max_iter")
    return {key: facts[key] for key in ("model", "dataloader_train", "trainer.max_iter") if facts.get(key)}


def _ancestry(name: str) -> Iterator[tuple[str, Any]]:
    """(Name, defaults list) of an experiment, then of those that it starts from."""
    if (tree := node_of("experiment", name)) is not None:
        defaults = tree.get("defaults") or ()
        yield name, defaults
        for item in defaults:
            if isinstance(item, str) and item.startswith("/experiment/"):
                yield from _ancestry(item.removeprefix("/experiment/"))


def clears(name: str, group: str) -> bool:
    """True if an experiment, or one that it starts from, clears a group by ``/clear/GROUP`` in its defaults."""
    return any(f"/clear/{group}" in defaults for _, defaults in _ancestry(name))


def cleared_choice(name: str) -> tuple[str, str] | None:
    """(experiment, group) of an ``override /GROUP`` without effect, because a parent clears the group."""
    for child, defaults in _ancestry(name):
        above = [listed for _, listed in _ancestry(child)][1:]
        for key, choice in (pair for item in defaults if isinstance(item, Mapping) for pair in item.items()):
            group = str(key).removeprefix("override ").removeprefix("/")
            if choice is not None and any(f"/clear/{group}" in listed for listed in above):
                return child, group
    return None


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
    if "clear" not in store.repo:
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


# --- the Python files that make configurations, with one message for what is wrong with one


def find_config_file(path: str) -> Path:
    """The existing file that ``--config`` names: a Python file, or the config.yaml of a run. A relative path is below
    the working directory, else, as the default of programs is, below the folder that this package lies in."""
    file = Path(path).expanduser()
    if not file.exists() and (HOME / file).is_file():
        file = HOME / file
    if not file.is_file() or file.suffix not in (".py", ".yaml", ".yml"):
        folder = file if file.is_dir() else file.parent
        there = [str(found) for found in folder.glob("*") if found.suffix in (".py", ".yaml")]
        raise ConfigError(
            f"--config={path} is no Python file with make_config() and no config.yaml of a run (working directory"
            f" {Path.cwd()}).{near(str(file), there)}"
        )
    return file.absolute()


def load_toml(path: str) -> dict[str, Any]:
    """The content of the TOML file that a command was given."""
    toml = optional_module("tomllib" if sys.version_info >= (3, 11) else "tomli", "rl")
    try:
        return dict(toml.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}.") from error
    except (toml.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}.") from error


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """The garbage collector rests: it would look through what torch imported again and again, and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@no_collections()
def load_config(path: Path) -> Config:
    """The result of ``make_config()`` in this Python file; importing it registers groups and experiments."""
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    # A module that prints while it is imported must not write between the names that --list gives on stdout.
    with contextlib.redirect_stdout(sys.stderr):
        module = _import(path)
        make_config = getattr(module, "make_config", None)
        if not callable(make_config):
            raise ConfigError(f"{path} has no function make_config(), which must return the Config.")
        config = _run(make_config, f"make_config() of {path} failed")
    if not isinstance(config, Config):
        raise ConfigError(f"make_config() of {path} returned {config!r}, not an imaginaire.config.Config.")
    return config


def _import(path: Path) -> ModuleType:
    """The module of a file, by its dotted name below the working directory, or of our own; else by its stem, from its
    folder."""
    normal = Path(os.path.normpath(path))  # symbolic links stay: they may be how a folder came to lie here
    root = next((root for root in (Path.cwd(), HOME) if normal.is_relative_to(root)), None)
    parts = normal.relative_to(root).with_suffix("").parts if root else ()
    is_dotted = bool(parts) and all(part.isidentifier() for part in parts)
    if not is_dotted or (root != Path.cwd() and importlib.util.find_spec(parts[0]) is None):
        parts = (normal.stem,)
        if not normal.stem.isidentifier():
            raise ConfigError(f"{path}: '{path.name}' cannot be a module name. Rename the file, such as to config.py.")
        add_import_folder(normal.parent)
        importlib.invalidate_caches()
    name = ".".join(parts)
    module: ModuleType = _run(lambda: importlib.import_module(name), f"{path} does not import")
    file = getattr(module, "__file__", None)
    if file is None or Path(file).resolve() != normal.resolve():
        raise ConfigError(
            f"{path} would be the module '{name}', which is {file or 'a part of Python'} already. Rename the file, or"
            f" where {normal.parent} has no __init__.py add one."
        )
    return module


def _run(action: Callable[[], Any], failed: str) -> Any:
    """The action's result; whatever a user's file raises becomes one message with the place."""
    try:
        return action()
    except UserError as error:
        raise ConfigError(f"{failed}: {error}") from error
    except (Exception, SystemExit) as error:  # a border: the file may do anything
        raise ConfigError(f"{failed}: {explain(error)}") from error


def explain(error: BaseException) -> str:
    """Kind, text and file:line of an error in somebody's file, on one line, with the extra that would mend it."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = (str(Path(__file__).parent) + os.sep, os.path.dirname(os.__file__) + os.sep, "<frozen importlib")
    theirs = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(foreign)]
    place = f" ({theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
    cure = ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        extra = EXTRAS.get(error.name.split(".")[0])
        cure = f" Install it from the checkout: pip install -e '.[{extra}]'" if extra else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}{place}.{cure}"


def import_all_modules_from_package(
    package: str | ModuleType, reload: bool = False, skip_underscore: bool = True
) -> None:
    """Import every module below a package, so that what it registers is registered; plain sub-folders count, too.

    A module that does not import is one warning, is remembered in ``broken_modules``, and does not stop the others.
    """
    root = importlib.import_module(package) if isinstance(package, str) else package
    for short, is_package in _modules_in(root):
        if skip_underscore and short.startswith("_"):
            continue
        name = f"{root.__name__}.{short}"
        known = sys.modules.get(name)
        try:
            module = importlib.reload(known) if known is not None and reload else importlib.import_module(name)
        except Exception as error:  # a border: experiment files are the users' own
            cause = str(error) if isinstance(error, UserError) else explain(error)
            if broken_modules.get(name) != cause and os.environ.get("RANK", "0") == "0":
                log.warning("%s did not import, so its experiments are absent: %s", name, cause)
            broken_modules[name] = cause
            continue
        broken_modules.pop(name, None)
        if is_package:
            import_all_modules_from_package(module, reload, skip_underscore)


def _modules_in(package: ModuleType) -> list[tuple[str, bool]]:
    """(name, is it a package) of what lies in a package, with sub-folders that have Python files but no __init__.py."""
    found = {info.name: info.ispkg for info in pkgutil.iter_modules(package.__path__)}
    for folder in map(Path, package.__path__):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.is_dir() and path.name.isidentifier() and path.name != "__pycache__" and any(path.rglob("*.py")):
                found.setdefault(path.name, True)
    return sorted(found.items())
