# SPDX-License-Identifier: Apache-2.0
"""imaginaire.training.run_folder: one run holds it, and its config.yaml is that of the newest training."""

import logging
from pathlib import Path

import pytest

from imaginaire.errors import CheckpointError, ConfigError
from imaginaire.training import run_folder


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
