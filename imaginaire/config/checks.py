# SPDX-License-Identifier: Apache-2.0
"""What a composed tree must satisfy to become a Config: no unknown key, no missing value, nothing without effect.

The tree is walked three times: as it is written (``check_tree``), by OmegaConf to resolve it, and with its values
(``check_values``).
"""

import inspect
import types
import typing
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from imaginaire.config.names import describe, locate, parameters_of, takes
from imaginaire.config.schema import Config, TrainerConfig, is_finite
from imaginaire.config.typed_nodes import (
    check_fields,
    default_of,
    everything,
    fields_of,
    is_config_class,
    join,
    nodes,
    to_object,
    typed_class,
)
from imaginaire.errors import ConfigError, near

__all__ = ["check_sections", "check_tree", "check_values", "nodes", "resolve"]

# --- as it is written -----------------------------------------------------------------------------------------------


def check_tree(tree: DictConfig) -> None:
    """Typed nodes hold nothing but their fields, and no value is still "???"."""
    missing = []
    for key, value in everything(tree):
        if (cls := typed_class(value)) is not None:  # what ``+key`` adds elsewhere would be dropped in silence
            check_fields(cls, value, key)
        elif isinstance(value, str) and value == "???":
            missing.append(key)
    if missing:
        shown = "".join(f"\n  {key}=VALUE" for key in sorted(missing)[:20])
        more = f"\n  and {len(missing) - 20} more" if len(missing) > 20 else ""
        count = "A value is missing" if len(missing) == 1 else f"{len(missing)} values are missing"
        raise ConfigError(f"{count} (marked ??? in the experiment). Give on the command line:{shown}{more}")


def resolve(tree: DictConfig) -> None:
    """Replace every interpolation by its value."""
    try:
        OmegaConf.resolve(tree)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(_unresolved(tree) or str(error).splitlines()[0]) from error


def _unresolved(tree: DictConfig) -> str | None:
    """The first interpolation that has no value, for the message."""
    for key, value in everything(tree):
        if isinstance(value, str) and "${" in value:
            try:
                OmegaConf.select(tree, key)
            except (OmegaConfBaseException, ValueError, TypeError) as error:
                return f"{key}={value} cannot be resolved: {str(error).splitlines()[0]}."
    return None


# --- with its values ------------------------------------------------------------------------------------------------

# Arguments that mean the same in every class of ours and of torch's, with the least that they can be.
_LEAST = {"lr": 0.0, "adam_lr": 0.0, "weight_decay": 0.0, "eps": 0.0, "timeout": 0.0}
_LEAST |= {"num_workers": 0, "batch_size": 1, "prefetch_factor": 1}
_OURS = ("imaginaire", "cosmos_predict2", "torch")


def check_values(tree: DictConfig, members: Sequence[str]) -> None:
    """Each lazy node takes its arguments, numbers are finite and in their range, typed nodes are valid."""
    _check_lazy(tree, members)
    for name in tree:
        is_section = typed_class(tree[name]) is not None
        _check_node(str(name), tree[name], is_ours=True, is_built=name in members, is_typed=is_section)


def _check_node(key: str, node: Any, is_ours: bool, is_built: bool, is_typed: bool) -> None:
    """``is_ours``: what takes the value is of this project or of torch, or a plain setting. A class from elsewhere may
    mean something by -1 or inf, but not as an optimizer. ``is_typed``: a typed node above has been validated."""
    if isinstance(node, DictConfig):
        if "_target_" in node:
            is_ours = _check_call(key, node)
        elif typed_class(node) is not None and not is_typed:
            to_object(node, key)  # runs the validators of all that it holds
            is_typed = True
        for name in node:
            _check_node(join(key, name), node[name], is_ours, is_built, is_typed)
        if "_target_" in node and (is_ours or key == "optimizer"):
            _check_ranges(key, node, is_ours)
    elif isinstance(node, ListConfig):
        for i, item in enumerate(node):
            _check_node(f"{key}[{i}]", item, is_ours, is_built, is_typed)
    elif isinstance(node, float) and not is_finite(node) and (node != node or is_built):
        section, _, name = key.rpartition(".")
        if is_ours or (section.startswith("optimizer") and name in _LEAST):
            raise ConfigError(f"{key}={node}, but it must be a finite number.")


def _check_call(key: str, node: DictConfig) -> bool:
    """Whether the target is of this project or of torch; each argument is one that it takes."""
    target = node["_target_"]
    if isinstance(target, str):
        target = locate(target, join(key, "_target_"))
    if isinstance(target, DictConfig):
        return False  # a node that makes the callable
    if not callable(target):
        raise ConfigError(f"{join(key, '_target_')} is {target!r}, which cannot be called.")
    parameters = parameters_of(target)
    names, takes_any = takes(parameters)
    for name in map(str, node):
        if parameters is not None and name in names:
            _check_number(join(key, name), node[name], parameters[name], target)
        elif not (name.startswith("_") or takes_any):
            raise ConfigError(
                f"Unknown key {join(key, name)}: {describe(target)} takes no argument '{name}'.{near(name, names)}"
                f" If it is left from a node that this one was merged over, remove it with ~{join(key, name)}."
            )
    return str(getattr(target, "__module__", "")).split(".")[0] in _OURS


