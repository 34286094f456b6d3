# SPDX-License-Identifier: Apache-2.0
"""From a config file and a command line to one frozen Config.

    make_config()  ->  groups and experiment (Hydra's defaults lists)  ->  dotted overrides  ->  checks  ->  frozen

Hydra merges the groups and the experiment. The overrides of single values are applied here, so that whatever a user can
get wrong becomes one ConfigError with the full key. ``--config=RUN/config.yaml`` takes a saved tree in place of
make_config() and accepts dotted overrides only.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import attrs
import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from imaginaire.config.checks import (
    callbacks_are_no_value,
    check_sections,
    check_tree,
    check_values,
    resolve,
)
from imaginaire.config.files import find_config_file, import_all_modules_from_package, load_config
from imaginaire.config.internals import OBJECTS, raw, uncopied_store
from imaginaire.config.lazy_yaml import load_yaml
from imaginaire.config.messages import check_defaults, unknown_key
from imaginaire.config.names import parameters_of, takes, target_of
from imaginaire.config.overrides import ABSENT_ALREADY, Item, parse, split_arguments
from imaginaire.config.registry import (
    LAZY_MEMBERS,
    entries,
    forgiving_store,
    is_registered,
    node_of,
    package_of,
    parents,
    prepare_store,
    register_experiment,
    summary,
    unknown_entry,
)
from imaginaire.config.schema import Config, freeze
from imaginaire.config.typed_nodes import explain_value, fields_of, is_config_class, to_object, typed_class
from imaginaire.errors import ConfigError

__all__ = [
    "compose",
    "experiment_names",
    "import_all_modules_from_package",
    "register_experiment",
    "split_arguments",
    "summary",
    "with_job_name",
]

log = logging.getLogger(__name__)

ROOT = "imaginaire_root"  # the name of the primary config in Hydra's store


@dataclass
class _Sorted:
    """What the items of a command line do."""

    choices: dict[str, Item] = field(default_factory=dict)  # group -> the override that chooses its entries
    values: list[Item] = field(default_factory=list)  # overrides that set or add a value
    removed: list[Item] = field(default_factory=list)  # keys to delete
    cleared: list[str] = field(default_factory=list)  # keys to set to null


def compose(config_path: str, overrides: Sequence[str] = ()) -> Config:
    """The frozen, validated Config of a config file and an override list.

    Lazy members are read-only nodes. Each process resolves interpolations such as ``${now:...}`` for itself:
    use ``with_job_name`` to take over another's.
    """
    path = find_config_file(config_path)
    if path.suffix == ".py":
        with forgiving_store():
            config = load_config(path)
        prepare_store(config)
        found = _sort(parse(overrides, entries("experiment")), config)
        root = DictConfig(config, flags=dict(OBJECTS))
        OmegaConf.set_struct(root.trainer.grad_scaler_args, False)  # arguments: any name that GradScaler takes
    else:
        root = _load_saved(path, config_path)
        found = _sort(parse(overrides), root, config_path)
    tree = _merge_groups(root, found.choices)
    for item in found.values:
        _set(tree, item)
    for item in found.removed:
        _remove(tree, item)
    for key in found.cleared:
        OmegaConf.update(tree, key, None, merge=False, force_add=True)
    _copy_context_parallel_size(tree)
    check_tree(tree)
    resolve(tree)
    check_values(tree, LAZY_MEMBERS)
    composed: Config = to_object(tree, keep_nodes=True)
    composed.defaults = []
    check_sections(composed)
    freeze(composed)
    return composed


def with_job_name(config: Config, name: str) -> Config:
    """The same frozen configuration under another job name, such as the one that rank 0 resolved a time stamp to."""
    if name == config.job.name:
        return config
    members = {member: getattr(config, member) for member in fields_of(type(config))}
    renamed = type(config)(**{**members, "job": attrs.evolve(config.job, name=name)})
    freeze(renamed)
    return renamed


def experiment_names(config_path: str) -> list[str]:
    """The names that ``experiment=`` takes with this config file, sorted."""
    path = find_config_file(config_path)
    if path.suffix != ".py":
        raise ConfigError(
            f"{config_path} is a saved configuration of one run and lists no experiments. Give a Python file."
        )
    with forgiving_store():
        load_config(path)
    return entries("experiment")


def _load_saved(path: Path, shown: str) -> DictConfig:
    try:
        root = load_yaml(path, declared=Config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{shown}: {explain_value(error)}") from error
    cls = typed_class(root)
    if not isinstance(root, DictConfig) or cls is None or not issubclass(cls, Config):
        raise ConfigError(f"{shown} is not a saved configuration: its top level must have the sections of a run.")
    root.defaults = ["_self_"]  # all groups are in the tree already
    return root


# --- what each override does ----------------------------------------------------------------------------------------


def _sort(items: Sequence[Item], root: Any, saved: str = "") -> _Sorted:
    """The items by what they do, each group choice checked against what is registered.

    ``saved`` is the path of a saved configuration, which has no groups.
    """
    found = _Sorted()
    listed = {_group(item) for item in root.defaults} - {""}
    for item in items:
        if saved and item.key == "experiment":
            raise ConfigError(
                f"{item.text}: {saved} is a saved configuration, its experiment is composed already."
                " Leave experiment= out, or give a Python file as --config."
            )
        if item.removes and item.key in {*listed, *LAZY_MEMBERS}:
            root.defaults = [{item.key: None} if _group(entry) == item.key else entry for entry in root.defaults]
            if item.key != "experiment":
                found.cleared.append(item.key if saved else package_of(item.key))
        elif item.key in listed and item.is_choice:
            _check_choice(item, found.choices)
            found.choices[item.key] = item
        elif item.key in listed and not isinstance(item.value, (dict, list)):
            raise ConfigError(unknown_entry(item.key, str(item.value)))
        elif item.sign == "~":
            found.removed.append(item)
        else:
            if "." not in item.key and item.is_choice:
                _check_plain(item, root, saved)
            found.values.append(item)
    return found


def _group(entry: Any) -> str:
    return str(next(iter(entry))) if isinstance(entry, Mapping) and entry else ""


def _check_choice(item: Item, choices: Mapping[str, Item]) -> None:
    if item.sign not in ("", "++"):
        raise ConfigError(
            f"The override {item.text} has a '{item.sign}', but '{item.key}' is a group of the defaults list:"
            f" choose with {item.key}=NAME."
        )
    if item.key in choices:
        both = f"{choices[item.key].text} and {item.text}"
        raise ConfigError(f"'{item.key}' is chosen twice on the command line: {both}.")
    for name in item.value if isinstance(item.value, list) else [item.value]:
        if not is_registered(item.key, name):
            raise ConfigError(unknown_entry(item.key, name))


def _check_plain(item: Item, root: Any, saved: str) -> None:
    """``key=name`` without a dot, where no group of that name is listed, is a plain value of the root."""
    if item.key == "experiment" and not entries("experiment"):  # the group is listed only once it has entries
        raise ConfigError(unknown_entry("experiment", str(item.value)))
    known = fields_of(typed_class(root) or type(root)).get(item.key)
    is_section = item.key in LAZY_MEMBERS or (known is not None and is_config_class(known.type))
    if saved and (is_section or known is None):
        raise ConfigError(
            f"{item.text}: {saved} is a saved configuration and has no groups to choose from."
            f" Override single values, such as {item.key}.KEY=VALUE, or give a Python file as --config."
        )
    if entries(item.key):
        raise ConfigError(
            f"{item.text}: the group '{item.key}' has entries, but the defaults list of this config does not name it."
        )
    if is_section:
        first = next(iter(fields_of(known.type)), "NAME") if known and is_config_class(known.type) else "NAME"
        raise ConfigError(
            f"{item.text}: '{item.key}' is a section, and no group of that name has entries."
            f" Set its fields, for example {item.key}.{first}=..."
        )


# --- making the tree ------------------------------------------------------------------------------------------------


def _merge_groups(root: DictConfig, choices: Mapping[str, Item]) -> DictConfig:
    """The tree of the config file, with the entries that its defaults list, the experiment and the choices name."""
    defaults: Any = OmegaConf.to_container(root.defaults, resolve=False)
    listed = next((entry["experiment"] for entry in defaults if _group(entry) == "experiment"), None)
    experiment = choices["experiment"].value if "experiment" in choices else listed
    check_defaults(defaults, experiment, choices)
    ConfigStore.instance().store(name=ROOT, node=root)
    try:
        with hydra.initialize(config_path=None, version_base=None), uncopied_store():
            return hydra.compose(ROOT, overrides=[item.text.lstrip("+") for item in choices.values()])
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_why_not_merged(error, experiment)) from error
    except AttributeError as error:  # OmegaConf's own, for a mapping that is merged into a typed null
        if (found := re.search(r"full_key: (\S+)", str(error))) is None:
            raise
        raise ConfigError(_is_null(found[1])) from error


def _why_not_merged(error: BaseException, experiment: str | None) -> str:
    """The key and the experiment of an error that OmegaConf found while Hydra merged."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:  # of an entry's own defaults list
        group, _, name = error.missing_cfg_file.strip("/").rpartition("/")
        return unknown_entry(group, name)
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OmegaConfBaseException) and cause.full_key):
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, OmegaConfBaseException):
        return " ".join(str(error).split())[:1000]
    owners = [owner for owner, _ in (parents(experiment) if experiment else ()) if _has(owner, str(cause.full_key))]
    place = f"experiment '{owners[0]}': " if owners else ""
    return place + explain_value(cause)


