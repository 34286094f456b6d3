# SPDX-License-Identifier: Apache-2.0
"""One page of figures, curves and videos side by side: a folder with index.html that opens without a network."""

import html
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from cosmos_predict2.data.video import media
from imaginaire import storage

Table = tuple[str, Sequence[object], Sequence[tuple[str, Sequence[float]]]]  # corner, columns, rows by name

FIGURES = "figures.json"
COLOURS = ("#3b82f6", "#e5484d", "#2f9e64", "#a855f7", "#e08700", "#64748b")  # seen on white and on black
WIDTH, HEIGHT, MARGIN = 460, 220, 68  # a number of three digits with sign and exponent stands in the margin
WIDEST_CLIP = 320  # as it is shown

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --soft: #59636e; --line: #d1d9e0; --back: #fff; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6edf3; --soft: #9198a1; --line: #3d444d; --back: #0d1117; --card: #161b22; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: var(--text);
  background: var(--back); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } a { color: #3b82f6; }
table { border-collapse: collapse; } td, th { padding: .15rem .7rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr + tr { border-top: 1px solid var(--line); }
figure { margin: 0; } figcaption { font-size: .85rem; color: var(--soft); min-height: 1.3em; }
.row { display: flex; flex-wrap: wrap; gap: .8rem; margin: .5rem 0 1rem; }
.row figure:has(svg), .tile, pre { background: var(--card); border-radius: .5rem; padding: .8rem; }
.row figure:has(svg) { flex: 1 1 27rem; min-width: 0; max-width: 36rem; } li { overflow-wrap: anywhere; }
.tile { flex: 1 1 9rem; max-width: 18rem; } .tile b { display: block; font-size: 1.4rem; }
.tile span { color: var(--soft); }
.tile .good { color: #2f9e64; } .tile .bad { color: #e5484d; }
video { width: WIDE_px; max-width: 100%; image-rendering: RENDERING_; background: var(--card); display: block; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 11px; fill: var(--soft); }
svg .grid { stroke: var(--line); } svg .title { fill: var(--text); font-weight: bold; font-size: 12px; }
pre { overflow-x: auto; } button { font: inherit; } .note { color: var(--soft); margin-top: 0; }
.verdict { font-size: 1.1rem; font-weight: 600; }
"""
_SCRIPT = """
const videos = [...document.querySelectorAll('video')];
function restart() { videos.forEach(v => { v.currentTime = 0; v.play(); }); }
document.getElementById('restart').onclick = restart;
document.getElementById('pause').onclick = () => videos.forEach(v => v.pause());
document.querySelectorAll('svg').forEach(svg => {
  const caption = svg.parentNode.querySelector('figcaption'), usual = caption.innerHTML;
  const lines = [...svg.querySelectorAll('polyline')];
  svg.onmousemove = event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
    caption.replaceChildren(...lines.map(line => {
      const values = JSON.parse(line.dataset.values), points = [...line.points];
      const i = points.reduce((best, p, k) => Math.abs(p.x - at) < Math.abs(points[best].x - at) ? k : best, 0);
      const part = document.createElement('span');
      part.style.color = line.getAttribute('stroke');
      part.textContent = `${line.dataset.name} ${values[i][1].toPrecision(4)} at ${values[i][0]} `;
      return part;
    }));
  };
  svg.onmouseleave = () => { caption.innerHTML = usual; };
});
"""
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class PageVideo:
    """A video or a picture of the page: its caption, and its file in the page's folder."""

    caption: str
    file: str


@dataclass
class Page:
    """A page that shows its parts in the order in which they were added."""

    title: str
    facts: Sequence[str] = ()
    video_width: int = 192
    _parts: list[str] = field(default_factory=list)

    def heading(self, text: str, note: str = "") -> None:
        self._parts.append(f"<h2>{html.escape(text)}</h2>" + (f"<p>{html.escape(note)}</p>" if note else ""))

    def verdict(self, sentence: str) -> None:
        self._parts.append(f'<p class="verdict">{html.escape(sentence)}</p>')

    def note(self, sentence: str) -> None:
        """A sentence on the figure above."""
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
        from_1 = {title: {name: [*enumerate(line, 1)] for name, line in of.items()} for title, of in titles.items()}
        self.plots(from_1, across)

    def plots(self, titles: Mapping[str, Mapping[str, Points]], across: str) -> None:
        """A drawing for each title: lines of (x, y) by name; ``across`` labels the axis."""
        drawings = "".join(_drawing(title, lines, across) for title, lines in titles.items())
        self._parts.append(f'<div class="row">{drawings}</div>')

    def tiles(self, tiles: Sequence[tuple[str, str, str, str]]) -> None:
        """Large numbers: name, value, what to add, and "good", "bad" or "" for its colour."""
        cards = "".join(
            f'<div class="tile">{html.escape(name)}<b>{html.escape(value)}</b>'
            f'<span class="{kind}">{html.escape(more)}</span></div>'
            for name, value, more, kind in tiles
        )
        self._parts.append(f'<div class="row">{cards}</div>')

    def clips(self, clips: Sequence[PageVideo]) -> None:
        figures = "".join(
            f'<figure><video src="{html.escape(clip.file)}" autoplay loop muted playsinline></video>'
            f"<figcaption>{html.escape(clip.caption)}</figcaption></figure>"
            for clip in clips
        )
        self._parts.append(f'<div class="row">{figures}</div>')

    def videos(self, folder: Path, fps: float, clips: Iterable[tuple[str, str, Tensor]]) -> None:
        """Write clips for the page, and show them: the name of each file, its caption, and its frames."""
        self.clips([written(folder, name, caption, video, fps) for name, caption, video in clips])

    def write(self, folder: Path) -> Path:
        """Write index.html; videos are named relative to it."""
        path = folder / "index.html"
        storage.write_text(path, self.as_html())
        return path

    def as_html(self) -> str:
        """The page, a verdict that was added first above the facts."""
        facts = "".join(f"<li>{html.escape(fact)}</li>" for fact in self.facts)
        # Small clips keep sharp pixels; those with labels in them are shown smaller than they are.
        rendering = "pixelated" if self.video_width <= WIDEST_CLIP else "auto"
        style = _STYLE.replace("WIDE_", str(self.video_width)).replace("RENDERING_", rendering)
        buttons = '<p><button id="restart">all from the start</button> <button id="pause">pause</button></p>'
        first = list(itertools.takewhile(lambda part: 'class="verdict"' in part, self._parts))
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width">'
            f"<title>{html.escape(self.title)}</title><style>{style}</style></head><body>"
            f"<h1>{html.escape(self.title)}</h1>"
            + "\n".join([*first, f"<ul>{facts}</ul>{buttons}", *self._parts[len(first) :]])
            + f"<script>{_SCRIPT}</script></body></html>\n"
        )


def written(folder: Path, name: str, caption: str, video_C_F_H_W: Tensor, fps: float) -> PageVideo:
    """Write a clip for the page; very small frames are made larger, or the encoder's colours at half size would be
    seen."""
    times = 4 if max(video_C_F_H_W.shape[-2:]) < 128 else 1
    large = video_C_F_H_W.repeat_interleave(times, -1).repeat_interleave(times, -2)
    media.write_video(folder / f"{name}.mp4", large.to(torch.uint8), fps)
    return PageVideo(caption, f"{name}.mp4")


def shown_width(video: Tensor) -> int:
    """The width at which a page shows a video, in pixels."""
    return max(96, min(WIDEST_CLIP, 4 * video.shape[-1]))


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


def drawn_file(title: str, lines: Mapping[str, Points], across: str) -> str:
    """A drawing as an SVG file of its own, in which the lines are named."""
    drawing, _, _ = _drawing(title, lines, across).removeprefix("<figure>").partition("<figcaption>")
    names = "".join(
        f'<text x="{MARGIN + 6}" y="{44 + 14 * i}" style="fill: {colour}">{html.escape(name)}</text>'
        for i, (name, colour) in enumerate(zip(lines, itertools.cycle(COLOURS)))
    )
    style = "<style>text { font: 11px sans-serif; } .grid { stroke: #d1d9e0; }</style>"
    drawing = drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return drawing.replace("</svg>", f"{names}{style}</svg>")


def _drawing(title: str, lines: Mapping[str, Points], across: str) -> str:
    """An SVG of lines, with the ranges of both axes; without infinite values, which have no place."""
    lines = {name: [(x, y) for x, y in line if math.isfinite(y)] for name, line in lines.items()}
    lines = {name: line for name, line in lines.items() if line}
    if not lines:
        return ""
    places = sorted({x for line in lines.values() for x, _ in line})
    left, right = places[0], max(places[-1], places[0] + 1e-9)
    heights = [y for line in lines.values() for _, y in line]
    low, high = min(heights), max(heights)
    if high - low <= 1e-9:
        low, high = low - 0.5, high + 0.5

    def at(x: float, y: float) -> tuple[float, float]:
        across_by, down_by = (x - left) / (right - left), (high - y) / (high - low)
        return MARGIN + (WIDTH - MARGIN - 14) * across_by, 28 + (HEIGHT - 28 - 32) * down_by

    parts = [f'<text class="title" x="4" y="14">{html.escape(title)}</text>']
    for value in (low, (low + high) / 2, high):
        _, y = at(left, value)
        parts.append(f'<line class="grid" x1="{MARGIN}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for place in sorted({places[0], places[(len(places) - 1) // 2], places[-1]}):
        x, _ = at(place, low)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 17}" text-anchor="middle">{place:g}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 3}" text-anchor="middle">{html.escape(across)}</text>')
    legend = []
    for (name, line), colour in zip(lines.items(), itertools.cycle(COLOURS)):
        points = [at(x, y) for x, y in line]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        values = html.escape(json.dumps([[x, float(f"{y:.6g}")] for x, y in line]))
        parts.append(
            f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"'
            f' data-name="{html.escape(name)}" data-values="{values}"/>'
        )
        parts.append(f'<circle cx="{points[-1][0]:.1f}" cy="{points[-1][1]:.1f}" r="3" fill="{colour}"/>')
        legend.append(f'<span style="color:{colour}">{html.escape(name)} {line[-1][1]:.4g}</span>')
    drawing = f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'
    return f"<figure>{drawing}<figcaption>{' · '.join(legend)}</figcaption></figure>"
