# SPDX-License-Identifier: Apache-2.0
"""The page of a run: from what is written so far, in one file, with what can be drawn of it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cosmos_predict2.evaluation.reports.evaluation_page import Page
from cosmos_predict2.evaluation.reports.run_report import by_name, read_records, reward_plots, verdict, write_report
from imaginaire.errors import DataError


def a_run(folder: Path) -> Path:
    """Two saved figures, one that is not finite, one iteration that was repeated, and a line that is being written."""
    records = [
        {"iteration": 0, "val/loss": 2.0},
        {"iteration": 5, "train/reward_mean": 0.1, "train/red_valid_rate": 1.0, "train/red": 0.1, "quality/<b>": 3.0},
        {"iteration": 10, "train/reward_mean": 9.0, "train/red_valid_rate": 1.0, "train/red": 9.0, "train/loss": None},
        {"iteration": 10, "train/reward_mean": 0.4, "train/red_valid_rate": 0.5, "train/red": 0.4, "quality/<b>": 2.0},
    ]
    text = "".join(json.dumps(record) + "\n" for record in records) + '{"iteration": 15, "train/re'
    (folder / "metrics.jsonl").write_text(text)
    (folder / "config.yaml").write_text("job: {name: a run}\ntrainer: {max_iter: 20}\n")
    (folder / "samples").mkdir()
    for iteration in (1, 5, 10):
        (folder / f"samples/iter_{iteration:09d}_guidance_0.mp4").write_bytes(b"video" * iteration)
    return folder


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_a_page_of_a_run_that_is_going(tmp_path: Path) -> None:
    path = Path(write_report(str(a_run(tmp_path))))
    assert path == tmp_path / "report.html"
    text = path.read_text()
    tags = Tags()
    tags.feed(text)
    videos = [attrs["src"] or "" for tag, attrs in tags.found if tag == "video"]
    assert len(videos) == 2 and all(source.startswith("data:video/mp4;base64,") for source in videos)
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text)  # one file
    drawn = [attrs for tag, attrs in tags.found if tag == "polyline"]
    lines = {attrs["data-name"]: json.loads(attrs["data-values"] or "") for attrs in drawn}
    assert lines["mean"] == [[5, 0.1], [10, 0.4]] and lines["<b>"] == [[5, 3.0], [10, 2.0]]
    assert lines["red"] == [[5, 1.0], [10, 0.5]]  # the share of valid scores
    assert "iteration 10 of 20" in text and "+0.3 since the start" in text and "<b>3" not in text


def test_a_verdict_where_there_is_an_alarm() -> None:
    assert verdict({}) == ""
    assert verdict({"quality/alarm": [(1, 0.0)]}).startswith("No alarm")
    told = verdict({"quality/alarm": [(1, 0.0), (20, 1.0)], "quality/rolled_back_to": [(20, 10.0)]})
    assert "iteration 20:" in told and "from iteration 20 to 10" in told


def test_several_rewards_have_a_drawing_each_and_their_sum(tmp_path: Path) -> None:
    metrics = {f"train/{name}{end}": 1.0 for name in ("a", "b") for end in ("", "_valid_rate", "_p10", "_p90")}
    lines = by_name([{"iteration": 1, "train/reward_mean": 2.0, **metrics}])
    plots = reward_plots(lines)
    assert list(plots) == ["Weighted sum", "a", "b"] and list(plots["a"]) == ["mean", "p10", "p90"]


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        write_report(str(tmp_path))
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(DataError, match="no record yet"):
        read_records(str(tmp_path))


def test_numbers_beside_a_drawing_are_whole() -> None:
    page = Page("numbers")
    page.plots({"loss": {"loss": [(0, -1.234e-07), (1, 3.456e-10)], "rate": [(0, 1.25e-05), (1, -9.99e-05)]}}, "x")
    labels = re.findall(r'<text x="(\S+)" y="\S+" text-anchor="end">(\S+)</text>', page.as_html())
    assert len(labels) == 3
    for right, text in labels:
        assert float(right) > 6.5 * len(text)  # no wider is a digit at 11 pixels
