# SPDX-License-Identifier: Apache-2.0
"""Tables of a recipe's fields, a recipe held to its table, and the run that it is translated to.

A table has a row for each field by its dotted path, with its translation. A field without a row is an error, also in a
section that the run does not use. The functions below make rows of a table:

    reads(dict(epochs=1))                      fields that the translation looks at, with their defaults there
    sets(dict(lr=("optimizer.lr", 1e-5)))      fields that set a key of ours, to the recipe's value or to their default
    same("optimizer", dict(lr=1e-5))           the same, where the key has the field's name
    given(dict(seed="trainer.seed"))           fields that set a key where a recipe has them; else it is as usual
    only("tp_size pp_size", "Set it to 1", 1)  fields that can only have these values, the first of which is the default
    unused("redis", "there is no controller")  fields without effect, and everything below them; or a mapping of names
                                               to the value in published files, others are reported
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imaginaire.errors import ConfigError, near

ALWAYS, OF_RL, SUPERVISED = "always", "rl", "supervised"


@dataclass(frozen=True)
class Row:
    """The translation of a field: its type, the key that it sets, or the reason why it has no effect."""

    default: Any = None  # of its type are the values of a recipe; None: they are of any
    key: str = ""  # that it sets
    convert: Callable[[Any], Any] | None = None  # makes our value of the recipe's
    when: str = ALWAYS  # which runs have the key
    is_set_if_given: bool = False  # else ours has its usual value
    values: tuple[Any, ...] = ()  # others are refused, with the cure
    cure: str = ""
    least: int | None = None  # of a whole number
    above: float | None = None  # this is a number
    unused: str = ""  # why it has no effect
    usual: Sequence[Any] | None = None  # its values in published files, where it has no effect; others are reported
    reported: str = ""  # why it is ignored and reported, where it has a value
    place: str = ""  # of the same field in other versions of a file


Table = Mapping[str, Row]


def sets(rows: Mapping[str, Sequence[Any]], **more: Any) -> dict[str, Row]:
    """Rows from (key, default) or (key, default, convert); ``more`` are bounds, or the runs that have the keys."""
    return {name: Row(row[1], row[0], *row[2:], **more) for name, row in rows.items()}


def same(section: str, defaults: Mapping[str, Any], when: str = ALWAYS) -> dict[str, Row]:
    """Rows of fields that set the key of their own name in a section of ours."""
    return {name: Row(default, f"{section}.{name}", when=when) for name, default in defaults.items()}


def given(keys: Mapping[str, str]) -> dict[str, Row]:
    return {name: Row(key=key, is_set_if_given=True) for name, key in keys.items()}


def reads(defaults: Mapping[str, Any], least: int | None = None, above: float | None = None) -> dict[str, Row]:
    return {name: Row(default, least=least, above=above) for name, default in defaults.items()}


def only(names: str, cure: str, *values: Any) -> dict[str, Row]:
    return dict.fromkeys(names.split(), Row(values[0], values=values, cure=cure))


def unused(names: str | Mapping[str, Any], reason: str, *usual: Any) -> dict[str, Row]:
    """Rows of names, separated by spaces; ``usual`` are the values in published files, others are reported."""
    if isinstance(names, str):
        return dict.fromkeys(names.split(), Row(unused=reason, usual=usual or None))
    return {name: Row(unused=reason, usual=(value,)) for name, value in names.items()}


def under(section: str, *rows: Table) -> dict[str, Row]:
    """The rows with the section's name before theirs."""
    return {f"{section}.{name}": row for part in rows for name, row in part.items()}


@dataclass(frozen=True)
class Translation:
    """A run of this project: the overrides, which begin with the experiment, and how many GPUs it asks for."""

    overrides: list[str]
    gpu_fields: dict[str, int]  # of the recipe, whose product it is
    environment: dict[str, str]  # variables that are set where they are not
    warnings: list[str]
    scripts: tuple[str, ...] = ("wfm_rl", "diffusion_nft")  # of cosmos_rl.tools.dataset, that fit the recipe
    evaluation: list[str] | None = None  # arguments of scripts.evaluate_policy, in place of the overrides
    missing: tuple[str, ...] = ()  # files that this machine lacks, a sentence on each

    @property
    def num_gpus(self) -> int:
        return math.prod(self.gpu_fields.values())

    @property
    def gpu_product(self) -> str:
        return " x ".join(f"{name} = {number}" for name, number in self.gpu_fields.items())


class Fields:
    """The fields of a recipe that were held to a table: what was given, and the defaults of the rest."""

    def __init__(self, given: Mapping[str, Any], table: Table) -> None:
        self.given = dict(given)
        self.table = table
        self.missing: list[str] = []  # files that a field names and this machine lacks, a sentence on each

    def __getitem__(self, path: str) -> Any:
        """The value, or its default there."""
        return self.given.get(path, self.table[path].default)

    def has(self, section: str) -> bool:
        """True where the recipe has the field, or one of the section."""
        return any(path == section or path.startswith(f"{section}.") for path in self.given)

    def options(self, section: str, names: Mapping[str, str]) -> dict[str, Any]:
        """The fields of a section that the recipe has, under our names for them."""
        paths = {ours: f"{section}.{name}" for name, ours in names.items()}
        return {ours: self.given[path] for ours, path in paths.items() if path in self.given}

    def settings(self, run: str = ALWAYS) -> dict[str, Any]:
        """The values that the rows set for a kind of run (OF_RL, SUPERVISED), by key."""
        found = {}
        for path, row in self.table.items():
            if not row.key or row.when not in (ALWAYS, run) or (row.is_set_if_given and path not in self.given):
                continue
            try:
                found[row.key] = row.convert(self[path]) if row.convert else self[path]
            except (TypeError, ValueError):
                raise ConfigError(f"{path} = {shown_value(self[path])}, but it is a number.") from None
        return found

    def at_least_1(self, path: str) -> int:
        """The value, which must be there."""
        _require_bounds(path, self[path], Row(least=1))
        return int(self[path])

    def require_same(self, path: str, other: str) -> None:
        """Raise where a recipe gives a field another value than one that it must equal has."""
        if path in self.given and self[path] != self[other]:
            raise ConfigError(f"{path} = {self[path]} must be {other} = {self[other]}.")


