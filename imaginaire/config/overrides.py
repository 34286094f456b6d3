# SPDX-License-Identifier: Apache-2.0
"""The override list of a command line: where it begins, and what each item asks for.

Hydra's grammar parses the items. What it says about a comma, a quote or an equals sign too many is explained here.
"""

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
    flags: list[str] = []
    rest = iter(range(cut))
    overrides: list[str] = []
    for i in rest:
        word = arguments[i]
        if not word.startswith("-"):
            overrides = arguments[i:cut]
            break
        flags.append(word)
        if word in WITH_VALUE and i + 1 < cut:
            flags.append(arguments[next(rest)])
    overrides += arguments[cut + 1 :]
    for word in overrides:
        _refuse_flag(word, overrides)
    return flags, overrides


def _refuse_flag(word: str, overrides: Sequence[str]) -> None:
    name = word.partition("=")[0]
    if not word.startswith("-"):
        return
    if word == "--":
        raise ConfigError("A second '--' stands among the overrides. Give one, between the flags and the overrides.")
    if name in FLAGS:
        raise ConfigError(
            f"{name} stands among the overrides, but it is a flag and belongs before them:"
            f" python -m scripts.train {word}{' PATH' if word in WITH_VALUE else ''} -- key=value ..."
        )
    raise ConfigError(f"'{word}' stands among the overrides, but an override is key=value.{near(name, FLAGS)}")


def unknown_flag(word: str) -> ConfigError:
    """The error for a word with a dash that is none of the flags."""
    name = word.partition("=")[0]
    return ConfigError(f"unknown flag {name}.{near(name, FLAGS)}")


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


def parse(overrides: Sequence[str]) -> list[Item]:
    """The items of an override list, renamed where guides use another spelling; ConfigError for what cannot be read."""
    parser = OverridesParser.create()
    return [_parse_one(parser, text) for text in overrides]


def _parse_one(parser: OverridesParser, text: str) -> Item:
    if not text.strip():
        raise ConfigError("An override is empty. Is a shell variable unset? An override is key=value.")
    if text.strip() in ("experiment=", "experiment=''", 'experiment=""', "+experiment="):
        raise ConfigError("experiment= is empty; is EXP set?")
    if "=" not in text and not text.startswith("~"):
        raise ConfigError(f"'{text}' is not an override: it must be key=value, +key=value or ~key.{_flag_hint(text)}")
    try:
        override: Override = parser.parse_override(text)
    except HydraException as error:
        reason = str(error).splitlines()[0].partition(" expecting ")[0]
        raise ConfigError(f"The override {text} cannot be read ({reason}).{_QUOTING}") from error
    if override.is_sweep_override():
        key, _, value = text.partition("=")
        as_list = "" if "(" in value else f" For a list write '{key}=[{value}]'."
        raise ConfigError(
            f"The override {text} has a comma or a sweep in its value and would mean several runs.{as_list}"
            f" For text write '{key}=\"{value}\"'. The outer quotes are for the shell."
        )
    key = override.key_or_group
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        raise ConfigError(f"The override {text} has no effect: this program sets up Hydra by itself. Leave it out.")
    if override.package is not None:
        raise ConfigError(f"The override {text} gives a package with '@', which is not supported. Leave '@...' out.")
    head, dot, tail = key.partition(".")
    head = head.lstrip("/")
    if (RENAMED.get(head, head) + dot + tail) != key:
        renamed = RENAMED.get(head, head) + dot + tail
        text = text.replace(key, renamed, 1)
        key = renamed
    return Item(text=text, key=key, value=_value(override), sign=_SIGNS[override.type])


def _flag_hint(text: str) -> str:
    hint = near(text, [flag.lstrip("-") for flag in FLAGS])
    return f" The flag is --{text}, before the overrides." if f"--{text}" in FLAGS else hint if "Did" in hint else ""


def _value(override: Override) -> Any:
    return override.value() if override.value_type is not None else None
