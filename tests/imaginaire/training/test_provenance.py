# SPDX-License-Identifier: Apache-2.0
"""The origin of the code that runs, and the record of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from imaginaire.training import provenance
from tests.programs import HANG_S, python

REPOSITORY = Path(__file__).parents[3]


def _foreign(path: list[Path], folder: Path = REPOSITORY) -> list[str]:
    """The report of a new process with these folders on its path."""
    code = "import json; from imaginaire.training import provenance; print(json.dumps(provenance.foreign_packages()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    run = subprocess.run(
        [python(), "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )
    lines: list[str] = json.loads(run.stdout)
    return lines


def _install(site: Path, distribution: str, package: str) -> Path:
    """An installed distribution that provides a package, as pip leaves it."""
    (site / package).mkdir(parents=True)
    (site / package / "__init__.py").write_text("")
    info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{package}/__init__.py,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    return site


def test_our_own_checkout_is_not_foreign() -> None:
    assert provenance.foreign_packages() == []


def test_another_distribution_in_front_of_ours_is_named_with_its_cure(tmp_path: Path) -> None:
    site = _install(tmp_path, "cosmos-predict2", "cosmos_predict2")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (line,) = _foreign([site, REPOSITORY], elsewhere)
    assert f"'cosmos_predict2' is imported from {site / 'cosmos_predict2'}, ours is at {REPOSITORY}" in line
    assert line.endswith("pip uninstall cosmos-predict2")


def test_the_record_of_a_run_is_plain_and_holds_what_repeats_it() -> None:
    record = provenance.run_record()
    assert json.loads(json.dumps(record)) == record
    assert record["command"][1:] == sys.argv
    assert record["libraries"]["torch"] and record["hostname"] and record["python"]
    assert record["world_size"] == 1


def test_the_record_keeps_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "IMAGINAIRE_AUTH_TOKEN",
        "PROD_S3_CHECKPOINT_ACCESS_KEY_ID",
    ):
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", "/big/disk")
    record = provenance.run_record()
    assert record["environment"]["IMAGINAIRE_OUTPUT_ROOT"] == "/big/disk"
    assert "hush" not in json.dumps(record)


def test_git_state_tells_commit_and_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    assert provenance.git_state(tmp_path) is None
    git("init", "-q", "-b", "main")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    assert provenance.git_state(tmp_path) == {
        "commit": git("rev-parse", "HEAD").strip(),
        "branch": "main",
        "dirty": False,
    }
    (tmp_path / "a").write_text("2")
    state = provenance.git_state(tmp_path)
    assert state is not None and state["dirty"]