def read_fields(content: Mapping[str, Any], table: Table) -> tuple[Fields, list[str]]:
    """The fields of a recipe, and warnings: of what is ignored, and of unusual values that have no effect."""
    found = dict(_leaves(content, table))
    for path, value in found.items():
        require_fit(path, value, table[table[path].place or path])
    fields = Fields({path: value for path, value in found.items() if not table[path].place}, table)
    for path, value in found.items():
        if (place := table[path].place) and fields.given.setdefault(place, value) != value:
            raise ConfigError(f"{path} = {shown_value(value)} must be {place} = {shown_value(fields[place])}.")
    ignored: dict[str, list[str]] = {}
    unusual = []
    for path, value in found.items():
        row = table[path]
        if row.reported and value is not None:
            ignored.setdefault(row.reported, []).append(path)
        elif row.usual is not None and value not in row.usual:
            unusual.append(f"{path} = {shown_value(value)}: {row.unused}")
    warnings = [f"{reason}: {', '.join(paths)}" for reason, paths in ignored.items()]
    if unusual:
        warnings.append(f"not the published value, and without effect here: {'; '.join(unusual)}")
    return fields, warnings


def fields_at(content: Mapping[str, Any], table: Table, paths: Sequence[str]) -> Fields:
    """Some fields of a recipe alone: those that identify the run, before all are held to the table of that run."""
    found = {}
    for path in paths:
        value: Any = content
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            require_fit(path, value, table[path])
            found[path] = value
    return Fields(found, table)


def _leaves(content: Mapping[str, Any], table: Table, section: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        path = f"{section}.{name}" if section else name
        if path in table:
            yield path, value
        elif any(known.startswith(f"{path}.") for known in table):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path} = {value!r}, but it is a section: [{path}].")
            yield from _leaves(value, table, path)
        else:
            raise unknown_field(path, table)


def unknown_field(path: str, table: Table) -> ConfigError:
    """The error for a field that no recipe has: near names of its section, or the field of that name elsewhere."""
    section, _, name = path.rpartition(".")
    elsewhere = sorted(known for known in table if known.rpartition(".")[2] == name)
    start = f"{section}." if section else ""
    inside = {known[len(start) :].partition(".")[0] for known in table if known.startswith(start)}
    hint = f" Did you mean {' or '.join(elsewhere[:3])}?" if elsewhere else near(name, inside)
    return ConfigError(f"{path}: recipes have no such field.{hint}")


def require_fit(path: str, value: Any, row: Row) -> None:
    """Raise for a value that the row refuses, or that is of another type than its default."""
    if row.values:
        if not any(value == one and type(value) is type(one) for one in row.values):
            shown = " or ".join(map(shown_value, row.values))
            raise ConfigError(f"{path} = {shown_value(value)}, but here it can only be {shown}. {row.cure}.")
    elif row.default is not None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number if isinstance(row.default, float) else type(value) is type(row.default)):
            kind = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
            raise ConfigError(f"{path} = {shown_value(value)}, but it is {kind[type(row.default)]}.")
    _require_bounds(path, value, row)


def _require_bounds(path: str, value: Any, row: Row) -> None:
    if row.least is not None and not (type(value) is int and value >= row.least):
        raise ConfigError(f"{path} = {shown_value(value)}, but it is a whole number, {row.least} at least.")
    if row.above is not None and not (type(value) in (int, float) and row.above < value < math.inf):
        raise ConfigError(f"{path} = {shown_value(value)}, but it is a number above {row.above:g}.")


def require_one_of(path: str, value: Any, names: Mapping[str, Any] | Sequence[str], problem: str = "") -> None:
    """Raise for a value that is none of the names, with near ones."""
    if value not in names:
        raise ConfigError(f"{path} = {shown_value(value)}{problem}.{near(str(value), names)}")


def shown_value(value: Any) -> str:
    """The value as a recipe writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """The overrides of a command line that set the keys; one that begins with + adds its key."""
    return [f"{key}={_as_text(value)}" for key, value in settings.items()]


def _as_text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_as_text(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_as_text, value)) + "]"
    return repr(value)


def sharded(shards: int) -> dict[str, Any]:
    """A model in so many parts, each on a GPU; -1: over all GPUs."""
    return {
        "model.config.fsdp_shard_size": 0 if shards == 1 else shards,
        "trainer.distributed_parallelism": "ddp" if shards == 1 else "fsdp",
    }


def workers(number: int, gpus_here: int) -> dict[str, Any]:
    """Rollouts on so many workers of Ray, where GPUs of their own play."""
    node = {"_target_": "cosmos_predict2.rl.episodes.ray_rollout.RayRollout", "num_workers": number}
    return {"model.config.rollout": {**node, "num_gpus": 1.0 if gpus_here else 0.0}}
