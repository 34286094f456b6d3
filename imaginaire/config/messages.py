# SPDX-License-Identifier: Apache-2.0
"""Messages on keys and group choices that do not exist: the full key, what was found, what is there instead."""

from collections.abc import Collection, Iterable
from typing import Any

from omegaconf import DictConfig, ListConfig

from imaginaire.config.internals import raw
from imaginaire.config.names import describe, takes_with_bases, target_of
from imaginaire.config.registry import choices, entries, entry_of, groups, is_registered, parents, unknown_entry
from imaginaire.config.typed_nodes import everything, fields_of, typed_class
from imaginaire.errors import ConfigError, near


def check_defaults(defaults: Iterable[Any], experiment: str | None, chosen: Collection[str]) -> None:
    """What the defaults lists of a config file and of its experiment name is registered.

    What they name for groups that the command line chooses (``chosen``) does not matter.
    """
    root = list(choices(defaults))
    listed = {choice.group for choice in root}
    for owner, own in [("", root), *(parents(experiment) if experiment else ())]:
        place = f"experiment '{owner}': " if owner else ""
        for group, names, is_override in own:
            if is_override and group not in listed:
                hint = near(f"override /{group}", [f"override /{name}" for name in groups()])
                raise ConfigError(f"{place}'override /{group}' names a group that this config does not list.{hint}")
            if owner and not is_override and group in listed and group != "experiment":
                raise ConfigError(
                    f"{place}the group '{group}' is chosen twice: write 'override /{group}' in the defaults list."
                )
            for name in names if group not in chosen or (owner and group == "experiment") else ():
                _check_entry(place, group, name)
        if owner and (entry := entry_of("experiment", owner)) is not None and entry.package != "_global_":
            raise ConfigError(
                f'{place}it was stored without package="_global_". Add that to its store(...), or use'
                " register_experiment."
            )


def _check_entry(place: str, group: str, name: Any) -> None:
    if not isinstance(name, str) or "${" in name or name == "???":
        return
    if not entries(group):
        hint = near(group, groups())
        raise ConfigError(
            f"{place}the defaults list names '{group}/{name}', but no group '{group}' is registered.{hint}"
        )
    if not is_registered(group, name):
        raise ConfigError(place + unknown_entry(group, name))


def unknown_key(tree: DictConfig, key: str) -> str | None:
    """An override of a key that is not there: near names, where else the name is, or how to add it; else None."""
    node: Any = tree
    where = ""
    for part in key.split("."):
        if isinstance(node, ListConfig):
            return f"Unknown key {key}: {where} is a list. Give it whole: {where}=[...]."
        if node is None:
            return f"Unknown key {key}: {where} is null here.{_how_to_fill(where)}"
        if not isinstance(node, DictConfig):
            return f"Unknown key {key}: {where} is a value, not a section."
        if part not in [str(name) for name in node]:
            return _not_in(tree, node, key, where, part)
        node, where = raw(node, part), f"{where}.{part}".lstrip(".")
    return None


def _not_in(tree: DictConfig, node: DictConfig, key: str, where: str, part: str) -> str:
    names = [str(name) for name in node]
    if (cls := typed_class(node)) is not None:
        owner = f"{cls.__qualname__} has no such field" if where else "the configuration has no such section"
        others = [] if where else [group for group in groups() if group not in ("hydra", "clear")]
        known = [name for name in (*fields_of(cls), *others) if name != "defaults"]
        return f"Unknown key {key}: {owner}.{_where_else(tree, part, known, is_first=not where)}"
    if "_target_" not in node:
        hint = _where_else(tree, part, names)
        add = "" if hint.startswith(" Did") else f" To add it write +{key}=VALUE."
        return f"Unknown key {key}: {where} has no '{part}'.{hint}{add}"
    target = target_of(node, where)
    taken, takes_any = takes_with_bases(target) if callable(target) else ([], True)
    if part in taken:
        return f"The key {key} is not set yet, though {describe(target)} takes it. To add it write +{key}=VALUE."
    hint = _where_else(tree, part, {*taken, *(name for name in names if not name.startswith("_"))})
    if not takes_any:
        return f"Unknown key {key}: {describe(target)} takes no argument '{part}'.{hint}"
    if hint.startswith(" Did"):
        return f"Unknown key {key}: {describe(target)} names no '{part}'.{hint} (+{key}=VALUE adds it.)"
    return f"The key {key} is not set yet, and {describe(target)} takes any. To add it write +{key}=VALUE.{hint}"


def _where_else(tree: DictConfig, part: str, names: Iterable[str], is_first: bool = False) -> str:
    """Near names of a section, or the full keys that end so: ``max_iter`` is trainer.max_iter."""
    hint = near(part, names)
    if hint.startswith(" Did") and not is_first:
        return hint
    found = sorted((key for key, _ in everything(tree) if key.endswith(f".{part}")), key=lambda key: key.count("."))
    return f" Did you mean {' or '.join(found[:4])}?" if found else hint


def _how_to_fill(where: str) -> str:
    names = entries(where)
    if not names:
        return " An experiment fills it: give experiment=NAME."
    return f" Choose it first: {where}={'|'.join(names[:6])}."
