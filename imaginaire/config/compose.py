# SPDX-License-Identifier: Apache-2.0
"""Composition of a config file and a command line to one frozen Config.

    make_config()  ->  groups and experiment (Hydra's defaults lists)  ->  dotted overrides  ->  checks  ->  frozen

Hydra merges the groups and the experiment. The overrides of single values are applied here, so that whatever a user can
get wrong becomes one ConfigError with the full key. ``--config=RUN/config.yaml`` takes a saved tree in place of
make_config() and accepts dotted overrides only.
"""

import difflib
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import attrs
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.utils import setup_globals
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from imaginaire.buildable import describe, takes, target_of
from imaginaire.config import nodes, registry
from imaginaire.config.lazy_config import load_yaml
from imaginaire.config.nodes import OBJECTS, join, typed_class
from imaginaire.config.registry import RENAMED, import_all_modules_from_package, register_experiment
from imaginaire.config.schema import LAZY_MEMBERS, Config, freeze
from imaginaire.errors import ConfigError, near
from imaginaire.renamed import KEYS

__all__ = [
    "compose",
    "experiment_names",
    "import_all_modules_from_package",
    "quoted",
    "register_experiment",
    "with_job_name",
]

log = logging.getLogger(__name__)

ROOT = "imaginaire_root"  # the name of the primary config in Hydra's store
FLAGS = ("--import", "--config", "--list", "--dryrun", "--debug", "--help", "-h")
WITH_VALUE = ("--import", "--config")
# What published commands remove, and is not there to be removed: loaders here have no such list.
ABSENT_ALREADY = ("dataloader_train.dataloaders", "dataloader_val.dataloaders")
_FIRST = re.compile(r"^([~+]*)/?(\w+)")  # sign and first name of an override
_QUOTING = (
    " A value with a comma, '=', '(', ')', '[', '{', '#', a leading '~' or a letter beyond ASCII needs quotes of"
    " its own inside the shell's: 'key=\"value\"'. A list is 'key=[a,b]'."
)


@registry.no_collections()
def compose(config_path: str, overrides: Sequence[str] = ()) -> Config:
    """The frozen, validated Config of a config file and an override list.

    Lazy members are read-only nodes. Each process resolves interpolations such as ``${now:...}`` for itself:
    use ``with_job_name`` to take over another's.
    """
    path = registry.find_config_file(config_path)
    with registry.forgiving_store():
        if path.suffix == ".py":
            root: Any = registry.load_config(path)
            registry.prepare_store(root)
            experiments = registry.entries("experiment")
            root = DictConfig(root, flags=dict(OBJECTS))
            OmegaConf.set_struct(root.trainer.grad_scaler_args, False)  # arguments: any name that GradScaler takes
        else:
            root, experiments = _load_saved(path, config_path), []
        items = [_parsed(text, experiments) for text in overrides]
        choices, cleared, others = _sort_overrides(items, root)
        tree = _merge_groups(root, choices)
    for item in sorted(others, key=Override.is_delete):
        (_remove if item.is_delete() else _set)(tree, item)
    for key in cleared:
        OmegaConf.update(tree, key, None, merge=False, force_add=True)
    _copy_context_parallel_size(tree)
    nodes.check_present(tree)
    nodes.resolve(tree)
    nodes.check_values(tree)
    composed: Config = nodes.to_object(tree, keep_nodes=True)
    composed.defaults = []
    nodes.check_sections(composed)
    return freeze(composed)


def with_job_name(config: Config, name: str) -> Config:
    """The same frozen configuration under another job name, such as the one that rank 0 resolved a time stamp to."""
    if name == config.job.name:
        return config
    return freeze(attrs.evolve(config, job=attrs.evolve(config.job, name=name)))


def experiment_names(config_path: str) -> list[str]:
    """The names that ``experiment=`` takes with this config file, sorted."""
    path = registry.find_config_file(config_path)
    if path.suffix != ".py":
        raise ConfigError(f"{config_path} is a saved configuration without experiments. Give a Python file.")
    with registry.forgiving_store():
        registry.load_config(path)
    return registry.entries("experiment")