def _has(experiment: str, key: str) -> bool:
    return isinstance(node := node_of("experiment", experiment), DictConfig) and unknown_key(node, key) is None


def _is_null(key: str) -> str:
    return (
        f"{key} is null here, and a mapping is merged into a section that is there. Fill it in an experiment of your"
        " own: the same key with dict(...), whole."
    )


def _set(tree: DictConfig, item: Item) -> None:
    """Set or add one value, as Hydra would."""
    key, value = item.key, item.value
    if item.sign == "" and (problem := unknown_key(tree, key)):
        raise ConfigError(problem)
    present = OmegaConf.select(tree, key, throw_on_missing=False)
    if item.sign == "+" and present is not None and not isinstance(value, (dict, list)):
        raise ConfigError(f"+{key} adds a key, but it exists already. Leave the '+' out: {key}=VALUE.")
    if isinstance(value, list) and isinstance(present, DictConfig):
        if key == "trainer.callbacks":
            raise ConfigError(callbacks_are_no_value(item.text.partition("=")[2]))
        raise ConfigError(f"{item.text} gives a list, but {key} is a section. Set its fields: {key}.NAME=VALUE.")
    try:
        OmegaConf.update(tree, key, value, merge=True, force_add=item.sign != "")
    except OmegaConfBaseException as error:
        raise ConfigError(explain_value(error)) from error
    except (AttributeError, AssertionError) as error:  # into a typed null
        raise ConfigError(_is_null(key)) from error
    except (ValueError, IndexError) as error:  # of the place in a list
        raise ConfigError(unknown_key(tree, key) or f"{key}: {error}") from error


