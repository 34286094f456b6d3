# SPDX-License-Identifier: Apache-2.0
"""The base of every command: flags whose mistakes are one line, errors that users can mend without a traceback.

Exit codes: 0 done, 1 faults were found or some items failed, 2 wrong flags, settings or data, 130 interrupted.
"""

import argparse
import importlib
import inspect
import io
import math
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from imaginaire import log as logs
from imaginaire.errors import ConfigError, UserError, disk_fault, first_line, near

T = TypeVar("T")


MOST = 2**31 - 1  # of a number of a flag ...
MOST_OF: dict[str, float] = {"seed": 2**63 - 1, "workers": 1024, "timeout": math.inf}  # ... other than these


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults other than empty ones and keeps the lines of description and epilog."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        if action.default in (None, False, "", [], ()) or "default" in text:
            return text
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """A parser with ``--import``; a wrong flag is a line with near names, and older spellings of flags are accepted."""

    older: Mapping[str, str] = {}  # older and published spellings -> the flags that the help lists

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        text = "a module of your own to import first, for what it makes buildable; may be repeated"
        self.add_argument("--import", default=[], action="append", type=imported, metavar="MODULE", help=text)

    def command(self) -> str:
        """The command that started the program, for the records of what it makes."""
        return shlex.join([*self.prog.split(), *sys.argv[1:]])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(self._renamed(sys.argv[1:] if args is None else list(args)), namespace)

    def format_help(self) -> str:
        pairs = ", ".join(f"{old} for {new}" for old, new in self.older.items())
        return super().format_help() + (f"\nolder spellings, also accepted: {pairs}\n" if pairs else "")

    def _renamed(self, words: list[str]) -> list[str]:
        """The arguments in today's spelling: dashes in names are underscores, H,W is two words where two are taken."""
        renamed: list[str] = []
        flags = self._option_string_actions
        action: argparse.Action | None = None
        for place, word in enumerate(words):
            if word == "--":
                return renamed + words[place:]
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                plain = f"--{name[2:].replace('-', '_')}"
                candidates = (name, self.older.get(name, ""), plain, self.older.get(plain, ""))
                name = next((candidate for candidate in candidates if candidate in flags), name)
                action = flags.get(name)
                is_pair = equals and action is not None and action.nargs == 2
                renamed += [name, *value.split(",")] if is_pair else [name + equals + value]
            else:
                renamed += word.split(",") if action is not None and action.nargs == 2 else [word]
                action = None
        return renamed

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """The value of a flag: numbers are finite and in bounds, and what must be given is not empty."""
        value: Any = super()._get_value(action, arg_string)  # type: ignore[misc]
        most = MOST_OF.get(action.dest, MOST)
        if isinstance(value, int | float) and not -most <= value <= most:
            raise argparse.ArgumentError(action, f"{arg_string} is not a number up to {most}")
        if action.required and value == "":
            raise argparse.ArgumentError(action, "it is empty")
        return value

    def error(self, message: str) -> NoReturn:
        if flag := re.search(r"unrecognized arguments: (--[^\s=]+)", message):
            shown = [action.option_strings for action in self._actions if action.help != argparse.SUPPRESS]
            flags = [*(name for names in shown for name in names), *self.older]
            hint = near(flag[1], flags)
            message = f"unknown flag {flag[1]}" + (f".{hint}" if "Did you mean" in hint else "")
        self.exit(2, f"error: {message}{'' if message.endswith('?') else '.'} See --help.\n")


def parser(
    name: str, description: str | None, epilog: str | None = None, older: Mapping[str, str] | None = None
) -> Parser:
    """The parser of ``python -m name``: no abbreviated flags, defaults in the help; ``older`` spellings of flags."""
    made = Parser(
        prog=f"python -m {name}", description=description, epilog=epilog, formatter_class=Help, allow_abbrev=False
    )
    made.older = older or {}
    return made


