# SPDX-License-Identifier: Apache-2.0
"""imaginaire.training.run_folder: a start that is refused leaves nothing, and never takes what was there before."""

import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from imaginaire import storage
from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.training import run_folder


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_is_removed_with_the_parents_that_were_made_for_it(tmp_path: Path, scheme: str) -> None:
    run_folder.check_writable(f"{scheme}{tmp_path}/project/group/run")
    assert not list(tmp_path.iterdir())
    path = f"{scheme}{tmp_path}/project/group/run"
    for _ in range(2):  # the name is free again
        held = run_folder.claim(path, "a: 1")
        assert held is not None and (tmp_path / "project/group/run/config.yaml").read_text() == "a: 1"
        held.close()
        run_folder.discard_new(path)
        assert not list(tmp_path.iterdir())
    (tmp_path / "project/other").mkdir(parents=True)
    run_folder.claim(path, "")
    run_folder.discard_new(path)
    assert [found.name for found in (tmp_path / "project").iterdir()] == ["other"]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_folder_that_was_there_stays(tmp_path: Path, scheme: str) -> None:
    path = f"{scheme}{tmp_path}/run"
    (tmp_path / "run").mkdir()
    held = run_folder.claim(path, "")
    with pytest.raises(ConfigError, match="in use by this process"):
        run_folder.claim(path, "")
    assert held is not None
    run_folder.discard_new(path)
    run_folder.unlock(held)
    assert (tmp_path / "run/config.yaml").exists()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="a part of this path is a file"):
        run_folder.check_writable(f"{scheme}{tmp_path}/file/run")


@pytest.mark.parametrize("ends", [run_folder.discard_new, run_folder.keep])
def test_a_refused_start_puts_the_settings_of_the_run_back(tmp_path: Path, ends: Callable[[str], None]) -> None:
    path = str(tmp_path / "run")
    for config, end in (("old: 1\n", run_folder.keep), ("new: 1\n", ends)):
        run_folder.unlock(run_folder.claim(path, config))
        end(path)
    expected = "old: 1\n" if ends is run_folder.discard_new else "new: 1\n"
    assert (tmp_path / "run" / "config.yaml").read_text() == expected


def test_a_new_folder_is_left_to_who_holds_it_by_now(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    held = run_folder.claim(path, "")
    assert held is not None
    run_folder.unlock(held)  # as a trainer does on its way out, before its readers have ended
    other = "import fcntl, sys; f = open(sys.argv[1], 'a+'); fcntl.lockf(f, 2); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", other, f"{path}/run.lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        run_folder.discard_new(path)
        assert Path(path, "config.yaml").exists()
        process.communicate()


def test_a_new_folder_with_checkpoints_is_left(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run_folder.claim(path, "")
    Path(path, "checkpoints").mkdir()
    Path(path, "checkpoints/latest_checkpoint.txt").write_text("iter_000000010.pt")
    run_folder.discard_new(path)
    assert Path(path, "checkpoints/latest_checkpoint.txt").exists()


@pytest.mark.parametrize("name", ["runs.jsonl", "config.yaml"])
def test_an_object_store_keeps_what_another_process_wrote(name: str) -> None:
    path = f"memory://{uuid.uuid4().hex}/run"
    run_folder.claim(path, "mine: 1")
    run_folder.discard_new(path)
    assert not storage.listdir(path)
    run_folder.claim(path, "mine: 1")
    storage.write_atomically(f"{path}/{name}", lambda file: file.write(b"theirs: 1"))
    run_folder.discard_new(path)
    assert storage.read_text(f"{path}/{name}") == "theirs: 1"
    storage.remove(path)


def test_a_folder_that_this_process_made_for_a_run_before_stays(tmp_path: Path) -> None:
    path = f"{tmp_path}/run"
    for _ in range(2):  # two trainers, one after the other; the second is refused
        held = run_folder.claim(path, "")
        assert held is not None
        run_folder.unlock(held)
    run_folder.discard_new(path)
    assert (tmp_path / "run/config.yaml").exists()


def test_a_run_that_goes_on_with_other_data_says_which_keys_changed(tmp_path: Path) -> None:
    old = "{dataloader_train: {dataset: {dir: a, video_size: [64, 64], fps: null}}, trainer: {max_iter: 4}}"
    new = "{dataloader_train: {dataset: {dir: b, video_size: [48, 48], crop: center, fps: null}, num_workers: 2}, x: 2}"
    path = str(tmp_path / "run")
    assert run_folder.changes(path, new) == ""
    held = run_folder.claim(path, old)
    assert held is not None
    run_folder.unlock(held)
    assert run_folder.changes(path, new) == "", "nothing was saved, so nothing is continued"
    (tmp_path / "run/checkpoints/model").mkdir(parents=True)
    assert run_folder.changes(path, old) == ""
    said = run_folder.changes(path, new)
    assert f"{path} is continued with other settings" in said
    keys = [line.strip() for line in said.splitlines() if "->" in line]
    section = "dataloader_train.dataset"
    assert keys == [
        f"{section}.dir: a -> b", f"{section}.video_size: [64, 64] -> [48, 48]", f"{section}.crop: not set -> center"
    ]  # fmt: skip
    many = "{model: {" + ", ".join(f"k{i}: 1" for i in range(20)) + "}}"
    said = run_folder.changes(path, many)
    assert said.count("->") == 8 and "... and 15 more" in said  # 20, and the 3 that are gone
    (tmp_path / "run/config.yaml").write_text("{a: ")
    assert run_folder.changes(path, new) == "", "a damaged file is replaced"
