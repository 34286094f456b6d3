# SPDX-License-Identifier: Apache-2.0
"""Findings of checks: of a configuration before anything is built (``check`` of a class), or of a machine (doctor).

A model, a data set or another class that a lazy call of the configuration names may be `Checked`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, runtime_checkable

from imaginaire.errors import UserError

if TYPE_CHECKING:  # the doctor also runs where packages of the configuration are missing
    from imaginaire.config.schema import Config

Level = Literal["note", "warning", "error"]
_ORDER: tuple[Level, ...] = ("note", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked. Only a finding with level "error" stops a run.

    ``key`` is the full key of the configuration, or AREA/NAME of a machine; ``cure`` is what the user can do.
    """

    key: str
    text: str
    level: Level = "note"
    cure: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}" + (f". {self.cure}" if self.cure else "")


def graded(key: str, text: str, level: Level, cure: str) -> Finding:
    """A finding whose cure applies only if it is more than a note."""
    return Finding(key, text, level, "" if level == "note" else cure)


def error(key: str, text: str, cure: str = "") -> Finding:
    return Finding(key, text, "error", cure)


def warning(key: str, text: str, cure: str = "") -> Finding:
    return Finding(key, text, "warning", cure)


def errors(key: str, texts: Iterable[str | None]) -> Iterator[Finding]:
    """An error for each text; None is passed over."""
    return (error(key, text) for text in texts if text)


def refusals(key: str, *looks: Callable[[], object]) -> Iterator[Finding]:
    """An error for each look that raises one of our errors."""
    for look in looks:
        try:
            look()
        except UserError as refused:
            yield error(key, str(refused))


@dataclass(frozen=True)
class CheckContext:
    """The values that a check may use besides the arguments of its own lazy call.

    ``training`` and ``validation`` are all mappings of the loaders that will be built, by full key, each with its class
    as ``_target_`` (None for a plain mapping).
    """

    key: str = ""  # of the lazy call that is checked
    config: "Config | None" = None  # None outside a run
    world_size: int | None = None  # None: not known yet
    start_path: str | None = None  # checkpoint.load_path of a new run (may be ""); None: the run loads no such weights
    resume_path: str = ""  # the run's newest checkpoint, where the model must be the one that wrote it
    training: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    validation: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@runtime_checkable
class Checked(Protocol):
    """A class with a check of its own (``@classmethod``), which is called before it is built."""

    def check(self, arguments: Mapping[str, Any], context: CheckContext) -> Iterable[Finding]:
        """Findings on the arguments of a lazy call, as the configuration has them.

        A check is quick: it reads headers and names, never data.
        """


def is_checked(target: Any) -> TypeGuard[Checked]:
    """``check`` may also be a member of its own that is no method."""
    return isinstance(target, Checked) and callable(target.check)


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), key=_ORDER.index, default="note")


def as_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """One line per finding below the name of its area, and a last line with the counts."""
    shown = {"note": "ok", "warning": "warning", "error": "ERROR"}
    for area, members in groupby(findings, key=lambda finding: finding.key.partition("/")[0]):
        yield area
        for finding in members:
            yield f"  {shown[finding.level]:7s} {finding.key.partition('/')[2]}: {finding.text}"
            if finding.cure:
                yield f"          -> {finding.cure}"
    counts = {level: sum(finding.level == level for finding in findings) for level in _ORDER}
    verdict = "something is wrong" if counts["error"] else "healthy"
    yield f"{verdict}: {counts['note']} ok, {counts['warning']} warnings, {counts['error']} errors"


def as_data(findings: Sequence[Finding]) -> dict[str, Any]:
    """The findings as plain data, for JSON."""
    return {"level": worst(findings), "findings": [asdict(finding) for finding in findings]}
