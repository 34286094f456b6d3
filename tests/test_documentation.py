# SPDX-License-Identifier: Apache-2.0
"""The bash and Python blocks of README and documentations/ are run, and their relative links lead somewhere.

A block whose first line is a comment that begins with "needs" is only parsed. Every training is composed; the first
block of a few pages is run, in long all blocks of all pages in their order, each page in a folder of its own.
"""

import ast
import importlib
import importlib.util
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from examples import video2world, video2world_action
from imaginaire.config.compose import compose
from tests.programs import finished, warm_python

ROOT = Path(__file__).resolve().parents[1]
BASE = "cosmos_predict2/configs/base/config.py"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "documentations").glob("*.md"))]
OURS = ("cosmos_predict2", "imaginaire")
SETS_UP = re.compile(r"^(make|git clone|cd|apt-get)\b", re.MULTILINE)  # proven by a fresh clone, not from inside a test


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every block of commands or code."""
    return re.findall(r"^```(bash|python)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def runnable(page: Path) -> list[tuple[str, str]]:
    """The blocks that can run here, without the lines that set up a machine."""
    found = [(language, block) for language, block in blocks(page) if not block.startswith("# needs")]
    found = [(language, "\n".join(i for i in text.splitlines() if not SETS_UP.match(i))) for language, text in found]
    return [(language, text) for language, text in found if text.strip()]


def _imported(page: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of what the Python blocks of a page import from this repository."""
    for language, block in blocks(page):
        for statement in ast.walk(ast.parse(block)) if language == "python" else ():
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(OURS):
                yield from ((str(statement.module), name.name) for name in statement.names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_python_blocks_import_is_there(page: Path) -> None:
    missing = [pair for pair in _imported(page) if not _has(*pair)]
    assert not missing, f"{page.name}: {missing}"


def test_every_program_stands_once_in_the_list_and_on_the_page_that_it_names() -> None:
    page = ROOT / "documentations/programs.md"
    rows = re.sub(r"\n  ", " ", page.read_text()).split("\n- ")[1:]
    programs = [path.stem for folder in ("scripts", "examples") for path in (ROOT / folder).glob("[!_]*.py")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.partition(": ")[0])]
    assert sorted(listed) == sorted(programs)
    for row in rows:
        pages = [(page.parent / name).read_text() for name in re.findall(r"\]\(([^)#]+)\)", row)]
        names = re.findall(r"`(\w+)`", row.partition(": ")[0])
        assert any(name in text for name in names for text in pages), row


def _has(module: str, name: str) -> bool:
    return hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}") is not None


def run(language: str, block: str, folder: Path) -> None:
    """Run a block as a user would from the checkout, with what it writes below ``folder``."""
    text = re.sub(r"(?<![\w/])checkpoints/", f"{folder}/", block)
    text = re.sub(r"(?<![\w/])(output|datasets)/", rf"{folder}/\1/", text)
    bin_dir = str(Path(sys.executable).parent)
    environment = {
        "PATH": f"{Path(warm_python()).parent}:{bin_dir}:{os.environ['PATH']}",
        "IMAGINAIRE_OUTPUT_ROOT": str(folder),
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }
    text = text.replace(".venv/bin/python ", "python ").replace(".venv/bin/", f"{bin_dir}/")
    words = ["bash", "-euo", "pipefail"] if language == "bash" else [warm_python()]
    result = finished(*words, "-c", text, cwd=ROOT, **environment)
    assert result.returncode == 0, f"{text}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_parse_and_links_lead_somewhere(page: Path) -> None:
    for language, block in blocks(page):
        if language == "bash":
            assert finished("bash", "-n", "-c", block).returncode == 0, block
        else:
            compile(block, f"a block of {page.name}", "exec")
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
        target = page.parent / link if link else page
        if "://" not in link and not link.startswith("mailto:"):
            assert target.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in anchors(target), f"{page.name} links to {link}#{anchor}"


