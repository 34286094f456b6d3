# SPDX-License-Identifier: Apache-2.0
"""From a config file and a command line to one frozen Config.

    make_config()  ->  groups and experiment (Hydra's defaults lists)  ->  dotted overrides  ->  checks  ->  frozen

Hydra composes. Whatever a user can get wrong becomes one ConfigError with the full key (``compose_errors``).
``--config=RUN/config.yaml`` takes a saved tree in place of make_config() and knows dotted overrides only.
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

from imaginaire.config import checks as config_checks
from imaginaire.config.compose_errors import ROOT, explain, explain_missing_entry, unknown_key
from imaginaire.config.files import find_config_file, import_all_modules_from_package, load_config
from imaginaire.config.lazy_config import signature
from imaginaire.config.lazy_yaml import load_yaml
from imaginaire.config.names import target_of
from imaginaire.config.overrides import ABSENT_ALREADY, Item, parse, split_arguments
from imaginaire.config.registry import (
    LAZY_MEMBERS,
    entries,
    forgiving_store,
    is_registered,
    package_of,
    prepare_store,
    register_experiment,
    summary,
    uncopied_store,
    unknown_entry,
)
from imaginaire.config.schema import Config, freeze
from imaginaire.config.typed_nodes import OBJECTS, explain_value, fields_of, is_config_class, typed_class
from imaginaire.errors import ConfigError, near

__all__ = [
    "compose",
    "experiment_names",
    "experiment_names_registered",
    "import_all_modules_from_package",
    "register_experiment",
    "split_arguments",
    "summary",
    "with_job_name",
]

log = logging.getLogger(__name__)


@dataclass
class _Sorted:
    """What the items of a command line do."""

    choices: dict[str, str] = field(default_factory=dict)  # group -> the override that chooses its entries
    values: list[str] = field(default_factory=list)  # overrides that set or add a value
    removed: list[str] = field(default_factory=list)  # dotted keys to delete
    cleared: list[str] = field(default_factory=list)  # keys to set to null


def compose(config_path: str, overrides: Sequence[str] = ()) -> Config:
    """The frozen, validated Config of a config file and an override list.

    Lazy members are read-only nodes. Each process resolves interpolations such as ``${now:...}`` for itself:
    use ``with_job_name`` to take over another's.
    """
    path = find_config_file(config_path)
    items = parse(overrides)
    if path.suffix == ".py":
        with forgiving_store():
            config = load_config(path)
        prepare_store(config)
        found = _sort(items, config)
        root = DictConfig(config, flags=dict(OBJECTS))
        OmegaConf.set_struct(root.trainer.grad_scaler_args, False)  # arguments: any name that GradScaler takes
    else:
        root = _load_saved(path, config_path)
        found = _sort_saved(items, root, config_path)
    ConfigStore.instance().store(name=ROOT, node=root)
    hydras = [*found.choices.values(), *found.values]
    tree = _compose(hydras)
    for key in found.removed:
        _remove(tree, key, hydras)
    for key in found.cleared:
        OmegaConf.update(tree, key, None, merge=False, force_add=True)
    _copy_context_parallel_size(tree)
    config_checks.check_known(tree)
    config_checks.check_missing(tree)
    config_checks.resolve(tree)
    config_checks.check_lazy(tree, LAZY_MEMBERS)
    config_checks.check_targets(tree)
    config_checks.check_numbers(tree, LAZY_MEMBERS)
    composed = config_checks.to_config(tree)
    freeze(composed)
    return composed


def with_job_name(config: Config, name: str) -> Config:
    """The same frozen configuration under another job name, such as the one that rank 0 resolved a time stamp to."""
    if name == config.job.name:
        return config
    members = {member: getattr(config, member) for member in fields_of(type(config))}
    members["job"] = attrs.evolve(config.job, name=name)
    renamed = type(config)(**members)
    freeze(renamed)
    return renamed


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


def _sort(items: Sequence[Item], root: Config) -> _Sorted:
    """The items by what they do, each group choice checked against what is registered."""
    found = _Sorted()
    listed = {str(name): choice for item in root.defaults if isinstance(item, Mapping) for name, choice in item.items()}
    for item in items:
        is_group = item.key in listed or item.key in LAZY_MEMBERS
        if is_group and item.removes:
            root.defaults = [{item.key: None} if _group(entry) == item.key else entry for entry in root.defaults]
            if item.key != "experiment":
                found.cleared.append(package_of(item.key))
        elif item.key in listed and item.is_choice:
            _check_choice(item, found.choices)
            found.choices[item.key] = item.text.lstrip("+")
        elif item.key in listed and not isinstance(item.value, (dict, list)):
            raise ConfigError(unknown_entry(item.key, str(item.value)))
        elif item.sign == "~" and item.removes:
            found.removed.append(item.key)
        else:
            if "." not in item.key and item.is_choice and item.sign != "~":
                _refuse_unlisted(item, root, listed)
            found.values.append(item.text)
    return found


def _group(entry: Any) -> str:
    return str(next(iter(entry))) if isinstance(entry, Mapping) and entry else ""


def _check_choice(item: Item, choices: Mapping[str, str]) -> None:
    if item.sign not in ("", "++"):
        raise ConfigError(
            f"The override {item.text} has a '{item.sign}', but '{item.key}' is a group of the defaults list:"
            f" choose with {item.key}=NAME."
        )
    if item.key in choices:
        raise ConfigError(f"'{item.key}' is chosen twice on the command line: {choices[item.key]} and {item.text}.")
    for name in item.value if isinstance(item.value, list) else [item.value]:
        if not is_registered(item.key, name):
            raise ConfigError(unknown_entry(item.key, name))


def _refuse_unlisted(item: Item, root: Config, listed: Mapping[str, Any]) -> None:
    """``key=name`` without a dot is meant as a group's choice: say which groups there are."""
    if item.key == "experiment" and not entries("experiment"):  # the group is listed only once it has entries
        raise ConfigError(unknown_entry("experiment", str(item.value)))
    fields = fields_of(type(root))
    if item.key in fields and not is_config_class(fields[item.key].type) and item.key not in LAZY_MEMBERS:
        return  # a plain value at the top level
    if item.key in fields:
        section = fields[item.key].type
        inside = (
            f" Set its fields, for example {item.key}.{next(iter(fields_of(section)))}=..."
            if is_config_class(section)
            else ""
        )
        raise ConfigError(f"{item.text}: '{item.key}' is a section, and no group of that name has entries.{inside}")
    if entries(item.key):
        raise ConfigError(
            f"{item.text}: the group '{item.key}' has entries, but the defaults list of this config does not name it."
        )
    raise ConfigError(f"Unknown key or group '{item.key}' in {item.text}.{near(item.key, [*listed, *fields])}")


