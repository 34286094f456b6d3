# SPDX-License-Identifier: Apache-2.0
"""An experiment in a user's own module, outside the packages, that starts from one of ours."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

from imaginaire.config import lazy_yaml, registry
from imaginaire.config.compose import compose, experiment_names
from tests.programs import HANG_S, python

BASE = "cosmos_predict2/configs/base/config.py"
DATA = """
from cosmos_predict2.data.toy import ToyWorldVideos


class Mine(ToyWorldVideos):
    def __init__(self, num_clips: int = 8) -> None:
        super().__init__(num_episodes=num_clips, tasks=["touch_puck"])
"""
CONFIG = """
from cosmos_predict2.configs.base.config import make_config as base_config
from imaginaire.compose import register_experiment
from imaginaire.data import ResumableLoader
from imaginaire.lazy_config import LazyCall as L
from my_clips import Mine


def child(parent, name, clear):
    return dict(
        defaults=[f"/experiment/{parent}", *([{"override /dataloader_train": None}] if clear else []), "_self_"],
        job=dict(project="mine", name=name),
        dataloader_train=L(ResumableLoader)(dataset=L(Mine)(), batch_size=2),
        trainer=dict(max_iter=2, run_validation=False),
    )


def make_config():
    config = base_config()
    agibot = "predict2_video2world_training_2b_agibot_head_center_fisheye_color_480p_10fps"
    register_experiment("mine_agibot", child(agibot, "mine_agibot", True))
    tiny = "predict2_video2world_training_tiny_agibot_head_center_fisheye_color"
    register_experiment("mine_tiny", child(tiny, "mine_tiny", True))
    register_experiment("mine_next", dict(defaults=["/experiment/mine_agibot", "_self_"], job=dict(name="mine_next")))
    return config
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    experiment_names(BASE)  # our modules register once in a process: what they register must outlive this test
    (tmp_path / "my_clips.py").write_text(DATA)
    (tmp_path / "my_config.py").write_text(CONFIG)
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(lazy_yaml, "_import_folders", list(lazy_yaml._import_folders))
    store, path = ConfigStore.instance(), list(sys.path)
    kept = dict(store.repo["experiment"])
    yield str(tmp_path / "my_config.py")
    store.repo["experiment"] = kept
    sys.path[:] = path
    for name in ("my_clips", "my_config"):
        sys.modules.pop(name, None)


def test_a_child_has_its_own_data_and_all_else_of_its_parent(config: str) -> None:
    names = experiment_names(config)
    assert {"mine_agibot", "mine_tiny", "mine_next", "predict2_video2world_training_2b_groot_gr1_480"} <= set(names)
    for name in ("mine_agibot", "mine_next"):
        made = compose(config, [f"experiment={name}"])
        assert made.job.path == f"mine/video2world/{name}"
        assert "Mine" in str(made.dataloader_train.dataset["_target_"])
        assert set(made.dataloader_train.dataset) == {"_target_", "num_clips"}, "nothing of the parent's data is left"
        assert made.dataloader_train.num_workers == 0 and made.dataloader_val.dataset.dataset_dir.endswith("/val")
        assert made.model.config.pipe_config.state_t == 16 and made.optimizer.lr == 2**-15.5
        assert made.model.config.pipe_config.max_num_conditional_frames == 1


@pytest.mark.slow
def test_it_trains_from_a_folder_of_its_own(config: str) -> None:
    folder = Path(config).parent
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python(), "-m", "scripts.train", "--config=my_config.py", "--", "experiment=mine_tiny"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "checkpoints/mine/video2world/mine_tiny/checkpoints/model/iter_000000002.pt").is_file()
    assert "_target_: my_clips.Mine" in (folder / "checkpoints/mine/video2world/mine_tiny/config.yaml").read_text()