def _load_saved(path: Path, shown: str) -> DictConfig:
    root = load_yaml(path, declared=Config)
    cls = typed_class(root)
    if not isinstance(root, DictConfig) or cls is None or not issubclass(cls, Config):
        raise ConfigError(f"{shown} is not a saved configuration: its top level must have the sections of a run.")
    root.defaults = ["_self_"]  # all groups are in the tree already
    return root


# --- the words of a command line --------------------------------------------------------------------------------------


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(flags, overrides) of a command line: cut at the first bare ``--``, else before the first word without a dash."""
    arguments = list(argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    first = 0
    while first < cut and arguments[first].startswith("-"):
        first += 2 if arguments[first] in WITH_VALUE else 1
    first = min(first, cut)
    overrides = arguments[first:cut] + arguments[cut + 1 :]
    for word in overrides:
        if word.startswith("-"):
            raise unknown_flag(word)
    return arguments[:first], overrides


def unknown_flag(word: str, overrides: Sequence[str] = ()) -> ConfigError:
    """The error for a word with a dash that is no flag, or not before the overrides."""
    name, _, value = word.lstrip("-").partition("=")
    if f"--{name}" in FLAGS:
        return ConfigError(f"{word} is a flag, but stands among the overrides. Flags come first: {word} -- key=VALUE.")
    if not value and overrides and "=" not in overrides[0]:
        value = overrides[0]
    hint = near(f"--{name}", FLAGS)
    if (value or name == "experiment") and "Did you mean" not in hint:
        hint = f" Overrides have no dashes and come after the flags: -- {name}={value or 'NAME'}"
    return ConfigError(f"unknown flag {word.partition('=')[0]}.{hint}")


def _parsed(text: str, experiments: Sequence[str]) -> Override:
    """An override, renamed where guides use another spelling; ConfigError for what cannot be read.

    ``experiments`` are the names that a word without a key may have been meant as.
    """
    if "=" not in text and not text.startswith("~"):
        close = difflib.get_close_matches(text, experiments, n=1)
        hint = f" Did you mean experiment={close[0]}?" if close else " Is a shell variable unset?"
        raise ConfigError(f"'{text}' is not an override: it must be key=value, +key=value or ~key.{hint}")
    try:
        text = _FIRST.sub(lambda m: m[1] + RENAMED.get(m[2], m[2]), text, count=1)
        override = _read(text)
        if (key := KEYS.get(override.key_or_group)) is not None:
            override = _read(text.replace(override.key_or_group, key, 1))
    except HydraException as error:
        reason = str(error).splitlines()[0].partition(" expecting ")[0]
        has_braces = re.search("{.*,.*}", text.partition("=")[0])
        hint = " Braces in a key are for the shell: leave out the quotes around them." if has_braces else _QUOTING
        raise ConfigError(f"The override {text} cannot be read ({reason}).{hint}") from error
    if override.is_sweep_override():
        raise ConfigError(f"The override {text} would mean several runs.{_QUOTING}")
    key = override.key_or_group
    if override.package is not None or key == "hydra" or override.is_hydra_override():
        raise ConfigError(f"The override {text} is for Hydra itself or gives a package with '@': leave it out.")
    if key == "experiment" and override.value() == "":
        raise ConfigError("experiment= is empty; is EXP set?")
    return override


@functools.lru_cache(maxsize=256)  # the grammar takes a millisecond for each
def _read(text: str) -> Override:
    return OverridesParser.create().parse_override(text)


def quoted(text: object) -> str:
    """A path or another text as the value of an override, or of a key in one: in quotes where it would else be read as
    something else, or not at all."""
    value = str(text)
    with suppress(HydraException):
        if _read(f"key={{of:{value}}}").value() == {"of": value}:
            return value
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + found[2].replace("'", "\\'"), value)
    return f"'{escaped}'"


# --- what each override does ----------------------------------------------------------------------------------------


def _sort_overrides(items: Sequence[Override], root: Any) -> tuple[dict[str, Override], list[str], list[Override]]:
    """(Choices of entries by group, keys that become null, overrides of values) among the items of an override list.

    A group that an item clears is cleared in the root's defaults list, too.
    """
    choices: dict[str, Override] = {}
    cleared, others = [], []
    listed = {_group(entry) for entry in root.defaults} - {""}
    for item in items:
        group, value = item.key_or_group, item.value()
        names = value if isinstance(value, list) else [value]
        if value is None and group in {*listed, *LAZY_MEMBERS} and not item.is_add():
            root.defaults = [{group: None} if _group(entry) == group else entry for entry in root.defaults]
            cleared += [registry.package_of(group)] if group != "experiment" else []
        elif group in listed and not isinstance(value, dict) and all(isinstance(name, str | int) for name in names):
            if item.is_add() or item.is_delete() or group in choices:
                raise ConfigError(f"{item.input_line}: '{group}' is a group. Choose once, with {group}=NAME.")
            for name in names:
                if registry.entry_of(group, str(name)) is None:
                    raise registry.unknown_entry(group, str(name))
            choices[group] = replace(item, type=OverrideType.CHANGE)  # where it had a ++
        else:
            others.append(item)
    experiment = str(choices["experiment"].value()) if "experiment" in choices else ""
    if group := next((group for group in choices if registry.clears(experiment, group)), ""):
        raise ConfigError(
            f"{choices[group].input_line}: experiment '{experiment}' clears this group (/clear/{group}) and has its own"
            f" {group}. Set single values of it, {group}.KEY=VALUE."
        )
    if found := registry.cleared_choice(experiment):
        child, group = found
        raise ConfigError(
            f"experiment={experiment}: '{child}' chooses 'override /{group}', which its parent clears (/clear/{group})."
            f" Give '{child}' a {group} of its own instead, below its defaults."
        )
    return choices, cleared, others


def _group(entry: Any) -> str:
    return str(next(iter(entry))) if isinstance(entry, Mapping) and entry else ""


def _merge_groups(root: DictConfig, choices: Mapping[str, Override]) -> DictConfig:
    """The tree of the config file, with the entries that its defaults list, the experiment and the choices name."""
    name = f"{ROOT}.yaml"  # set here, since `store` would copy the tree
    ConfigStore.instance().repo[name] = ConfigNode(name, root, group=None, package=None, provider=__name__)
    try:
        return _composed(list(choices.values()))
    except MissingConfigException as error:  # of the defaults list of a file or of an entry
        group, _, name = str(error.missing_cfg_file).strip("/").rpartition("/")
        raise registry.unknown_entry(group, name) from error
    except (HydraException, OmegaConfBaseException, ValueError, AttributeError) as error:  # the last: into a typed null
        place = f"experiment '{choices['experiment'].value()}': " if "experiment" in choices else ""
        cause: BaseException | None = error
        while cause is not None and not (isinstance(cause, OmegaConfBaseException) and cause.full_key):
            cause = cause.__cause__ or cause.__context__
        why = nodes.explained(cause) if isinstance(cause, OmegaConfBaseException) else str(error).splitlines()[0]
        raise ConfigError(f"{place}{why}") from error


def _composed(choices: list[Override]) -> DictConfig:
    """``hydra.compose`` without Hydra's own configuration, which needs twenty more entries, its search for plugins and
    for the file that called it: half of the time went there."""
    version.setbase(None)
    setup_globals()  # ${now:...}
    stored = ConfigRepository(ConfigSearchPathImpl())
    stored.sources = [StructuredConfigSource("schema", "structured://")]
    repository = CachingConfigRepository(stored)
    listed = create_defaults_list(repository, ROOT, choices, prepend_hydra=False, skip_missing=False)
    tree = ConfigLoaderImpl(ConfigSearchPathImpl())._compose_config_from_defaults_list(listed.defaults, repository)
    OmegaConf.set_struct(tree, True)
    return tree


def _set(tree: DictConfig, item: Override) -> None:
    """Set or add one value, as Hydra would."""
    key, is_there = item.key_or_group, item.type is OverrideType.CHANGE
    if is_there and (problem := _unknown_key(tree, key)):
        raise problem
    try:
        OmegaConf.update(tree, key, item.value(), merge=True, force_add=not is_there)
    except OmegaConfBaseException as error:
        raise nodes.explained(error) from error
    except (AttributeError, AssertionError, ValueError, IndexError) as error:  # into a typed null, or a place in a list
        why = f"{key} cannot be set here: {str(error).splitlines()[0]}. Give what holds it whole, in an experiment."
        raise _unknown_key(tree, key) or ConfigError(why) from error


def _remove(tree: DictConfig, item: Override) -> None:
    """Delete a key; Hydra itself cannot delete one whose value is null."""
    key = item.key_or_group
    where, _, name = key.rpartition(".")
    if problem := _unknown_key(tree, key):
        if key in ABSENT_ALREADY:
            log.info("~%s: there is none, so nothing is removed", key)
            return
        raise problem
    parent: Any = OmegaConf.select(tree, where) if where else tree
    if (cls := typed_class(parent)) is not None:
        usual = nodes.default_of(nodes.fields_of(cls)[name])
        shown = "" if nodes.is_config_class(type(usual)) or usual == "???" else f", its default is {usual}"
        raise ConfigError(f"~{key}: a field of {cls.__qualname__} cannot be removed. Set it: {key}=VALUE{shown}.")
    if item.value() not in (None, nodes.raw(parent, name)):
        raise ConfigError(f"{item.input_line}: the value is {nodes.raw(parent, name)}. Remove it by ~{key} alone.")
    with open_dict(parent):
        del parent[name]


def _unknown_key(tree: DictConfig, key: str) -> ConfigError | None:
    """The error for an override of a key that is not there; None where it is."""
    node: Any = tree
    where = ""
    for part in key.split("."):
        if not isinstance(node, DictConfig):
            names = "|".join(registry.entries(where)[:6]) or "an experiment that sets it"
            kind = f"null here: choose {where}={names}" if node is None else "a value, not a section"
            kind = "a list: give it whole" if isinstance(node, ListConfig) else kind
            return ConfigError(f"Unknown key {key}: {where} is {kind}.")
        if part not in map(str, node):
            return _unknown_name(tree, node, key, where, part)
        node, where = nodes.raw(node, part), join(where, part)
    return None


def _unknown_name(tree: DictConfig, node: DictConfig, key: str, where: str, part: str) -> ConfigError:
    """The error for a name that a section does not have: with near names, full keys that end so, or how to add it."""
    if not where and part in registry.groups():
        return ConfigError(f"{key}: '{part}' is a group, but this configuration does not list it. Set single values.")
    owner, known, is_open = where, [str(name) for name in node if not str(name).startswith("_")], True
    if (cls := typed_class(node)) is not None:
        owner, known, is_open = cls.__qualname__, [*nodes.fields_of(cls), *([] if where else registry.groups())], False
    elif "_target_" in node:
        target = target_of(node, where)
        taken, is_open = takes(target) if callable(target) else ([], True)
        owner, known = describe(target), [*known, *taken]
    cure = f" To add it write +{key}=VALUE." if is_open or part in known else ""
    if not where or "Did you mean" not in near(part, known):
        ends = (at for at, _ in nodes.everything(tree) if at.endswith(f".{part}"))
        found = sorted(ends, key=lambda at: at.count("."))
        if found:
            known, cure = [], f" Did you mean {' or '.join(found[:4])}?"
    return nodes.unknown(join(where, part), owner, known, cure)


def _copy_context_parallel_size(tree: DictConfig) -> None:
    """``model.context_parallel_size`` of older experiments is ``model_parallel.context_parallel_size``."""
    old, new = "model.context_parallel_size", "model_parallel.context_parallel_size"
    model = tree.model
    if not isinstance(model, DictConfig) or "context_parallel_size" not in model:
        return
    size, current = model["context_parallel_size"], tree.model_parallel.context_parallel_size
    target = target_of(model, "model")
    names, takes_any = takes(target) if callable(target) else ([], False)
    if "context_parallel_size" not in names and not takes_any:
        with open_dict(model):
            del model["context_parallel_size"]
    if size in (None, 1, current):
        return
    if not isinstance(size, int) or current != 1:
        raise ConfigError(f"{old}={size} is deprecated, and {new} is {current}. Keep the second alone.")
    log.warning("%s is deprecated: use %s=%d", old, new, size)
    tree.model_parallel.context_parallel_size = size
