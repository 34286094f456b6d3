# SPDX-License-Identifier: Apache-2.0
"""One page of figures, curves and videos side by side: a folder with index.html that opens without a network."""

import html
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cosmos_predict2.data.video import media
from imaginaire import storage

Table = tuple[str, Sequence[object], Sequence[tuple[str, Sequence[float]]]]  # corner, columns, rows by name

FIGURES = "figures.json"
COLOURS = ("#1565c0", "#c62828", "#2e7d32", "#6a1b9a", "#ef6c00", "#455a64")
WIDTH, HEIGHT, MARGIN = 460, 220, 44

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .15rem .7rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr + tr { border-top: 1px solid #ddd; }
figure { margin: 0; } figcaption { font-size: .85rem; color: #555; }
.row { display: flex; flex-wrap: wrap; gap: .8rem; margin: .5rem 0 1rem; }
video { width: WIDE_px; image-rendering: pixelated; background: #eee; display: block; }
svg text { font-size: 11px; fill: #444; } pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; }
button { font: inherit; } .verdict { font-size: 1.1rem; font-weight: 600; } .note { color: #555; margin-top: 0; }
"""
_SCRIPT = """
const videos = [...document.querySelectorAll('video')];
function restart() { videos.forEach(v => { v.currentTime = 0; v.play(); }); }
document.getElementById('restart').onclick = restart;
document.getElementById('pause').onclick = () => videos.forEach(v => v.pause());
"""


@dataclass(frozen=True)
class Clip:
    """A video of the page: its caption, and its file in the page's folder."""

    caption: str
    file: str


@dataclass
class Page:
    """What the page shows, in the order in which it was added."""

    title: str
    facts: Sequence[str] = ()
    video_width: int = 192
    _parts: list[str] = field(default_factory=list)

    def heading(self, text: str, note: str = "") -> None:
        self._parts.append(f"<h2>{html.escape(text)}</h2>" + (f"<p>{html.escape(note)}</p>" if note else ""))

    def verdict(self, sentence: str) -> None:
        self._parts.append(f'<p class="verdict">{html.escape(sentence)}</p>')

    def note(self, sentence: str) -> None:
        """What the figure above shows."""
        self._parts.append(f'<p class="note">{html.escape(sentence)}</p>')

    def findings(self, sentences: Sequence[str]) -> None:
        items = "".join(f"<li>{html.escape(text)}</li>" for text in sentences)
        self._parts.append(f"<ul>{items}</ul>")

    def link(self, text: str, file: str) -> None:
        self._parts.append(f'<p><a href="{html.escape(file)}">{html.escape(text)}</a></p>')

    def text(self, lines: str) -> None:
        """Lines as they are, such as a table in letters of one width."""
        self._parts.append(f"<pre>{html.escape(lines)}</pre>")

    def table(self, corner: str, columns: Sequence[object], rows: Sequence[tuple[str, Sequence[float]]]) -> None:
        head, *body = _cells(corner, columns, rows)
        first = "".join(f"<th>{html.escape(name)}</th>" for name in head)
        rest = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
        self._parts.append(f"<table><tr>{first}</tr>{rest}</table>")

    def curves(self, titles: Mapping[str, Mapping[str, Sequence[float]]], across: str) -> None:
        """A drawing for each title: lines by name, their first value at 1; ``across`` labels the axis."""
        drawings = "".join(_drawing(title, lines, across) for title, lines in titles.items())
        self._parts.append(f'<div class="row">{drawings}</div>')

    def clips(self, clips: Sequence[Clip]) -> None:
        """Videos in a row."""
        figures = "".join(
            f'<figure><video src="{html.escape(clip.file)}" autoplay loop muted playsinline></video>'
            f"<figcaption>{html.escape(clip.caption)}</figcaption></figure>"
            for clip in clips
        )
        self._parts.append(f'<div class="row">{figures}</div>')

    def write(self, folder: Path) -> Path:
        """Write index.html, a verdict that was added first above the facts; videos are named relative to it."""
        facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in self.facts)
        style = _STYLE.replace("WIDE_", str(self.video_width))
        buttons = '<p><button id="restart">all from the start</button> <button id="pause">pause</button></p>'
        first = list(itertools.takewhile(lambda part: 'class="verdict"' in part, self._parts))
        text = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f"<title>{html.escape(self.title)}</title><style>{style}</style></head><body>"
            f"<h1>{html.escape(self.title)}</h1>"
            + "\n".join([*first, f"<ul>{facts}</ul>{buttons}", *self._parts[len(first) :]])
            + f"<script>{_SCRIPT}</script></body></html>\n"
        )
        path = folder / "index.html"
        storage.write_atomically(path, lambda file: file.write(text.encode("utf-8")))
        return path


def written(folder: Path, name: str, caption: str, video_C_F_H_W: Tensor, fps: float) -> Clip:
    """Write a clip for the page; very small frames are made larger, or the encoder's colours at half size would be
    seen."""
    times = 4 if max(video_C_F_H_W.shape[-2:]) < 128 else 1
    large = video_C_F_H_W.repeat_interleave(times, -1).repeat_interleave(times, -2)
    media.write_video(folder / f"{name}.mp4", large.to(torch.uint8), fps)
    return Clip(caption, f"{name}.mp4")


def shown_width(video: Tensor) -> int:
    """How wide a page shows videos of this width."""
    return max(96, min(320, 4 * video.shape[-1]))


def aligned(corner: str, columns: Sequence[object], rows: Sequence[tuple[str, Sequence[float]]]) -> list[str]:
    """A table: names to the left, numbers to the right, each column as wide as its widest."""
    cells = _cells(corner, columns, rows)
    widths = [max(map(len, column)) for column in zip(*cells)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in cells
    ]


def _cells(corner: str, columns: Sequence[object], rows: Sequence[tuple[str, Sequence[float]]]) -> list[list[str]]:
    return [[corner, *map(str, columns)], *([name, *(f"{value:.3f}" for value in values)] for name, values in rows)]


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """The figures, complete or not at all; null for one that is not finite, which JSON does not know."""
    text = json.dumps(_finite(values), indent=2, default=str, allow_nan=False) + "\n"
    storage.write_atomically(path, lambda file: file.write(text.encode("utf-8")))


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drawing(title: str, lines: Mapping[str, Sequence[float]], across: str) -> str:
    """An SVG of lines over 1, 2, ... with their range on the left."""
    values = [value for line in lines.values() for value in line]
    low, high = min(values), max(values)
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    count = max(len(line) for line in lines.values())

    def x(i: int) -> float:
        return MARGIN + (WIDTH - MARGIN - 10) * i / max(count - 1, 1)

    def y(value: float) -> float:
        return 24 + (HEIGHT - 24 - 30) * (high - value) / (high - low)

    parts = [f'<text x="{MARGIN}" y="14" font-weight="bold">{html.escape(title)}</text>']
    for value in (low, (low + high) / 2, high):
        parts.append(f'<line x1="{MARGIN}" x2="{WIDTH - 10}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for i in sorted({0, (count - 1) // 2, count - 1}):
        parts.append(f'<text x="{x(i):.1f}" y="{HEIGHT - 16}" text-anchor="middle">{i + 1}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 2}" text-anchor="middle">{html.escape(across)}</text>')
    legend = []
    for (name, line), colour in zip(lines.items(), COLOURS):
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        legend.append(f'<span style="color:{colour}">{html.escape(name)}</span>')
    drawing = f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(parts)}</svg>'
    return f"<figure>{drawing}<figcaption>{' · '.join(legend)}</figcaption></figure>"