def _check_number(key: str, value: Any, parameter: inspect.Parameter, target: Any) -> None:
    """Text for an argument that is declared as a number: 2**-14.5 on a command line, for example, is text."""
    if not isinstance(value, str):
        return
    annotation = parameter.annotation
    if isinstance(annotation, str):
        annotation = {"int": int, "float": float, "bool": bool}.get(annotation)
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    kinds = set(typing.get_args(annotation) if is_union else [annotation]) - {types.NoneType}
    if kinds and kinds <= {int, float, bool}:
        expected = " or ".join(sorted(kind.__name__ for kind in kinds))
        raise ConfigError(
            f"{key}={value!r} is text, but {describe(target)} expects {expected}."
            " Expressions are not evaluated on the command line: give the number."
        )


def _check_ranges(key: str, node: DictConfig, is_ours: bool) -> None:
    for name, least in _LEAST.items():
        value, is_whole = node.get(name), isinstance(least, int)
        is_wrong_kind = isinstance(value, bool) or (is_whole and isinstance(value, float))
        if is_wrong_kind or (isinstance(value, int | float) and value < least):
            kind = "whole number" if is_whole else "number"
            raise ConfigError(f"{join(key, name)}={value!r}, but it must be a {kind} of at least {least:g}.")
    if key != "optimizer" or not is_ours:
        return
    betas, momentum = node.get("betas"), node.get("momentum")
    if betas is not None and not (isinstance(betas, ListConfig) and len(betas) == 2 and all(map(_is_decay, betas))):
        raise ConfigError(f"optimizer.betas={betas}, but it must be two numbers of at least 0 and below 1.")
    if isinstance(momentum, int | float) and not _is_decay(momentum):
        raise ConfigError(f"optimizer.momentum={momentum}, but it must be a number of at least 0 and below 1.")


def _is_decay(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def callbacks_are_no_value(value: Any) -> str:
    """The message where ``trainer.callbacks`` is given something else than callbacks by name."""
    return (
        f"trainer.callbacks={value} does not set callbacks: they are a mapping from names to what is built."
        " trainer.callbacks.NAME=null switches one off; callbacks=[basic,long] chooses groups, callbacks=[] none."
    )


def _check_lazy(tree: DictConfig, members: Sequence[str]) -> None:
    """Lazy members and callbacks are null or have a target."""
    callbacks = tree.trainer.callbacks
    found = {name: tree[name] for name in members}
    if isinstance(callbacks, DictConfig):
        found |= {f"trainer.callbacks.{name!s}": node for name, node in callbacks.items()}
    elif callbacks is not None:
        raise ConfigError(callbacks_are_no_value(callbacks))
    for key, node in found.items():
        is_plain = isinstance(node, (DictConfig, ListConfig, str, int, float))  # else an object that is built already
        if not is_plain or typed_class(node) is not None or (isinstance(node, DictConfig) and "_target_" in node):
            continue
        held = f"has values ({', '.join(map(str, node))})" if isinstance(node, DictConfig) else f"is {node}"
        raise ConfigError(
            f"{key} {held} but no _target_, so it cannot be built. Choose an entry of its group, or remove it with"
            f" ~{key}."
        )


# --- the typed sections ---------------------------------------------------------------------------------------------


def check_sections(config: Config) -> None:
    """The run has a folder, its classes can be imported, and no field that has no effect is set."""
    _check_effects(config, "", "")
    for name in ("project", "group", "name"):
        _check_part_of_path(f"job.{name}", getattr(config.job, name))
    for key, value, default in (
        ("trainer.type", config.trainer.type, TrainerConfig().type),
        ("checkpoint.type", config.checkpoint.type, None),
    ):
        if isinstance(value, str) and value != default and not callable(locate(value, key)):
            raise ConfigError(f"{key}={value} is not a class.")


def _check_effects(section: Any, key: str, reason: str) -> None:
    for name, field in fields_of(type(section)).items():
        value = getattr(section, name)
        why = field.metadata.get("no_effect", reason)
        if is_config_class(type(value)):
            _check_effects(value, join(key, name), why)
        elif why and value != (default := default_of(field)):
            raise ConfigError(
                f"{join(key, name)}={_shown(value)} has no effect here: {why}."
                f" Leave it at its default, {_shown(default)}."
            )


def _shown(value: Any) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))


def _check_part_of_path(key: str, value: str) -> None:
    if not value.strip():
        raise ConfigError(f"{key} is empty. It is a part of the run folder project/group/name: give {key}=NAME.")
    parts = value.split("/")  # a part that is empty or "." would make two names the same folder
    if not {"", ".", ".."}.isdisjoint(parts) or any(ord(letter) < 32 for letter in value):
        raise ConfigError(f"{key}={value!r} cannot be a part of the run folder project/group/name. Use a plain name.")
