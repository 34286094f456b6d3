# SPDX-License-Identifier: Apache-2.0
"""The override list of a command line: where it begins, and what each item asks for.

Hydra's grammar parses the items. Its errors about a comma, a quote or an equals sign too many are explained here.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from imaginaire.errors import ConfigError, near

FLAGS = ("--config", "--list", "--dryrun", "--debug", "--help", "-h")
WITH_VALUE = ("--config",)
# What published commands remove, and is not there to be removed: loaders here have no such list.
ABSENT_ALREADY = ("dataloader_train.dataloaders", "dataloader_val.dataloaders")
RENAMED = {"data_train": "dataloader_train", "data_val": "dataloader_val"}  # both spellings are in guides


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(flags, overrides) of a command line: cut at the first bare ``--``, else before the first word without a dash."""
    arguments = list(argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    first = 0
    while first < cut and arguments[first].startswith("-"):
        first += 2 if arguments[first] in WITH_VALUE else 1
    first = min(first, cut)
    flags, overrides = arguments[:first], arguments[first:cut] + arguments[cut + 1 :]
    for word in overrides:
        _refuse_flag(word)
    return flags, overrides


def _refuse_flag(word: str) -> None:
    if not word.startswith("-"):
        return
    name = word.partition("=")[0]
    if word == "--":
        raise ConfigError("A second '--' stands among the overrides. Give one, between the flags and the overrides.")
    if name in FLAGS:
        flag = f"{word}{' PATH' if word in WITH_VALUE else ''}"
        raise ConfigError(
            f"{name} stands among the overrides, but it is a flag and belongs before them:"
            f" python -m scripts.train {flag} -- key=value ..."
        )
    raise ConfigError(f"'{word}' stands among the overrides, but an override is key=value.{_instead(word)}")


def unknown_flag(word: str, overrides: Sequence[str]) -> ConfigError:
    """The error for a word with a dash that is none of the flags."""
    value = f"={overrides[0]}" if overrides and "=" not in word + overrides[0] else ""
    return ConfigError(f"unknown flag {word.partition('=')[0]}.{_instead(word + value)}")


def _instead(word: str) -> str:
    """What a word with a dash was probably meant as: a flag, or an override such as ``experiment=NAME``."""
    name, _, value = word.lstrip("-").partition("=")
    hint = near(f"--{name}", FLAGS)
    if hint.startswith(" Did") or not (value or name == "experiment"):
        return hint
    return f" Overrides have no dashes and come after the flags: -- {name}={value or 'NAME'}"


@dataclass(frozen=True)
class Item:
    """One override: ``key=value``, ``+key=value`` (adds), ``++key=value`` (sets or adds) or ``~key`` (deletes)."""

    text: str  # as Hydra shall see it
    key: str
    value: Any
    sign: str  # "", "+", "++" or "~"

    @property
    def removes(self) -> bool:
        """Whether it deletes a key or sets it to null."""
        return self.value is None and self.sign in ("", "~")

    @property
    def is_choice(self) -> bool:
        """Whether the value could choose entries of a group: a name or a list of names."""
        names = self.value if isinstance(self.value, list) else [self.value]
        return all(isinstance(name, str) for name in names) and self.value != ""


_SIGNS = {
    OverrideType.CHANGE: "",
    OverrideType.ADD: "+",
    OverrideType.FORCE_ADD: "++",
    OverrideType.DEL: "~",
}

_QUOTING = (
    " A value with a comma, '=', '(', ')', '[', '{', '#', a leading '~' or a letter beyond ASCII needs quotes of"
    " its own inside the shell's: 'key=\"value\"'. A list is key=[a,b]."
)


def parse(overrides: Sequence[str], experiments: Sequence[str] = ()) -> list[Item]:
    """The items of an override list, renamed where guides use another spelling; ConfigError for what cannot be read.

    ``experiments`` are the names that a word without a key may have been meant as.
    """
    parser = OverridesParser.create()
    return [_parse_one(parser, text, experiments) for text in overrides]


def _parse_one(parser: OverridesParser, text: str, experiments: Sequence[str]) -> Item:
    if not text.strip():
        raise ConfigError("An override is empty. Is a shell variable unset? An override is key=value.")
    if text.strip() in ("experiment=", "experiment=''", 'experiment=""', "+experiment="):
        raise ConfigError("experiment= is empty; is EXP set?")
    if "=" not in text and not text.startswith("~"):
        hint = _instead_of_word(text, experiments)
        raise ConfigError(f"'{text}' is not an override: it must be key=value, +key=value or ~key.{hint}")
    try:
        override: Override = parser.parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0].partition(" expecting ")[0]
        raise ConfigError(f"The override {text} cannot be read ({reason}).{_QUOTING}") from error
    if override.is_sweep_override():
        key, _, given = text.partition("=")
        as_list = "" if "(" in given else f" For a list write '{key}=[{given}]'."
        raise ConfigError(
            f"The override {text} has a comma or a sweep in its value and would mean several runs.{as_list}"
            f" For text write '{key}=\"{given}\"'. The outer quotes are for the shell."
        )
    key = override.key_or_group
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        raise ConfigError(f"The override {text} has no effect: this program sets up Hydra by itself. Leave it out.")
    if override.package is not None:
        raise ConfigError(f"The override {text} gives a package with '@', which is not supported. Leave '@...' out.")
    head, dot, tail = key.partition(".")
    renamed = RENAMED.get(head.lstrip("/"), head.lstrip("/")) + dot + tail
    value = override.value() if override.value_type is not None else None
    return Item(text=text.replace(key, renamed, 1), key=renamed, value=value, sign=_SIGNS[override.type])


def _instead_of_word(text: str, experiments: Sequence[str]) -> str:
    if f"--{text}" in FLAGS:
        return f" The flag is --{text}, before the overrides."
    close = difflib.get_close_matches(text, experiments, n=1)
    return f" Did you mean experiment={close[0]}?" if close else ""
