# SPDX-License-Identifier: Apache-2.0
"""What a look at a machine brings: lines that are in order, worth a note, or at fault, with their cure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

Level = Literal["ok", "note", "fault"]
_ORDER: tuple[Level, ...] = ("ok", "note", "fault")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``cure`` says what to do, where something can be done."""

    area: str
    name: str
    value: str
    level: Level = "ok"
    cure: str = ""


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), key=_ORDER.index, default="ok")


def as_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """One line per finding below the name of its area, and a last one that counts."""
    for area, members in groupby(findings, key=lambda finding: finding.area):
        yield area
        for finding in members:
            level = finding.level.upper() if finding.level == "fault" else finding.level
            yield f"  {level:5s} {finding.name}: {finding.value}"
            if finding.cure:
                yield f"        -> {finding.cure}"
    counts = {level: sum(finding.level == level for finding in findings) for level in _ORDER}
    verdict = "something is wrong" if counts["fault"] else "healthy"
    yield f"{verdict}: {counts['ok']} ok, {counts['note']} notes, {counts['fault']} faults"


def as_data(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for programs."""
    return {"level": worst(findings), "findings": [asdict(finding) for finding in findings]}