def at_least(least: int, most: float = MOST_OF["seed"]) -> Callable[[str], int]:
    """The ``type`` of a flag that takes whole numbers from ``least`` on."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,20}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
        if int(text) > most:
            raise argparse.ArgumentTypeError(f"{text} is above {most}")
        return int(text)

    return parse


def common(add: Callable[..., Any], *names: str) -> None:
    """Add flags that many programs have."""
    switch, number = {"action": "store_true"}, at_least(0)
    pairs: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "KEY=VALUE"}
    options: dict[str, dict[str, Any]] = {
        "device": dict(help="cpu or cuda (default: a GPU where there is one)"),
        "dry_run": dict(help="log what would be done, and do nothing", **switch),
        "load_ema": dict(help="take the averaged weights (net_ema.)", **switch),
        "options": dict(help="of the policy, as model.config.policy has them", **pairs),
        "overwrite": dict(help="replace what is there", **switch),
        "seed": dict(type=number, default=0, help="of what is drawn"),
        "shard": dict(type=shard, default=(0, 1), metavar="I/N", help="do the I-th of N parts (default: all)"),
        "workers": dict(type=number, metavar="N", help="processes (default: one a core; 0: only this one)"),
    }
    for name in names:
        add(f"--{name}", **options[name])


def key_values(words: Sequence[str], flag: str) -> dict[str, Any]:
    """The values of a flag that takes KEY=VALUE words, as YAML has them."""
    from imaginaire.config.lazy_config import plain_data

    found = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name.isidentifier():
            raise ConfigError(f"{flag} {word}: expected KEY=VALUE, such as unnorm_key=libero_10_no_noops.")
        found[name] = plain_data(value, f"{flag} {word}")
    return found


def above_zero(text: str) -> float:
    """The ``type`` of a flag that takes finite numbers above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def local_output(text: str) -> str:
    """The ``type`` of a flag that names a file or folder to write here: one that cannot be made is refused before the
    work, not after it. Nothing is left of the trial."""
    from imaginaire import storage

    if storage.is_remote(text):
        raise argparse.ArgumentTypeError(f"{text} is not on this machine: give a local path, and copy it afterwards")
    path = os.path.abspath(text)
    if not text or any(len(os.fsencode(part)) > 255 for part in path.split("/")):
        raise argparse.ArgumentTypeError(f"'{text[:80]}' is no name of a file or folder")
    place = path if os.path.isdir(path) else os.path.dirname(path)
    while not os.path.exists(place):
        place = os.path.dirname(place)
    try:
        with tempfile.TemporaryFile(dir=place):
            return text
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {place}: {error.strerror}") from error


def file_to_write(text: str) -> str:
    """The ``type`` of a flag as `local_output`, of a file."""
    if os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    return local_output(text)


def folder_to_write(text: str) -> str:
    """The ``type`` of a flag as `local_output`, of a folder."""
    if os.path.exists(text) and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is a file: name a folder")
    return local_output(text)


def local_folder(text: str) -> Path:
    """The ``type`` of a flag as `folder_to_write`, as a path."""
    return Path(folder_to_write(text))


def shard(text: str) -> tuple[int, int]:
    """The ``type`` of a flag that names the I-th of N parts, counted from 0, as I/N."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise argparse.ArgumentTypeError(f"'{text}' is not I/N with I from 0 to N - 1, as in 0/8")
    return int(match[1]), int(match[2])


def imported(name: str) -> str:
    """The ``type`` of a flag that names a module, which is imported at once, also from the working directory."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        importlib.import_module(name)
    except Exception as error:  # a border: the module is the user's own
        raise argparse.ArgumentTypeError(f"{name} does not import: {type(error).__name__}: {error}") from error
    return name


def flag(default: Any, help: str, **options: Any) -> Any:
    """A field of a dataclass that is a flag, too; ``options`` are those of ``add_argument``, and maybe its ``name``."""
    metadata = {"help": help, **options}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def add_flags(add: Callable[..., Any], cls: Any, **own: Mapping[str, Any]) -> None:
    """A flag for each field of a dataclass that is one; by ``own`` a program changes the options of some."""
    for one in fields(cls):
        if one.metadata:
            default = one.default_factory() if callable(one.default_factory) else one.default
            kind: dict[str, Any] = {"type": type(default)} if isinstance(default, int | float) else {}
            if default is False:
                kind = {"action": "store_true"}
            options = {"default": default, **kind, **one.metadata, **own.get(one.name, {})}
            add(f"--{options.pop('name', one.name)}", **options)


def values_of(cls: type[T], args: argparse.Namespace, **others: Any) -> T:
    """The dataclass with the values of its flags, and with ``others``, which count more."""
    flags = {one.name: getattr(args, one.metadata.get("name", one.name)) for one in fields(cls) if one.metadata}  # type: ignore[arg-type]
    return cls(**{**flags, **others})


def options_of(function: Callable[..., Any], args: argparse.Namespace, **others: Any) -> dict[str, Any]:
    """The flags that are keyword arguments of a function, by name, and ``others``, which count more."""
    parameters = inspect.signature(function).parameters.values()
    names = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    return {**{name: value for name, value in vars(args).items() if name in names}, **others}


_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "Storage size calculation overflowed")


def explained(error: Exception, flags: Mapping[str, Any]) -> str | None:
    """An error that a user can mend, as a sentence; None for one that is more likely a bug of ours."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        paths = [os.path.abspath(text) for text in flags.values() if isinstance(text, str | Path) and str(text)]
        there = os.path.abspath(error.filename) if isinstance(error.filename, str | Path) else "/"
        if there != "/" and any(there.startswith(path) or path.startswith(there) for path in paths):
            return f"{error.filename}: {error.strerror}."  # in or above what a flag names
        return disk_fault(error)
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        return f"there is not enough memory for this: {first_line(error)}. Give smaller numbers."
    return None


def main(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int | None],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse, run, and give the exit code; what a user can mend is one line."""
    args = parser.parse_args(arguments)
    logs.setup()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    try:
        return run(args) or 0
    except (UserError, OSError, MemoryError, RuntimeError) as error:
        if (fault := explained(error, vars(args))) is None or getattr(args, "debug", False):
            raise
        print(f"error: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
