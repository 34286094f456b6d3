# SPDX-License-Identifier: Apache-2.0
"""Calls that wait, and configurations as YAML text and back.

    node = L(AdamW)(params=PLACEHOLDER, lr=1e-4)      # every default of AdamW is in the node, open to overrides
    optimizer = instantiate(node, params=model.parameters())

A node is an OmegaConf DictConfig that may hold any object. Targets receive plain lists and dictionaries.

In YAML text targets are dotted names. Other objects are marked mappings: ``_object_: torch.bfloat16`` is the thing of
that name, ``_partial_: name`` with args and kwargs a functools.partial, ``_call_: torch.device`` a device, and
``_type_: name`` beside the fields of a typed node its class. Interpolations are resolved, tuples become lists, paths
strings. A name is written only if it finds the same object again; the parser executes nothing.
"""

import copy
import enum
import functools
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from imaginaire.buildable import describe, locate, name_of, signature, target_of
from imaginaire.config import nodes
from imaginaire.config.nodes import OBJECTS, fields_of, full_key, is_config_class, is_empty, join, typed_class
from imaginaire.config.schema import Config
from imaginaire.errors import ConfigError, UserError, raised_as
from imaginaire.renamed import KEYS

LazyDict = DictConfig
PLACEHOLDER = None  # an argument that is given when the call is made

MARKS = ("_object_", "_partial_", "_call_", "_type_")
MOST_VALUES = 200_000  # with what aliases repeat
FOLDERS = "_import_from_"  # folders that a saved configuration needs on sys.path to find its targets

_import_folders: list[str] = []

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
            content = {"_target_": describe(target)}
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
            return nodes.to_object(cfg, key)
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


# --- YAML text ------------------------------------------------------------------------------------------------------


_omegaconf_loader: Any = get_yaml_loader()  # private, while reading a file to a node is public


class _Loader(_omegaconf_loader):
    """Reads as OmegaConf does: 1e-4 is a float, a date is text, and no key appears twice."""

    yaml_constructors = yaml.SafeLoader.yaml_constructors  # no paths


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def add_import_folder(folder: Path) -> None:
    """Put a folder first on sys.path, and remember it for the configurations that are saved."""
    name = str(folder)
    if name in sys.path:
        sys.path.remove(name)
    sys.path.insert(0, name)
    if name not in _import_folders:
        _import_folders.append(name)


def to_yaml(config: Any) -> str:
    """The YAML text of a composed configuration or of any node."""
    data = to_data(config)
    if isinstance(config, Config) and _import_folders:
        data = {FOLDERS: list(_import_folders), **data}
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120)


def save_yaml(config: Any, path: str | Path) -> None:
    """Write ``to_yaml(config)`` to a local file."""
    Path(path).write_text(to_yaml(config), encoding="utf-8")


def load_yaml(path: str | Path, declared: type | None = None) -> Any:
    """The tree that a file holds, as a node: typed again, marked objects found again, targets left as names.

    ``declared`` is the class of the root, where the file does not name one.
    """
    with raised_as(ConfigError, f"{path} cannot be read", OSError, UnicodeDecodeError):
        text = Path(path).read_text(encoding="utf-8")
    return from_yaml(text, str(path), declared)


def plain_data(text: str, source: str) -> Any:
    """The scalars, lists and dictionaries of a YAML text; nothing that it names is looked for.

    What aliases repeat is counted before it is written out: a few lines can mean more values than a memory holds.
    """
    try:
        return copy.deepcopy(_parsed(text))
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"  # other than YAMLError: of one value
        raise ConfigError(f"{source} is not valid YAML: {why}") from error


@functools.lru_cache(maxsize=16)
def _parsed(text: str) -> Any:
    """A program reads the configuration of a world model's run for its card, its parts and its preprocessing."""
    loader = _Loader(text)  # a subclass of SafeLoader
    node = loader.get_single_node()
    if node is None:
        return None
    if any(count > MOST_VALUES for count, _ in enumerate(_written_out(node))):
        raise yaml.YAMLError(f"its aliases (*name) repeat more than {MOST_VALUES} values")
    return loader.construct_document(node)


