# SPDX-License-Identifier: Apache-2.0
"""What a composed tree must satisfy to become a Config: no unknown key, no missing value, nothing without effect."""

import inspect
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from imaginaire.config.names import describe, locate
from imaginaire.config.schema import Config, TrainerConfig, is_finite
from imaginaire.config.typed_nodes import (
    check_fields,
    default_of,
    fields_of,
    is_config_class,
    join,
    to_object,
    typed_class,
)
from imaginaire.errors import ConfigError, near


def nodes(node: Any, key: str = "") -> Iterator[tuple[str, DictConfig]]:
    """Every mapping of a tree with its key, parents first."""
    for at, found in _everything(node, key):
        if isinstance(found, DictConfig) and not (found._is_none() or found._is_missing() or found._is_interpolation()):
            yield at, found


def _everything(node: Any, key: str = "") -> Iterator[tuple[str, Node]]:
    """Every node of a tree with its key, raw: nothing is resolved."""
    yield key, node
    if not isinstance(node, (DictConfig, ListConfig)):
        return
    if node._is_none() or node._is_missing() or node._is_interpolation():
        return
    if isinstance(node, DictConfig):
        for name in node:
            yield from _everything(node._get_node(name), join(key, name))
    else:
        for i in range(len(node)):
            yield from _everything(node._get_node(i), f"{key}[{i}]")


def check_known(tree: DictConfig) -> None:
    """Typed nodes hold nothing but their fields: what ``+key`` adds elsewhere would be dropped in silence."""
    for key, node in nodes(tree):
        if (cls := typed_class(node)) is not None:
            check_fields(cls, node, key)
            if gone := [name for name in fields_of(cls) if name not in node and (key or name != "defaults")]:
                raise ConfigError(
                    f"~{join(key, gone[0])}: a field of {cls.__qualname__} cannot be removed. Set it instead."
                )


def check_missing(tree: DictConfig) -> None:
    """All values that are still "???", in one message."""
    if missing := sorted(key for key, node in _everything(tree) if node._is_missing()):
        shown = "".join(f"\n  {key}=VALUE" for key in missing[:20])
        more = f"\n  and {len(missing) - 20} more" if len(missing) > 20 else ""
        count = "A value is missing" if len(missing) == 1 else f"{len(missing)} values are missing"
        raise ConfigError(f"{count} (marked ??? in the experiment). Give on the command line:{shown}{more}")


# Arguments that mean the same in every class of ours and of torch's, with the least that they can be.
_LEAST = {"lr": 0.0, "adam_lr": 0.0, "weight_decay": 0.0, "eps": 0.0, "timeout": 0.0}
_LEAST |= {"num_workers": 0, "batch_size": 1, "prefetch_factor": 1}
_KNOWN = ("imaginaire", "cosmos_predict2", "torch")


def check_numbers(tree: DictConfig, members: Sequence[str]) -> None:
    """No NaN, no infinity in what is built, and nothing below what a class could mean.

    A class from elsewhere may mean something by them (-1: all, inf: no limit), but not as an optimizer.
    """
    for key, node in _everything(tree):
        value = None if isinstance(node, (DictConfig, ListConfig)) else node._value()
        if isinstance(value, float) and not is_finite(value) and (value != value or key.split(".")[0] in members):
            name = key.rpartition(".")[2]
            if _is_known(node) or (key.startswith("optimizer.") and name in _LEAST):
                raise ConfigError(f"{key}={value}, but it must be a finite number.")
    for key, node in nodes(tree):
        if "_target_" not in node or not (_is_known(node) or key == "optimizer"):
            continue
        for name, least in _LEAST.items():
            value, is_whole = node.get(name), isinstance(least, int)
            is_wrong_kind = isinstance(value, bool) or (is_whole and isinstance(value, float))
            if is_wrong_kind or (isinstance(value, int | float) and value < least):
                kind = "whole number" if is_whole else "number"
                raise ConfigError(f"{join(key, name)}={value!r}, but it must be a {kind} of at least {least:g}.")
        if key == "optimizer" and _is_known(node):
            _check_decays(node)


def _is_known(node: Any) -> bool:
    """Whether what takes a value, or is built of a node, is of this project or of torch; plain settings are."""
    while node is not None:
        if isinstance(node, DictConfig) and "_target_" in node:
            target = node._get_node("_target_")._value()  # type: ignore[union-attr]
            module = target if isinstance(target, str) else getattr(target, "__module__", "")
            return str(module).split(".")[0] in _KNOWN
        node = node._get_parent()
    return True


def _check_decays(optimizer: DictConfig) -> None:
    betas = optimizer.get("betas")
    if betas is not None and not (isinstance(betas, ListConfig) and len(betas) == 2 and all(map(_is_decay, betas))):
        raise ConfigError(f"optimizer.betas={betas}, but it must be two numbers of at least 0 and below 1.")
    momentum = optimizer.get("momentum")
    if isinstance(momentum, int | float) and not _is_decay(momentum):
        raise ConfigError(f"optimizer.momentum={momentum}, but it must be a number of at least 0 and below 1.")