def _sort_saved(items: Sequence[Item], root: DictConfig, shown: str) -> _Sorted:
    """The items by what they do to a saved configuration, which has no groups."""
    found = _Sorted()
    cls = typed_class(root)
    assert cls is not None
    for item in items:
        if item.key == "experiment":
            raise ConfigError(
                f"{item.text}: {shown} is a saved configuration, its experiment is composed already."
                " Leave experiment= out, or give a Python file as --config."
            )
        known = fields_of(cls).get(item.key)
        is_plain_value = known is not None and item.key not in LAZY_MEMBERS and not is_config_class(known.type)
        if item.removes and item.key in LAZY_MEMBERS:
            found.cleared.append(item.key)
        elif item.removes and item.sign == "~":
            found.removed.append(item.key)
        elif "." not in item.key and item.is_choice and not is_plain_value:
            raise ConfigError(
                f"{item.text}: {shown} is a saved configuration and has no groups to choose from."
                f" Override single values, such as {item.key}.KEY=VALUE, or give a Python file as --config."
            )
        else:
            found.values.append(item.text)
    return found


def _remove(tree: DictConfig, key: str, overrides: Sequence[str]) -> None:
    """Delete a dotted key; Hydra itself cannot delete one whose value is null."""
    *where, name = key.split(".")
    parent: Any = tree
    for part in where:
        parent = parent._get_node(part) if isinstance(parent, DictConfig) and part in parent else None
    if not isinstance(parent, DictConfig) or name not in parent:
        if key in ABSENT_ALREADY:
            log.info("~%s: there is none, so nothing is removed", key)
            return
        raise ConfigError(f"~{key}: {unknown_key(key, overrides)}")
    if (cls := typed_class(parent)) is not None:
        cure = f" Set it instead: {key}=VALUE." if where else ""
        raise ConfigError(f"~{key}: a field of {cls.__qualname__} cannot be removed.{cure}")
    with open_dict(parent):
        del parent[name]


def _compose(overrides: Sequence[str]) -> DictConfig:
    try:
        with hydra.initialize(config_path=None, version_base=None), uncopied_store():
            tree: DictConfig = hydra.compose(ROOT, overrides=list(overrides))
            return tree
    except MissingConfigException as error:
        raise ConfigError(explain_missing_entry(error)) from error
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(explain(error, overrides)) from error
    except AttributeError as error:
        if (found := re.search(r"full_key: (\S+)", str(error))) is None:
            raise
        raise ConfigError(
            f"{found[1]} is null here, and a mapping is merged into a section that is there. Fill it in an experiment"
            " of your own: the same key with dict(...), whole."
        ) from error


def experiment_names(config_path: str) -> list[str]:
    """The names that ``experiment=`` takes with this config file, sorted."""
    path = find_config_file(config_path)
    if path.suffix != ".py":
        raise ConfigError(
            f"{config_path} is a saved configuration of one run and lists no experiments. Give a Python file."
        )
    with forgiving_store():
        load_config(path)
    return experiment_names_registered()


def experiment_names_registered() -> list[str]:
    """The names that the config files loaded so far have registered, sorted."""
    return entries("experiment")


def _copy_context_parallel_size(tree: DictConfig) -> None:
    """``model.context_parallel_size`` of older experiments is ``model_parallel.context_parallel_size``."""
    old, new = "model.context_parallel_size", "model_parallel.context_parallel_size"
    model = tree._get_node("model")
    if not isinstance(model, DictConfig) or model._is_none() or "context_parallel_size" not in model:
        return
    size = model["context_parallel_size"]
    target = target_of(model, "model")
    takes = signature(target) if callable(target) else {}
    if "context_parallel_size" not in takes and not any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        OmegaConf.set_struct(model, False)
        del model["context_parallel_size"]
        OmegaConf.set_struct(model, None)
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