def _written_out(node: Any) -> Iterator[Any]:
    """The nodes of a YAML text, those that an alias names once for each alias: without end for one within itself."""
    yield node
    children = node.value if isinstance(node, yaml.CollectionNode) else []
    for child in itertools.chain(*children) if isinstance(node, yaml.MappingNode) else children:
        yield from _written_out(child)


def _holds(data: Any, key: Sequence[str]) -> bool:
    return not key or (isinstance(data, dict) and key[0] in data and _holds(data[key[0]], key[1:]))


def from_yaml(text: str, source: str = "this YAML text", declared: type | None = None) -> Any:
    """The node of a YAML text; ``source`` is what the messages call it."""
    data = plain_data(text, source)
    try:
        if isinstance(data, dict):
            for folder in data.pop(FOLDERS, None) or ():
                add_import_folder(Path(str(folder)))
            if any(_holds(data, key.split(".")) for key in KEYS):
                tree = DictConfig(data)
                nodes.move_keys(tree)
                data = OmegaConf.to_container(tree)
        value = from_data(data, declared=declared)
        try:
            if isinstance(value, dict) or is_config_class(type(value)):
                return DictConfig(value, flags=dict(OBJECTS))
            return ListConfig(value, flags=dict(OBJECTS)) if isinstance(value, list) else value
        except OmegaConfBaseException:
            _check_typed(value)
            raise
    except (ConfigError, OmegaConfBaseException) as error:
        raise ConfigError(f"{source}: {error if isinstance(error, ConfigError) else nodes.explained(error)}") from error


# --- objects to data ------------------------------------------------------------------------------------------------


