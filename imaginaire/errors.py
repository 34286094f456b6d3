# SPDX-License-Identifier: Apache-2.0
"""Errors that a user can mend. Each message names what was found, what was expected and what to change."""

import difflib
import errno
import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """Common base of everything below: shown as one message, without a traceback."""


class ConfigError(UserError):
    """A wrong configuration key, value, flag or environment."""


class DataError(UserError):
    """A data set that is missing, broken or too small."""


class CheckpointError(UserError):
    """Weights or training state that do not fit, are damaged or are absent."""


class TrainingError(UserError):
    """Training that cannot go on: it diverged, ran out of memory or stopped making progress."""


_OF_THE_DISK = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EISDIR,
    errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP, errno.ETXTBSY,
}  # fmt: skip


def disk_fault(error: OSError) -> str | None:
    """One sentence on what the disk or its permissions refused; None for what is more likely a bug of ours."""
    if error.errno not in _OF_THE_DISK:
        return None
    names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{names}: {error.strerror}." if names else f"{error.strerror}."


def first_line(error: BaseException) -> str:
    """The class of an error of others, and how its text begins."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


MISSHAPEN = (ValueError, TypeError, LookupError, AttributeError)  # of plain data in another form than is read here


@contextmanager
def raised_as(kind: type[UserError], what: str | Path, *causes: type[Exception], cure: str = "") -> Iterator[None]:
    """A context in which errors of these classes become one of ``kind``: what went wrong, the reason, and the cure."""
    try:
        yield
    except causes as error:
        reason = repr(error) if isinstance(error, KeyError) else str(error).strip() or type(error).__name__
        end = "" if reason.endswith((".", "?", "'")) else "."
        raise kind(f"{what}: {reason}{end} {cure}".rstrip()) from error


def near(name: str, known: Iterable[str], limit: int = 12) -> str:
    """ " Did you mean a, b?" with close names, else " Known: a, b, ...", else nothing."""
    names = sorted(set(known))
    return alike(name, names) or (f" Known: {listed(names, limit)}." if names else "")


def alike(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """ " Did you mean a, b?" with close names, else nothing."""
    close = difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=cutoff)
    return f" Did you mean {', '.join(close)}?" if close else ""


def listed(names: Sequence[str], limit: int = 8) -> str:
    """``a, b and 3 more``."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def optional_module(name: str, extra: str) -> Any:
    """A module of an optional package; without it, the error with its cure."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing_package(name.partition(".")[0], extra) from error


def missing_package(package: str, extra: str) -> ConfigError:
    """The error for an optional package that is not installed, with its cure."""
    return ConfigError(f"'{package}' is not installed. Install it from the checkout: pip install -e '.[{extra}]'")
