# SPDX-License-Identifier: Apache-2.0
"""Calls that wait: ``L(Target)(a=1)`` is a node with the target and its arguments, ``instantiate(node)`` makes it.

    node = L(AdamW)(params=PLACEHOLDER, lr=1e-4)      # every default of AdamW is in the node, open to overrides
    optimizer = instantiate(node, params=model.parameters())

A node is an OmegaConf DictConfig that may hold any object. Targets receive plain lists and dictionaries.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from imaginaire.config.internals import OBJECTS, full_key, is_empty
from imaginaire.config.lazy_yaml import load_yaml, save_yaml, to_data, to_yaml
from imaginaire.config.names import describe, locate, name_of, signature, target_of
from imaginaire.config.typed_nodes import is_config_class, join, to_object, typed_class
from imaginaire.errors import ConfigError, UserError

__all__ = ["PLACEHOLDER", "LazyCall", "LazyDict", "instantiate", "locate", "name_of", "signature", "to_object"]
__all__ += ["load_yaml", "save_yaml", "to_yaml"]

LazyDict = DictConfig
PLACEHOLDER = None  # an argument that is given when the call is made


OmegaConf.register_new_resolver("add", lambda *terms: sum(terms), replace=True)
OmegaConf.register_new_resolver("subtract", lambda first, *terms: first - sum(terms), replace=True)


# --- making nodes ---------------------------------------------------------------------------------------------------


class LazyCall:
    """``LazyCall(target)(**arguments)`` gives the node of a call that has not happened yet."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __call__(self, **kwargs: Any) -> DictConfig:
        target = self._target
        content: dict[str, Any] = {"_target_": target}
        if isinstance(target, type) and (is_config_class(target) or issubclass(target, (dict, list, tuple))):
            # As a value such a class would be taken for the schema of a typed node, or for a container.
            content = {"_target_": f"{target.__module__}.{target.__qualname__}"}
        for parameter in signature(target).values() if callable(target) else ():
            is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            if is_named and _is_showable(parameter.default):
                content[parameter.name] = parameter.default
        content.update(kwargs)
        return DictConfig(content, flags=dict(OBJECTS))


def _is_showable(value: Any) -> bool:
    """True for a default that a configuration file can hold: no sentinel of a library, and no object."""
    if value is inspect.Parameter.empty or is_config_class(type(value)):
        return False
    try:
        text = str(to_data(value))
    except ConfigError:
        return False
    return "${" not in text and text != "???"


# --- making the calls -----------------------------------------------------------------------------------------------


def instantiate(cfg: Any, *args: Any, **kwargs: Any) -> Any:
    """The object that a node describes: arguments are built first, then the call is made; ``kwargs`` override its own.

    A list gives a list, a typed node an object of its class, anything without ``_target_`` itself. With
    ``_recursive_: False`` the arguments are handed over as they are, so that the target can build its own parts.
    """
    return _instantiate(cfg, "", args, kwargs)


def _instantiate(cfg: Any, key: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    if isinstance(cfg, (DictConfig, ListConfig)) and is_empty(cfg):
        return None if isinstance(cfg, ListConfig) else cfg
    if isinstance(cfg, (ListConfig, list)):
        return [_instantiate(item, f"{key}[{i}]") for i, item in enumerate(cfg)]
    if isinstance(cfg, DictConfig):
        key = full_key(cfg) or key
        if typed_class(cfg) is not None:
            return to_object(cfg, key)
    if not isinstance(cfg, Mapping) or "_target_" not in cfg:
        return cfg
    return _call(cfg, key, args, dict(kwargs or {}))


def _argument(value: Any, key: str) -> Any:
    """An argument with everything in it built; plain mappings become plain dictionaries."""
    if isinstance(value, Mapping) and "_target_" not in value and typed_class(value) is None:
        return {name: _argument(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, (ListConfig, list)):
        return [_argument(item, f"{key}[{i}]") for i, item in enumerate(value)]
    return _instantiate(value, key)


def _call(cfg: Mapping[Any, Any], key: str, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    target = _instantiate(target_of(cfg, key), join(key, "_target_"))
    is_recursive = cfg.get("_recursive_", True)
    shares_dataset = is_recursive and _sampler_repeats_dataset(cfg) and not {"dataset", "sampler"} & given.keys()
    arguments: dict[str, Any] = {}
    for name, value in cfg.items():
        if name in ("_target_", "_recursive_") or name in given or (shares_dataset and name == "sampler"):
            continue
        if is_recursive:
            arguments[name] = _argument(value, join(key, name))
        else:
            arguments[name] = list(value) if isinstance(value, ListConfig) else value
    if shares_dataset:
        dataset = {"dataset": arguments["dataset"]}
        arguments["sampler"] = _instantiate(cfg["sampler"], join(key, "sampler"), kwargs=dataset)
    arguments.update(given)
    try:
        return target(*args, **arguments)
    except UserError:
        raise
    except (OSError, ValueError, TypeError) as error:
        why = f"{type(error).__name__}: {str(error).rstrip('.')}"
        at = f"{key}: " if key else ""
        raise ConfigError(f"{at}{describe(target)} could not be built: {why}. (--debug shows where.)") from error


def _sampler_repeats_dataset(cfg: Mapping[Any, Any]) -> bool:
    """True if a loader's sampler names the same data set as the loader.

    Published experiments write it down in both places. It is built once: opening a large folder twice takes minutes.
    """
    sampler, dataset = cfg.get("sampler"), cfg.get("dataset")
    if not isinstance(sampler, Mapping) or not isinstance(dataset, Mapping):
        return False
    return "_target_" in sampler and "_target_" in dataset and bool(sampler.get("dataset") == dataset)