def to_data(value: Any, key: str = "", declared: Any = None) -> Any:
    """Plain data for a value: scalars, lists and dictionaries, with objects as marked mappings.

    ``declared`` is the class that the surrounding field promises; a typed node of that very class needs no mark.
    """
    if isinstance(value, (DictConfig, ListConfig)) and is_empty(value):
        return "???" if value._is_missing() else None
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return {"_object_": name_of(value, key)}
    plain: Any
    for plain in (int, float, str, bytes):
        if isinstance(value, plain):
            return plain(value)  # a subclass, such as a NumPy float, as what it is underneath
    if isinstance(value, Path):
        return str(value)
    if is_config_class(cls := typed_class(value) or type(value)):
        return _fields_to_data(value, cls, key, declared)
    if isinstance(value, Mapping):
        return _mapping_to_data(value, key or (full_key(value) if isinstance(value, DictConfig) else ""))
    if isinstance(value, (ListConfig, list, tuple)):
        return [to_data(item, f"{key}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, functools.partial):
        args, kwargs = to_data(value.args, f"{key}.args"), to_data(value.keywords, f"{key}.kwargs")
        return {"_partial_": name_of(value.func, key), "args": args, "kwargs": kwargs}
    if type(value).__module__ == "torch" and type(value).__name__ == "device":
        return {"_call_": "torch.device", "args": [str(value)]}
    return {"_object_": name_of(value, key)}


def _fields_to_data(value: Any, cls: type, key: str, declared: Any) -> dict[str, Any]:
    """The fields of a typed node or of an object, with its class where that is another than the declared one."""
    is_node = isinstance(value, DictConfig)
    is_root = not is_node and isinstance(value, Config)
    is_known = cls is declared or (is_root and cls is Config and not key)
    data: dict[str, Any] = {} if is_known else {"_type_": name_of(cls, join(key, "_type_"))}
    fields = fields_of(cls)
    for name in value if is_node else fields:
        if is_root and name == "defaults":
            continue  # composed already
        item = _item(value, name) if is_node else getattr(value, name)
        data[name] = to_data(item, join(key, name), getattr(fields.get(name), "type", None))
    return data


def _item(node: Mapping[Any, Any], name: Any) -> Any:
    return "???" if isinstance(node, DictConfig) and OmegaConf.is_missing(node, name) else node[name]


def _mapping_to_data(mapping: Mapping[Any, Any], key: str) -> dict[Any, Any]:
    data: dict[Any, Any] = {}
    for name in mapping:
        at = join(key, name)
        if not isinstance(name, (str, int, float)) or isinstance(name, enum.Enum):
            raise ConfigError(f"{at}: a configuration file has text and numbers as keys, not {name!r}.")
        if name in MARKS or name == FOLDERS:
            raise ConfigError(f"{at}: '{name}' is a mark of saved configurations and cannot be a key. Rename it.")
        value = _item(mapping, name)
        is_target = name == "_target_" and not isinstance(value, (str, Mapping, functools.partial))
        data[name] = name_of(value, at) if is_target else to_data(value, at)
    return data


# --- data to objects ------------------------------------------------------------------------------------------------


def from_data(data: Any, key: str = "", declared: Any = None) -> Any:
    """The values that ``to_data`` wrote: objects located, typed mappings as unchecked instances of their class."""
    if isinstance(data, list):
        return [from_data(item, f"{key}[{i}]") for i, item in enumerate(data)]
    if not isinstance(data, dict):
        if not isinstance(data, str | int | float | bytes | None):
            raise ConfigError(f"{key}: a configuration has no {type(data).__name__} such as {data!r}.")
        return data
    if "_object_" in data:
        return _located(data, "_object_", key)
    if "_partial_" in data:
        args = from_data(data.get("args") or [], f"{key}.args")
        kwargs = from_data(data.get("kwargs") or {}, f"{key}.kwargs")
        for name, values in (("args", args), ("kwargs", kwargs)):  # no node holds them, which would look
            _check_typed(values, f"{key}.{name}")
        return functools.partial(_located(data, "_partial_", key), *args, **kwargs)
    if data.get("_call_") == "torch.device":
        return locate("torch.device", key)(*data.get("args", ()))
    if "_type_" in data:
        declared = _located(data, "_type_", key)
        if not is_config_class(declared):
            raise ConfigError(f"{join(key, '_type_')} names {data['_type_']}, which is no attrs class or dataclass.")
        data = {name: value for name, value in data.items() if name != "_type_"}
    if is_config_class(declared):
        return _typed(declared, data, key)
    return {name: from_data(value, join(key, name)) for name, value in data.items()}


def _typed(cls: Any, data: Mapping[Any, Any], key: str) -> Any:
    fields = fields_of(cls)
    values = {
        name: from_data(value, join(key, name), getattr(fields.get(str(name)), "type", None))
        for name, value in data.items()
    }
    for name, field in fields.items():
        if name not in values and is_config_class(field.type) and nodes.default_of(field) == "???":
            values[name] = nodes.unchecked(field.type, {}, join(key, name))
    return nodes.unchecked(cls, values, key)


def _check_typed(value: Any, key: str = "") -> None:
    """ConfigError for the innermost typed value that OmegaConf refuses, which does not say its full key."""
    if isinstance(value, list):
        for i, item in enumerate(value):
            _check_typed(item, f"{key}[{i}]")
    is_typed = is_config_class(type(value))
    names = fields_of(type(value)) if is_typed else value if isinstance(value, dict) else ()
    for name in names:
        _check_typed(getattr(value, name) if is_typed else value[name], join(key, name))
    if is_typed:
        try:
            DictConfig(value, flags=dict(OBJECTS))
        except OmegaConfBaseException as error:
            raise nodes.explained(error, key) from error


def _located(data: Mapping[Any, Any], mark: str, key: str) -> Any:
    name = data[mark]
    if not isinstance(name, str):
        raise ConfigError(f"{join(key, mark)} must be a dotted name, not {name!r}.")
    return locate(name, key)