def test_lines_have_at_most_120_characters() -> None:
    long = [
        f"{page.name}:{n}"
        for page in [*PAGES, ROOT / "CHANGELOG.md"]
        for n, line in enumerate(page.read_text().split("\n"), 1)
        if len(line) > 120
    ]
    assert not long


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_that_pages_name_are_there() -> None:
    named = re.compile(r"`((?:benchmarks|configs|cosmos_predict2|examples|imaginaire|scripts|tests)/[\w./-]+)`")
    found = [(page.name, path) for page in PAGES for path in named.findall(page.read_text())]
    assert len(found) > 20 and not [pair for pair in found if not (ROOT / pair[1]).exists()]


def test_the_contents_name_every_page() -> None:
    contents = ROOT / "documentations/contents.md"
    text = contents.read_text()
    assert not [page.name for page in PAGES[2:] if page != contents and f"]({page.name})" not in text]


def test_what_published_guides_link_to_is_here() -> None:
    pages = ROOT / "documentations"
    assert "downloading-checkpoints" in anchors(pages / "setup.md") and (pages / "performance.md").exists()
    assert f"2^-14.5 is {2**-14.5 * 1e5:.2f}e-5" in (pages / "post-training_video2world_gr00t.md").read_text()


def test_the_reference_of_fields_is_up_to_date() -> None:
    """If not: python -m scripts.list_config_fields > documentations/configuration_fields.md"""
    result = finished(warm_python(), "-m", "scripts.list_config_fields", cwd=ROOT)
    assert result.stdout == (ROOT / "documentations" / "configuration_fields.md").read_text(), result.stderr


def expanded(word: str) -> list[str]:
    """The overrides that a shell makes of braces in a key: a.{b,c}=0 is a.b=0 and a.c=0."""
    key, _, value = word.partition("=")
    if not (braces := re.fullmatch(r"(.*)\{([\w,]+)\}(.*)", key)):
        return [word]
    before, names, after = braces.groups()
    return [f"{before}{name}{after}={value}" for name in names.split(",")]


def trainings(page: Path) -> list[tuple[str, list[str]]]:
    """(--config, overrides) of every training that a page starts or plans, without words that a shell would compute."""
    found = []
    for _, block in blocks(page):
        variables = dict(re.findall(r"^(?:export )?(\w+)=(\S+)$", block, re.MULTILINE))
        for command in re.findall(r"-m scripts\.(?:train|plan) ([^#\n]*)", block.replace("\\\n", " ")):
            for name, value in variables.items():
                command = command.replace(f"${{{name}}}", value).replace(f"${name}", value)
            flags, _, overrides = command.partition("-- ")
            if "--import" in flags:
                continue  # tests/outside runs it
            config = re.search(r"--config=(\S+)", flags)
            given = itertools.takewhile(lambda word: "=" in word, shlex.split(overrides, comments=True))
            words = [each for word in given if "$" not in word for each in expanded(word)]
            found.append((config.group(1) if config else BASE, words))
    return [(config, words) for config, words in found if words and (ROOT / config).is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if trainings(page)], ids=lambda page: page.name)
def test_every_training_of_a_page_composes(page: Path) -> None:
    for config, overrides in trainings(page):
        compose(config, overrides)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["README.md", "bridge_json.md", "callbacks.md", "setup.md", "toy_world.md", "your_robot.md"]
)
def test_the_first_block_of_a_page_runs(name: str, tmp_path: Path) -> None:
    page = next(page for page in PAGES if page.name == name)
    run(*runnable(page)[0], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.name)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    for language, block in runnable(page):
        run(language, block, tmp_path)


def rows(page: Path, heading: str) -> dict[str, list[str]]:
    """The table below a heading whose first column is code: its other cells, by that code."""
    section = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {first.strip(" `"): rest for first, *rest in cells}


@pytest.mark.parametrize("program", [video2world, video2world_action], ids=lambda program: program.__name__)
def test_an_inference_page_has_every_flag_with_its_default(program: ModuleType, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        program.parse(["--help"])
    flags = set(re.findall(r"^  (--\w+)", capsys.readouterr().out, re.MULTILINE))
    page = ROOT / f"documentations/inference_{program.__name__.rpartition('.')[2]}_flags.md"
    documented = rows(page, "All flags")
    assert set(documented) == flags and len(flags) > 30
    for name, value in vars(program.parse([])).items():
        if f"--{name}" in documented and value not in (None, "", []):
            default = documented[f"--{name}"][0].strip("`")
            assert default == ("off" if value is False else str(value)), f"--{name}: {default}"