def _remove(tree: DictConfig, item: Item) -> None:
    """Delete a key; Hydra itself cannot delete one whose value is null."""
    key = item.key
    where, _, name = key.rpartition(".")
    if problem := unknown_key(tree, key):
        if key in ABSENT_ALREADY:
            log.info("~%s: there is none, so nothing is removed", key)
            return
        raise ConfigError(f"~{key}: {problem}")
    parent: Any = OmegaConf.select(tree, where) if where else tree
    if (cls := typed_class(parent)) is not None:
        cure = f" Set it instead: {key}=VALUE." if where else ""
        raise ConfigError(f"~{key}: a field of {cls.__qualname__} cannot be removed.{cure}")
    if item.value is not None and item.value != raw(parent, name):
        raise ConfigError(f"{item.text}: {key} is {raw(parent, name)}, so it is not removed.")
    with open_dict(parent):
        del parent[name]


def _copy_context_parallel_size(tree: DictConfig) -> None:
    """``model.context_parallel_size`` of older experiments is ``model_parallel.context_parallel_size``."""
    old, new = "model.context_parallel_size", "model_parallel.context_parallel_size"
    model = tree.model
    if not isinstance(model, DictConfig) or "context_parallel_size" not in model:
        return
    size = model["context_parallel_size"]
    target = target_of(model, "model")
    names, takes_any = takes(parameters_of(target)) if callable(target) else ([], False)
    if "context_parallel_size" not in names and not takes_any:
        with open_dict(model):
            del model["context_parallel_size"]
    if size in (None, 1):
        return
    current = tree.model_parallel.context_parallel_size
    if current not in (1, size):
        raise ConfigError(
            f"{old}={size} and {new}={current} are both set. Keep the second alone; the first is deprecated."
        )
    if not isinstance(size, int) or isinstance(size, bool):
        raise ConfigError(f"{old}={size!r} must be a number. Set {new} in its place.")
    if current == 1:
        log.warning("%s is deprecated: use %s=%d", old, new, size)
    tree.model_parallel.context_parallel_size = size
