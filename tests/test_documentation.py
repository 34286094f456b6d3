# SPDX-License-Identifier: Apache-2.0
"""The bash blocks of README and documentations/ are run, and their relative links lead somewhere.

A block whose first line is a comment that begins with "needs" is only parsed. In slow the first block that can run of
each page is run, in long all of them, each page in an empty output folder of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "documentations").glob("*.md"))]
SETS_UP = re.compile(r"^(make|git clone|cd|apt-get)\b", re.MULTILINE)  # proven by a fresh clone, not from inside a test


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def runnable(page: Path) -> list[str]:
    return [block for block in blocks(page) if not block.startswith("# needs")]


def run(block: str, folder: Path) -> None:
    """Run a block as a user would from the checkout, with run folders below ``folder``."""
    commands = "\n".join(line for line in block.splitlines() if not SETS_UP.match(line))
    commands = re.sub(r"(?<![\w/])checkpoints/", f"{folder}/", commands)
    bin_dir = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "IMAGINAIRE_OUTPUT_ROOT": str(folder),
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }
    commands = commands.replace(".venv/bin/", f"{bin_dir}/")
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, f"{commands}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_parse_and_links_lead_somewhere(page: Path) -> None:
    for block in blocks(page):
        assert subprocess.run(["bash", "-n", "-c", block], capture_output=True).returncode == 0, block
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in link and not link.startswith("mailto:"):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.name)
def test_the_first_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    run(runnable(page)[0], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.name)
def test_every_block_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    for block in runnable(page):
        run(block, tmp_path)
