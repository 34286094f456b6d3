# SPDX-License-Identifier: Apache-2.0
"""The override list of a command line: where it begins, and its items as Hydra's grammar reads them."""

import difflib
import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from imaginaire.errors import ConfigError, near
from imaginaire.renamed import KEYS

FLAGS = ("--import", "--config", "--list", "--dryrun", "--debug", "--help", "-h")
WITH_VALUE = ("--import", "--config")
# What published commands remove, and is not there to be removed: loaders here have no such list.
ABSENT_ALREADY = ("dataloader_train.dataloaders", "dataloader_val.dataloaders")
RENAMED = {"data_train": "dataloader_train", "data_val": "dataloader_val"}  # both spellings are in guides
_FIRST = re.compile(r"^([~+]*)/?(\w+)")  # sign and first name of an override


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(flags, overrides) of a command line: cut at the first bare ``--``, else before the first word without a dash."""
    arguments = list(argv)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    first = 0
    while first < cut and arguments[first].startswith("-"):
        first += 2 if arguments[first] in WITH_VALUE else 1
    first = min(first, cut)
    overrides = arguments[first:cut] + arguments[cut + 1 :]
    for word in overrides:
        if word.startswith("-"):
            raise unknown_flag(word)
    return arguments[:first], overrides


def unknown_flag(word: str, overrides: Sequence[str] = ()) -> ConfigError:
    """The error for a word with a dash that is no flag, or not before the overrides."""
    name, _, value = word.lstrip("-").partition("=")
    if f"--{name}" in FLAGS:
        return ConfigError(f"{word} is a flag, but stands among the overrides. Flags come first: {word} -- key=VALUE.")
    if not value and overrides and "=" not in overrides[0]:
        value = overrides[0]
    hint = near(f"--{name}", FLAGS)
    if (value or name == "experiment") and "Did you mean" not in hint:
        hint = f" Overrides have no dashes and come after the flags: -- {name}={value or 'NAME'}"
    return ConfigError(f"unknown flag {word.partition('=')[0]}.{hint}")


_QUOTING = (
    " A value with a comma, '=', '(', ')', '[', '{', '#', a leading '~' or a letter beyond ASCII needs quotes of"
    " its own inside the shell's: 'key=\"value\"'. A list is 'key=[a,b]'."
)


def parse(overrides: Sequence[str], experiments: Sequence[str] = ()) -> list[Override]:
    """The items of an override list, renamed where guides use another spelling; ConfigError for what cannot be read.

    ``experiments`` are the names that a word without a key may have been meant as.
    """
    parser = OverridesParser.create()
    return [_parse_one(parser, text, experiments) for text in overrides]


def _parse_one(parser: OverridesParser, text: str, experiments: Sequence[str]) -> Override:
    if "=" not in text and not text.startswith("~"):
        close = difflib.get_close_matches(text, experiments, n=1)
        hint = f" Did you mean experiment={close[0]}?" if close else " Is a shell variable unset?"
        raise ConfigError(f"'{text}' is not an override: it must be key=value, +key=value or ~key.{hint}")
    try:
        text = _FIRST.sub(lambda m: m[1] + RENAMED.get(m[2], m[2]), text, count=1)
        override = parser.parse_override(text)
        if (key := KEYS.get(override.key_or_group)) is not None:
            override = parser.parse_override(text.replace(override.key_or_group, key, 1))
    except HydraException as error:
        reason = str(error).splitlines()[0].partition(" expecting ")[0]
        raise ConfigError(f"The override {text} cannot be read ({reason}).{_QUOTING}") from error
    if override.is_sweep_override():
        raise ConfigError(f"The override {text} would mean several runs.{_QUOTING}")
    key = override.key_or_group
    if override.package is not None or key == "hydra" or override.is_hydra_override():
        raise ConfigError(f"The override {text} is for Hydra itself or gives a package with '@': leave it out.")
    if key == "experiment" and override.value() == "":
        raise ConfigError("experiment= is empty; is EXP set?")
    return override
