# SPDX-License-Identifier: Apache-2.0
"""Checks of a composed tree before it becomes a Config: no unknown key, no missing value, nothing without effect.

The tree is walked three times: as it is written (``check_tree``), by OmegaConf to resolve it, and with its values
(``check_values``). ``faults`` are what a dry run reports besides.
"""

import inspect
import math
import re
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from imaginaire.buildable import describe, signature, takes, target_of
from imaginaire.config.nodes import (
    check_fields,
    default_of,
    everything,
    fields_of,
    is_config_class,
    is_empty,
    join,
    nodes,
    to_object,
    typed_class,
    unknown,
)
from imaginaire.config.schema import NEVER, Config
from imaginaire.errors import ConfigError

__all__ = ["check_sections", "check_tree", "check_values", "faults", "nodes", "resolve"]

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
        shown = "".join(f"\n  {key}=VALUE" for key in sorted(missing))
        raise ConfigError(f"Values are missing (marked ??? in the experiment). Give on the command line:{shown}")


def resolve(tree: DictConfig) -> None:
    """Replace every interpolation by its value."""
    try:
        OmegaConf.resolve(tree)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        left = (f"{key}={value}" for key, value in everything(tree) if isinstance(value, str) and "${" in value)
        raise ConfigError(f"{next(left, '')} cannot be resolved: {str(error).splitlines()[0]}.") from error


# --- with its values ------------------------------------------------------------------------------------------------

# Arguments that mean the same in every class of ours and of torch's, with the least that they can be.
_LEAST = {"lr": 0.0, "adam_lr": 0.0, "weight_decay": 0.0, "eps": 0.0, "timeout": 0.0}
_LEAST |= {"num_workers": 0, "batch_size": 1, "prefetch_factor": 1}
_OURS = ("imaginaire", "cosmos_predict2", "torch")


def check_values(tree: DictConfig, members: Sequence[str]) -> None:
    """Lazy members and callbacks have a target and each lazy node takes its arguments, numbers are in their range,
    typed nodes are valid. A class from elsewhere may mean something by -1 or nan, but not as an optimizer."""
    _check_built(tree, members)
    foreign: list[str] = []
    not_taken: list[str] = []
    for key, node in everything(tree):
        is_ours = not key.startswith(tuple(foreign))
        if isinstance(node, float) and math.isnan(node) and is_ours:
            raise ConfigError(f"{key}={node}, but it must be a finite number.")
        if not isinstance(node, DictConfig) or is_empty(node) or not key:
            continue
        if "_target_" in node:
            target = target_of(node, key)
            if not isinstance(target, DictConfig):  # a node that makes the callable
                not_taken += _check_call(key, node, target)
            is_ours = str(getattr(target, "__module__", "")).split(".")[0] in _OURS
            if not is_ours:
                foreign += [f"{key}.", f"{key}["]
            if is_ours or key == "optimizer":
                _check_ranges(key, node)
        elif typed_class(node) is not None:
            to_object(node, key)  # runs the validators of all that it holds
    if not_taken:
        raise ConfigError("\n".join(not_taken))


def _check_built(tree: DictConfig, members: Sequence[str]) -> None:
    """Lazy members and callbacks are null or have a target."""
    callbacks = tree.trainer.callbacks
    if not (callbacks is None or isinstance(callbacks, DictConfig)):
        raise ConfigError(f"trainer.callbacks={callbacks!r}, but it is a section: set trainer.callbacks.NAME.")
    built = {name: tree[name] for name in members}
    built |= {f"trainer.callbacks.{name!s}": node for name, node in (callbacks or {}).items()}
    for key, node in built.items():
        is_plain = isinstance(node, (DictConfig, ListConfig, str, int, float))  # else an object that is built already
        if is_plain and typed_class(node) is None and not (isinstance(node, DictConfig) and "_target_" in node):
            raise ConfigError(
                f"{key} is {node!r}, but it must have a _target_. Choose an entry of its group, or ~{key}."
            )


