# SPDX-License-Identifier: Apache-2.0
"""What an error of Hydra or OmegaConf means for the user: the full key, what was found, what is expected."""

import re
from collections.abc import Sequence
from typing import Any

import hydra
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from imaginaire.config.checks import explain_callbacks
from imaginaire.config.lazy_config import takes
from imaginaire.config.names import describe, target_of
from imaginaire.config.registry import entries, groups, unknown_entry
from imaginaire.config.typed_nodes import explain_value, fields_of, typed_class
from imaginaire.errors import near

ROOT = "imaginaire_root"  # the name of the primary config in Hydra's store


def explain_missing_entry(error: MissingConfigException) -> str:
    group, _, name = (error.missing_cfg_file or "").strip("/").rpartition("/")
    place = _place(str(error))
    if not group:
        return f"{place}the defaults list names '{name}', which is not registered.{near(name, groups())}"
    if not entries(group):
        hint = near(group, groups())
        return f"{place}the defaults list names '{group}/{name}', but no group '{group}' is registered.{hint}"
    return place + unknown_entry(group, name)


def _place(text: str) -> str:
    """ "experiment 'x': " where Hydra says that it was reading an experiment."""
    match = re.match(r"In '([^']+)'", text)
    if match is None or match.group(1) == ROOT:
        return ""
    group, _, name = match.group(1).rpartition("/")
    return f"{group or 'config'} '{name}': "


def explain(error: Exception, overrides: Sequence[str]) -> str:
    text = str(error)
    place = _place(text)
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OmegaConfBaseException) and cause.full_key):
        cause = cause.__cause__ or cause.__context__
    if match := re.search(r"Could not override '([^']+)'\. No match in the defaults list", text):
        asked = f"override /{match.group(1)}"
        hint = near(asked, [f"override /{group}" for group in groups()])
        return f"{place}'{asked}' names a group that this config does not list.{hint}"
    if match := re.search(r"Multiple values for ([^.]+)\.", text):
        group = match.group(1)
        return f"{place}the group '{group}' is chosen twice: write 'override /{group}' in the defaults list."
    if match := re.search(r"An item is already at '([^']+)'", text):
        return f"+{match.group(1)} adds a key, but it exists already. Leave the '+' out: {match.group(1)}=VALUE."
    if match := re.search(r"Could not override '([^']+)'", text):
        return unknown_key(match.group(1), overrides)
    if match := re.search(r"Could not append to config\. The existing value of '([^']+)' is (.*?)\.", text):
        return unknown_key(match.group(1), overrides)
    if "list index out of range" in text + str(cause) or "invalid literal for int()" in text:
        for override in overrides:
            key = override.partition("=")[0].lstrip("+~")
            if " is a list. " in (found := unknown_key(key, overrides)):
                return found
    if isinstance(cause, OmegaConfBaseException):
        if "Cannot merge DictConfig with ListConfig" in text + str(cause):
            return place + _list_for_mapping(cause.full_key or "", overrides)
        return place + explain_value(cause)
    return place + " ".join(text.split())[:1000]


def _list_for_mapping(key: str, overrides: Sequence[str]) -> str:
    given = next((text for text in overrides if text.partition("=")[0].lstrip("+") == key), f"{key}=[...]")
    if key == "trainer.callbacks":
        return explain_callbacks(given.partition("=")[2])
    return f"{given} gives a list, but {key} is a section. Set its fields: {key}.NAME=VALUE."


def unknown_key(key: str, overrides: Sequence[str]) -> str:
    """An override of a key that is not there: near names in the section that it points into, or how to add it."""
    tree = _tree_without_values(overrides)
    parts = key.split(".")
    node: Any = tree
    for depth, part in enumerate(parts):
        where = ".".join(parts[:depth])
        if not isinstance(node, DictConfig) or node._is_none() or node._is_missing():
            if isinstance(node, ListConfig):
                return f"Unknown key {key}: {where} is a list. Give it whole: {where}=[...]."
            if node is None or isinstance(node, DictConfig):
                return f"Unknown key {key}: {where} is null here.{_how_to_fill(where)}"
            return f"Unknown key {key}: {where} is a value, not a section."
        names = [str(name) for name in node]
        if part not in names:
            return _not_in(node, key, where, part, names)
        node = node._get_node(part)
        if node is not None and not isinstance(node, (DictConfig, ListConfig)):
            node = node._value()
    return f"Unknown key {key}: it is there only in part of the composition."


def _not_in(node: DictConfig, key: str, where: str, part: str, names: list[str]) -> str:
    cls = typed_class(node)
    if cls is not None:
        close = near(part, fields_of(cls))
        if not where:
            elsewhere = _same_name(node, part)
            close = f" Did you mean {elsewhere}?" if elsewhere else close
        owner = f"{cls.__qualname__} has no such field" if where else "the configuration has no such section"
        return f"Unknown key {key}: {owner}.{close}"
    if "_target_" not in node:
        return f"Unknown key {key}: {where} has no '{part!s}'.{near(part, names)}{_how_to_add(key, part, names)}"
    target = target_of(node, where)
    taken, takes_any = takes(target) if callable(target) else ([], True)
    if part in taken:
        return f"The key {key} is not set yet, though {describe(target)} takes it. To add it write +{key}=VALUE."
    known = {*taken, *(name for name in names if not name.startswith("_"))}
    close = near(part, known)
    if not takes_any:
        return f"Unknown key {key}: {describe(target)} takes no argument '{part!s}'.{close}"
    if close.startswith(" Did"):
        return f"Unknown key {key}: {describe(target)} names no '{part!s}'.{close} (+{key}=VALUE adds it.)"
    return f"The key {key} is not set yet, and {describe(target)} takes any. To add it write +{key}=VALUE.{close}"


def _how_to_add(key: str, part: str, names: Sequence[str]) -> str:
    """The '+' that adds a key, unless another name was probably meant."""
    return "" if near(part, names).startswith(" Did") else f" To add it write +{key}=VALUE."


def _same_name(tree: DictConfig, part: str) -> str:
    """Where a name that was given without its section lies: ``max_iter`` is trainer.max_iter."""
    found = [
        f"{name!s}.{part}" for name, section in tree.items() if isinstance(section, DictConfig) and part in section
    ]
    return " or ".join(found[:3])


def _how_to_fill(where: str) -> str:
    names = entries(where)
    return (
        f" Choose it first: {where}={'|'.join(names[:6])}."
        if names
        else " An experiment fills it: give experiment=NAME."
    )


def _tree_without_values(overrides: Sequence[str]) -> DictConfig:
    """The tree before the dotted overrides: only what the groups and the experiment give."""
    choices = [text for text in overrides if "." not in text.partition("=")[0] and not text.startswith("+")]
    try:
        with hydra.initialize(config_path=None, version_base=None):
            tree: DictConfig = hydra.compose(ROOT, overrides=choices)
    except (ConfigCompositionException, OmegaConfBaseException, ValueError):
        with hydra.initialize(config_path=None, version_base=None):
            tree = hydra.compose(ROOT)
    return tree