def _is_decay(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def resolve(tree: DictConfig) -> None:
    """Replace every interpolation by its value."""
    for key, node in _everything(tree):
        if node._is_interpolation():
            try:
                node._dereference_node()
            except (OmegaConfBaseException, ValueError, TypeError) as error:
                reason = str(error).splitlines()[0]
                raise ConfigError(f"{key}={node._value()!s} cannot be resolved: {reason}.") from error
    OmegaConf.resolve(tree)


def check_targets(tree: DictConfig) -> None:
    """Each argument of each lazy node is one that its target takes."""
    for key, node in nodes(tree):
        if "_target_" not in node:
            continue
        target = node["_target_"]
        if isinstance(target, str):
            target = locate(target, join(key, "_target_"))
        if not callable(target):
            if isinstance(target, DictConfig):
                continue  # a node that makes the callable
            raise ConfigError(f"{join(key, '_target_')} is {target!r}, which cannot be called.")
        try:
            parameters = inspect.signature(target).parameters
        except (TypeError, ValueError):
            continue
        names = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        for name in node:
            if str(name).startswith("_"):
                continue
            if name in names:
                _check_number(join(key, name), node._get_node(name), parameters[str(name)], target)
            elif not takes_any:
                raise ConfigError(
                    f"Unknown key {join(key, name)}: {describe(target)} takes no argument '{name!s}'."
                    f"{near(str(name), names)}"
                    f" If it is left from a node that this one was merged over, remove it with ~{join(key, name)}."
                )


def _check_number(key: str, node: Any, parameter: inspect.Parameter, target: Any) -> None:
    """Text for an argument that is declared as a number: 2**-14.5 on a command line, for example, is text."""
    value = node._value() if node is not None else None
    if not isinstance(value, str):
        return
    annotation = parameter.annotation
    if isinstance(annotation, str):
        annotation = {"int": int, "float": float, "bool": bool}.get(annotation)
    is_union = isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
    members = set(typing.get_args(annotation)) if is_union else {annotation}
    if members and members <= {int, float, bool, types.NoneType} and members != {types.NoneType}:
        expected = " or ".join(sorted(kind.__name__ for kind in members if kind is not types.NoneType))
        raise ConfigError(
            f"{key}={value!r} is text, but {describe(target)} expects {expected}."
            " Expressions are not evaluated on the command line: give the number."
        )


def explain_callbacks(value: Any) -> str:
    """``trainer.callbacks`` was given something else than callbacks by name."""
    return (
        f"trainer.callbacks={value} does not set callbacks: they are a mapping from names to what is built."
        " trainer.callbacks.NAME=null switches one off; callbacks=[basic,long] chooses groups, callbacks=[] none."
    )


def check_lazy(tree: DictConfig, members: Sequence[str]) -> None:
    """What will be built says what it is: lazy members and callbacks are null or have a target."""
    callbacks = tree.trainer._get_node("callbacks")
    found = [(name, tree._get_node(name)) for name in members]
    if callbacks is not None and not isinstance(callbacks, DictConfig) and not callbacks._is_none():
        raise ConfigError(explain_callbacks(callbacks))
    if isinstance(callbacks, DictConfig) and not callbacks._is_none():
        found += [(f"trainer.callbacks.{name!s}", callbacks._get_node(name)) for name in callbacks]
    for key, node in found:
        if node is None or node._is_none() or typed_class(node) is not None:
            continue
        if not isinstance(node, (DictConfig, ListConfig)) and not isinstance(node._value(), str | int | float):
            continue  # an object that is built already
        if not isinstance(node, DictConfig) or "_target_" not in node:
            held = f"has values ({', '.join(map(str, node))})" if isinstance(node, DictConfig) else f"is {node}"
            raise ConfigError(
                f"{key} {held} but no _target_, so nothing says what to build. Choose an entry of its group,"
                f" or remove it with ~{key}."
            )


def check_names(config: Config) -> None:
    """The classes that the typed sections name can be imported."""
    for key, value, default in (
        ("trainer.type", config.trainer.type, TrainerConfig().type),
        ("checkpoint.type", config.checkpoint.type, None),
    ):
        if isinstance(value, str) and value != default and not callable(locate(value, key)):
            raise ConfigError(f"{key}={value} is not a class.")


def check_effects(config: Config) -> None:
    """Fields that exist for compatibility only are at their defaults."""
    _check_effects(config, "", "")


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
    return (
        {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    )


def check_job(config: Config) -> None:
    """The three parts of the run's path are there and stay below the output root."""
    for name in ("project", "group", "name"):
        value = getattr(config.job, name)
        if not value.strip():
            raise ConfigError(
                f"job.{name} is empty. It is a part of the run folder project/group/name: give job.{name}=NAME."
            )
        parts = value.split("/")  # a part that is empty or "." would make two names the same folder
        if not {"", ".", ".."}.isdisjoint(parts) or any(ord(letter) < 32 for letter in value):
            raise ConfigError(
                f"job.{name}={value!r} cannot be a part of the run folder project/group/name. Use a plain name."
            )


def to_config(tree: DictConfig) -> Config:
    """The Config of a composed tree, every typed node validated; lazy members stay nodes of that tree."""
    cls = typed_class(tree)
    assert cls is not None and issubclass(cls, Config)
    inside: list[str] = []
    for key, node in nodes(tree):
        if key and typed_class(node) is not None and not any(key.startswith(outer) for outer in inside):
            to_object(node, key)  # runs the validators of all that it holds
            inside += [f"{key}.", f"{key}["]
    config = to_object(tree, keep_nodes=True)
    config.defaults = []
    check_effects(config)
    check_job(config)
    check_names(config)
    assert isinstance(config, Config)
    return config
