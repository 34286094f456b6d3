# SPDX-License-Identifier: Apache-2.0
"""imaginaire.training.run_folder: one run holds it, and its config.yaml is that of the newest training."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.training import provenance, run_folder


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_is_held_by_one_run_and_must_be_writable(tmp_path: Path, scheme: str) -> None:
    run_folder.check_writable(f"{scheme}{tmp_path}/project/group/run")
    assert not list(tmp_path.iterdir()), "nothing is left of the trial"
    path = f"{scheme}{tmp_path}/run"
    held = run_folder.RunFolder(path)
    with pytest.raises(ConfigError, match="in use by this process"):
        run_folder.RunFolder(path)
    held.release()
    again = run_folder.RunFolder(path)
    again.release()
    again.remove()
    assert (tmp_path / "run").exists(), "another run made it"
    held.remove()
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="a part of this path is a file"):
        run_folder.check_writable(f"{scheme}{tmp_path}/file/run")


def test_a_run_that_goes_on_with_other_data_names_the_keys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = "{dataloader_train: {dataset: {dir: a, video_size: [64, 64], fps: null}}, trainer: {max_iter: 4}}"
    new = "{dataloader_train: {dataset: {dir: b, video_size: [48, 48], crop: center, fps: null}, num_workers: 2}, x: 2}"
    caplog.set_level(logging.WARNING)
    for config, is_resumed in ((new, True), (old, False), (old, True)):
        run_folder.write_config(str(tmp_path), config, is_resumed=is_resumed)
        assert not caplog.records and (tmp_path / "config.yaml").read_text() == config
    run_folder.write_config(str(tmp_path), new, is_resumed=True)
    keys = [line.strip() for line in caplog.text.splitlines() if "->" in line]
    section = "dataloader_train.dataset"
    assert keys == [
        f"{section}.dir: a -> b", f"{section}.video_size: [64, 64] -> [48, 48]", f"{section}.crop: not set -> center"
    ]  # fmt: skip
    (tmp_path / "config.yaml").write_text("{a: ")
    run_folder.write_config(str(tmp_path), new, is_resumed=True)
    assert (tmp_path / "config.yaml").read_text() == new, "a damaged file is replaced"


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
