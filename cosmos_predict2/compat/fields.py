# SPDX-License-Identifier: Apache-2.0
"""Tables of a recipe's fields, and a recipe held to its table.

A table has a row for each field by its dotted path, which says what becomes of it here. A field without a row is an
error, also in a section that the run does not use.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from imaginaire.errors import ConfigError, near

ALWAYS, OF_RL, SUPERVISED = "always", "rl", "supervised"


@dataclass(frozen=True)
class To:
    """Sets ``key`` here, to the recipe's value or to the default that it has there."""

    key: str
    default: Any
    convert: Callable[[Any], Any] | None = None
    when: str = ALWAYS  # which runs have the key


@dataclass(frozen=True)
class Given:
    """Sets ``key`` where the recipe has the field; else ours has its usual value, for the reason."""

    key: str
    reason: str
    when: str = ALWAYS


@dataclass(frozen=True)
class Read:
    """Is read by the translation itself, together with other fields."""

    default: Any
    what: str  # becomes of it


@dataclass(frozen=True)
class Only:
    """Is accepted at these values, the first of which is the default; else refused, with the cure."""

    values: tuple[Any, ...]
    cure: str


@dataclass(frozen=True)
class Unused:
    """Has no effect here, for the reason; everything below it neither."""

    reason: str


@dataclass(frozen=True)
class Moved:
    """Another place of the field ``path``, where files of another version have it."""

    path: str


@dataclass(frozen=True)
class Leftover:
    """Belongs to another environment, ``of``; it is ignored, and reported once where it is set."""

    of: str


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


Row = To | Given | Read | Only | Unused | Moved | Leftover
Table = Mapping[str, Row]


def under(section: str, rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows with the section's name before theirs."""
    return {f"{section}.{name}": row for name, row in rows.items()}


class Fields:
    """The fields of a recipe that were held to a table: what was given, and the defaults of the rest."""

    def __init__(self, given: Mapping[str, Any], table: Table) -> None:
        self.given = dict(given)
        self.table = table
        self.missing: list[str] = []  # files that a field names and this machine lacks, a sentence on each

    def __getitem__(self, path: str) -> Any:
        """The value, or its default there."""
        row = self.table[path]
        default = row.values[0] if isinstance(row, Only) else getattr(row, "default", None)
        return self.given.get(path, default)

    def has(self, section: str) -> bool:
        """Whether the recipe has the field, or one of the section."""
        return any(path == section or path.startswith(f"{section}.") for path in self.given)

    def settings(self, run: str) -> dict[str, Any]:
        """What the rows set for a kind of run (OF_RL, SUPERVISED), by key."""
        found = {}
        for path, row in self.table.items():
            if not isinstance(row, (To, Given)) or row.when not in (ALWAYS, run):
                continue
            if isinstance(row, To):
                found[row.key] = _converted(path, self[path], row)
            elif path in self.given:
                found[row.key] = self.given[path]
        return found


def _converted(path: str, value: Any, row: To) -> Any:
    try:
        return row.convert(value) if row.convert else value
    except (TypeError, ValueError):
        raise ConfigError(f"{path} = {shown_value(value)}, but it is a number.") from None


def read_fields(
    content: Mapping[str, Any],
    table: Table,
    ignored: Collection[str] = (),
    published: Mapping[str, Collection[Any]] | None = None,
) -> tuple[Fields, list[str]]:
    """The fields of a recipe, and warnings; ``ignored`` are paths without effect there, which published files have.

    ``published`` are the values that fields without effect have in published files: others are reported.
    """
    given: dict[str, Any] = {}
    moved, leftovers, warnings = [], [], []
    for path, value in _leaves(content, table, ignored):
        row = table.get(path)
        if row is None:
            warnings.append(f"{path}: Cosmos-RL ignores this field, and so does this run")
        elif isinstance(row, Moved):
            moved.append((path, row.path, value))
        elif isinstance(row, Leftover):
            leftovers += [f"{path} ({row.of})"] if value is not None else []
        else:
            require_fit(path, value, row)
            given[path] = value
    for path, place, value in moved:
        require_fit(path, value, table[place])
        if given.setdefault(place, value) != value:
            raise ConfigError(f"{path} = {shown_value(value)} must be {place} = {shown_value(given[place])}.")
    if leftovers:
        warnings.append(f"ignored, since these fields belong to another environment: {', '.join(leftovers)}")
    unusual = [
        f"{path} = {shown_value(given[path])}: {row.reason}"
        for path, usual in (published or {}).items()
        if isinstance(row := table[path], Unused) and path in given and given[path] not in usual
    ]
    if unusual:
        warnings.append(f"not the published value, and without effect here: {'; '.join(unusual)}")
    return Fields(given, table), warnings


def fields_at(content: Mapping[str, Any], table: Table, paths: Collection[str]) -> Fields:
    """Some fields of a recipe alone: what says which run it is, before all are held to the table of that run."""
    given = {}
    for path in paths:
        value: Any = content
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            require_fit(path, value, table[path])
            given[path] = value
    return Fields(given, table)


def _leaves(
    content: Mapping[str, Any], table: Table, ignored: Collection[str], section: str = ""
) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        path = f"{section}.{name}" if section else name
        if path in table or path in ignored:
            yield path, value
        elif any(known.startswith(f"{path}.") for known in table):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path} = {value!r}, but it is a section: [{path}].")
            yield from _leaves(value, table, ignored, path)
        else:
            raise unknown_field(path, table)


def unknown_field(path: str, table: Collection[str]) -> ConfigError:
    """The error for a field that no recipe has: near names of its section, or the field of that name elsewhere."""
    section, _, name = path.rpartition(".")
    elsewhere = sorted(known for known in table if known.rpartition(".")[2] == name)
    start = f"{section}." if section else ""
    inside = {known[len(start) :].partition(".")[0] for known in table if known.startswith(start)}
    hint = f" Did you mean {' or '.join(elsewhere[:3])}?" if elsewhere else near(name, inside)
    return ConfigError(f"{path}: recipes have no such field.{hint}")


def require_fit(path: str, value: Any, row: Row) -> None:
    """Raise for a value that the row refuses, or that is of another type than its default."""
    if isinstance(row, Only):
        if not any(value == one and type(value) is type(one) for one in row.values):
            shown = " or ".join(map(shown_value, row.values))
            raise ConfigError(f"{path} = {shown_value(value)}, but here it can only be {shown}. {row.cure}.")
    elif isinstance(row, (To, Read)) and not _is_like(value, row.default):
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "a text", list: "a list"}
        raise ConfigError(f"{path} = {shown_value(value)}, but it is {kind[type(row.default)]}.")


def _is_like(value: Any, default: Any) -> bool:
    if default is None:
        return True
    if isinstance(default, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is type(default)


def shown_value(value: Any) -> str:
    """As a recipe has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def require_same(fields: Fields, path: str, other: str) -> None:
    """Raise where a recipe gives a field another value than one that it must equal has."""
    if path in fields.given and fields[path] != fields[other]:
        raise ConfigError(f"{path} = {fields[path]} must be {other} = {fields[other]}.")


def override(key: str, value: Any) -> str:
    """The override of a command line that sets the key; one that begins with + adds it."""
    return f"{key}={_as_text(value)}"


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
