# SPDX-License-Identifier: Apache-2.0
"""Findings of a check, for people and for programs."""

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any

from cosmos_predict2.tools.check.clips import ClipFacts, file_of, kind_of
from cosmos_predict2.tools.check.dataset import DatasetReport

MOST_FAULTS = 50
_MOST_ROWS = 8


def as_text(report: DatasetReport, most_faults: int = MOST_FAULTS) -> str:
    """A few lines for each folder, then its notes and faults."""
    lines = list(_lines(report))
    faults = report.all_faults()
    if faults:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(map(kind_of, faults)).most_common())
        lines += ["", f"{len(faults)} fault{'s' if len(faults) > 1 else ''}: {kinds}"]
        lines += [f"  {kind_of(fault)}: {fault.text}" for fault in faults[:most_faults]]
        if len(faults) > most_faults:
            lines.append(f"  ... and {len(faults) - most_faults} more; --json FILE writes all of them")
    else:
        lines += ["", "no faults"]
    return "\n".join(lines)


def as_json(report: DatasetReport) -> dict[str, Any]:
    """Everything, without the single clips."""
    readable = [facts for facts in report.clips if facts.height]
    return {
        "folder": report.folder,
        "form": report.form,
        "counts": report.counts,
        "encoder": report.encoder,
        "seconds": round(_seconds(readable), 3),
        "num_frames": dict(_table(readable, "num_frames")),
        "sizes": {f"{height}x{width}": n for (height, width), n in _table(readable, "height", "width")},
        "fps": dict(_table([facts for facts in readable if facts.fps], "fps")),
        "faults": [{"file": file_of(f), "kind": kind_of(f), "message": f.text} for f in report.faults],
        "notes": report.notes,
        "actions": [table.to_dict() for table in report.actions],
        "parts": [as_json(part) for part in report.parts],
    }


def _lines(report: DatasetReport) -> Iterator[str]:
    yield f"{report.folder}: {report.form}"
    if report.counts:
        yield f"  counts    {', '.join(f'{count} {what}' for what, count in report.counts.items())}"
    if report.encoder:
        yield f"  encoder   {report.encoder}"
    readable = [facts for facts in report.clips if facts.height]
    if readable and report.form != "image":
        frames = sorted(facts.num_frames for facts in readable)
        length = f"{_seconds(readable) / 60:.1f} min" if _seconds(readable) >= 60 else f"{_seconds(readable):.1f} s"
        yield f"  frames    {frames[0]} to {frames[-1]}, median {median(frames):g}; {length} in all"
        yield f"  fps       {_rows([(f'{fps:g}', n) for fps, n in _table(readable, 'fps')], 'clips')}"
    if readable:
        sizes = [(f"height {height}, width {width}", n) for (height, width), n in _table(readable, "height", "width")]
        yield f"  size      {_rows(sizes, 'pictures' if report.form == 'image' else 'clips')}"
    for table in report.actions:
        title, *rows = table.lines()
        yield f"  actions   {title}"
        yield from (f"            {row}" for row in rows)
    for note in report.notes[:_MOST_ROWS]:
        yield f"  note      {note}"
    if len(report.notes) > _MOST_ROWS:
        yield f"  note      ... and {len(report.notes) - _MOST_ROWS} more"
    for part in report.parts:
        yield from _lines(part)


def _rows(table: list[tuple[str, int]], what: str) -> str:
    more = f"; {len(table) - _MOST_ROWS} more" if len(table) > _MOST_ROWS else ""
    return "; ".join(f"{value} ({count} {what})" for value, count in table[:_MOST_ROWS]) + more


def _table(facts: list[ClipFacts], *names: str) -> list[tuple[Any, int]]:
    """How often which values occur, the most frequent first; of several names tuples of them."""
    values = [tuple(round(getattr(item, name), 3) for name in names) for item in facts]
    return Counter(value if len(names) > 1 else value[0] for value in values).most_common()


def _seconds(facts: list[ClipFacts]) -> float:
    return sum(item.num_frames / item.fps for item in facts if item.fps)
