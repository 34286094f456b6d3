# SPDX-License-Identifier: Apache-2.0
"""The origin of the code that runs, and the record of a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from imaginaire.training import provenance

REPOSITORY = Path(__file__).parents[3]


def _install(site: Path, distribution: str, package: str) -> Path:
    """An installed distribution that provides a package, as pip leaves it."""
    (site / package).mkdir(parents=True)
    (site / package / "__init__.py").write_text("")
    info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{package}/__init__.py,,\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    return site


def test_another_distribution_before_ours_is_named_with_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert provenance.foreign_packages() == []
    site = _install(tmp_path, "cosmos-predict2", "cosmos_predict2")
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "cosmos_predict2", raising=False)  # as where nothing is imported yet
    monkeypatch.setattr(provenance, "_other_providers", provenance._other_providers.__wrapped__)  # as at a start
    (line,) = provenance.foreign_packages()
    assert f"'cosmos_predict2' is imported from {site / 'cosmos_predict2'}, ours is at {REPOSITORY}" in line
    assert line.endswith("pip uninstall cosmos-predict2")


def test_the_record_of_a_run_is_plain_and_holds_what_repeats_it_but_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "IMAGINAIRE_AUTH_TOKEN")
    for name in (*secrets, "PROD_S3_CHECKPOINT_ACCESS_KEY_ID"):
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("IMAGINAIRE_OUTPUT_ROOT", "/big/disk")
    record = provenance.run_record()
    assert json.loads(json.dumps(record)) == record
    assert record["command"][1:] == sys.argv
    assert record["libraries"]["torch"] and record["hostname"] and record["python"]
    assert record["world_size"] == 1
    assert record["environment"]["IMAGINAIRE_OUTPUT_ROOT"] == "/big/disk"
    assert "hush" not in json.dumps(record)


def test_git_state_tells_commit_and_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", *identity, *arguments], cwd=tmp_path, text=True)

    assert provenance.git_state(tmp_path) is None
    git("init", "-q", "-b", "main")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD").strip()
    assert provenance.git_state(tmp_path) == {"commit": commit, "branch": "main", "dirty": False}
    (tmp_path / "a").write_text("2")
    state = provenance.git_state(tmp_path)
    assert state is not None and state["dirty"]
