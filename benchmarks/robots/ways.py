# SPDX-License-Identifier: Apache-2.0
"""The table and the picture of several ways from recordings to a policy, from what `improve_policy` left behind.

    python -m benchmarks.robots.ways runs/drawer_0 runs/drawer_1 runs/plate_0 --picture ways.png

Success is true, of the held-out starts by which nothing was chosen.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from imaginaire import command_line
from imaginaire.errors import ConfigError

STAGES = {"before": "the first clone", "chosen": "the clone that learns", "after": "after learning"}
LATER = "after_{}"  # learning of a later phase
FIGURES = ("true_ends", "within_starts", "greedy_above_sampled")

parser = command_line.parser("benchmarks.robots.ways", __doc__)
add = parser.add_argument
add("ways", nargs="+", type=Path, metavar="FOLDER", help="what --out of improve_policy was")
add("--picture", type=command_line.file_to_write, metavar="FILE", help="draw them, too")


def stages_of(ways: Sequence[Path]) -> dict[str, str]:
    """The stages of which any way has true success, those of later phases too, with their titles."""
    most = 1 + max(len(list(way.glob("phase_*"))) for way in ways)
    later = {LATER.format(n): f"after phase {n}" for n in range(2, most + 1)}
    return STAGES | {stage: title for stage, title in later.items() if any(success(way, [stage]) for way in ways)}


def success(way: Path, stages: Iterable[str]) -> dict[str, Mapping[str, float]]:
    """By stage; a stage that a way did not come to is missing."""
    files = {stage: way / stage / "evaluation.json" for stage in stages}
    return {stage: json.loads(file.read_text())["success"] for stage, file in files.items() if file.is_file()}


def row(way: Path, stages: Iterable[str]) -> str:
    """A line of the table: the gate's figures of the clone, its verdicts, success by stage and what it cost."""
    files = [way / "card.json", *(way / f"phase_{n}/card.json" for n in range(2, 2 + len(list(way.glob("phase_*")))))]
    word, by_stage = json.loads((way / "verdict.json").read_text())["verdict"], success(way, stages)
    # a way that is full may have cards of before
    cards = [json.loads(file.read_text()) for file in files if file.is_file() and word != "full"]
    figures = cards[0]["figures"].get("policy", {}) if cards else {}
    verdicts = [card["verdict"] for card in cards] or [word]
    steps = [json.loads(file.read_text()) for file in (way / "steps").glob("*.json")]
    minutes = sum(step.get("processor_seconds") or 0 for step in steps) / 60
    cells = [way.name, *(_short(figures[name]["value"]) if name in figures else "" for name in FIGURES)]
    cells += [", ".join(verdicts), *(_short(by_stage[one]["rate"]) if one in by_stage else "" for one in stages)]
    return f"| {' | '.join([*cells, f'{minutes:.0f}'])} |"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}".replace("0.", ".", 1)


def draw(path: str, ways: Sequence[Path]) -> None:
    """Success of each stage with its interval, a row a way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, pane = pyplot.subplots(figsize=(8, 1.2 + 0.45 * len(ways)))
    stages = stages_of(ways)
    found: list[dict[str, Any]] = [dict(success(way, stages)) for way in ways]
    for k, (stage, label) in enumerate(stages.items()):
        points = [(i + 0.6 * (k / len(stages) - 0.4), one[stage]) for i, one in enumerate(found) if stage in one]
        rates = [point["rate"] for _, point in points]
        spans = [[p["rate"] - p["low"] for _, p in points], [p["high"] - p["rate"] for _, p in points]]
        pane.errorbar(rates, [y for y, _ in points], xerr=spans, fmt="o", capsize=2, label=label)
    counts = sorted({int(stage["episodes"]) for one in found for stage in one.values()})
    starts = " or ".join(map(str, counts))
    pane.set(xlim=(0, 1.02), xlabel=f"true success, {starts} held-out starts", yticks=range(len(ways)))
    pane.set_yticklabels([way.name for way in ways])
    pane.invert_yaxis()
    pane.grid(alpha=0.3)
    pane.legend(fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def run(args: argparse.Namespace) -> None:
    for way in args.ways:
        if not (way / "verdict.json").is_file():
            raise ConfigError(f"{way} has no verdict.json: give folders that scripts.improve_policy wrote.")
    stages = stages_of(args.ways)
    head = ["way", *FIGURES, "verdict", *stages.values(), "processor-minutes"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for way in args.ways:
        print(row(way, stages), flush=True)
    if args.picture:
        draw(args.picture, args.ways)


if __name__ == "__main__":
    sys.exit(command_line.main(parser, run))