def _check_call(key: str, node: DictConfig, target: Any) -> Iterator[str]:
    """A message on each argument of a lazy node that its target does not take; raises for text in place of a number."""
    if not callable(target):
        raise ConfigError(f"{join(key, '_target_')} is {target!r}, which cannot be called.")
    (names, takes_any), parameters = takes(target), signature(target)
    group = "callbacks" if key.startswith("trainer.callbacks.") else key.partition(".")[0]
    for name in map(str, node):
        at = join(key, name)
        if name in names:
            if isinstance(node[name], str):
                _check_text(at, node[name], parameters[name], target)
        elif not takes_any and not name.startswith("_"):
            cure = (
                f" If it is left from a node that this one was merged over, remove it with ~{at}, or all of them with"
                f" '/clear/{group}' in the experiment's defaults."
            )
            yield str(unknown(at, describe(target), names, cure))


def _check_text(key: str, value: str, parameter: inspect.Parameter, target: Any) -> None:
    """Text for an argument that is declared as a number or bool: ``no`` would be true, 2**-14.5 is not evaluated."""
    declared = parameter.annotation
    if isinstance(declared, str):
        declared = {"int": int, "float": float, "bool": bool}.get(declared)
    is_union = isinstance(declared, types.UnionType) or typing.get_origin(declared) is typing.Union
    kinds = set(typing.get_args(declared) if is_union else [declared]) - {types.NoneType}
    if kinds and kinds <= {int, float, bool}:
        expected = " or ".join(sorted(kind.__name__ for kind in kinds))
        cure = "Give true or false." if kinds == {bool} else "Give the number: expressions are not evaluated."
        raise ConfigError(f"{key}={value!r} is text, but {describe(target)} expects {expected}. {cure}")


def _check_ranges(key: str, node: DictConfig) -> None:
    present = set(node)  # OmegaConf takes long to say that a key is not there
    for name, least in _LEAST.items():
        value, is_whole = node[name] if name in present else None, isinstance(least, int)
        is_wrong_kind = isinstance(value, (bool, str)) or (is_whole and isinstance(value, float))
        if is_wrong_kind or (isinstance(value, int | float) and not least <= value < math.inf):
            kind = "whole number" if is_whole else "number"
            raise ConfigError(f"{join(key, name)}={value!r}, but it must be a finite {kind} of at least {least:g}.")


# --- the typed sections ---------------------------------------------------------------------------------------------


def check_sections(config: Config) -> None:
    """The run has a folder, and no field that has no effect is set."""
    _check_effects(config, "", "")
    for name in ("project", "group", "name"):
        value = getattr(config.job, name)
        parts = value.split("/")  # a part that is empty or "." would make two names the same folder
        if not {"", ".", ".."}.isdisjoint(parts) or any(ord(letter) < 32 for letter in value) or not value.strip():
            raise ConfigError(f"job.{name}={value!r}, but it must be a part of the run folder project/group/name.")


def _check_effects(section: Any, key: str, reason: str) -> None:
    for name, field in fields_of(type(section)).items():
        value = getattr(section, name)
        why = field.metadata.get("no_effect", reason)
        if is_config_class(type(value)):
            _check_effects(value, join(key, name), why)
        elif why and value != (default := default_of(field)):
            shown = {"None": "null", "True": "true", "False": "false"}.get(str(default), repr(default))
            raise ConfigError(f"{join(key, name)} has no effect here: {why}. Leave it at its default, {shown}.")


# --- what is odd on any machine -------------------------------------------------------------------------------------

_TIME_STAMP = re.compile(r"\d{4}-\d{2}-\d{2}|\d{2}[-:]\d{2}[-:]\d{2}|20\d{6}|\d{8,}")


def faults(config: Config) -> Iterator[tuple[str, str]]:
    """(config key, sentence) of what the author of an experiment should mend, though it runs."""
    max_iter, save_iter = config.trainer.max_iter, config.checkpoint.save_iter
    if _TIME_STAMP.search(config.job.name):
        yield "job.name", f"{config.job.name} has a time stamp: the next start gets another folder, and does not resume"
    if max_iter < save_iter < NEVER:
        yield "checkpoint.save_iter", f"{save_iter} is beyond trainer.max_iter={max_iter}: only the end is saved"
