# SPDX-License-Identifier: Apache-2.0
"""Experiments on public robot data sets: values of the recipes, and the tiny twins train on miniature folders."""

from pathlib import Path

import numpy
import pytest

from cosmos_predict2.checkpoints import read_card
from cosmos_predict2.configs.action_conditioned.defaults.data import ROBOT_SIZES
from cosmos_predict2.data.lerobot.robots import ROBOTS
from imaginaire.config.compose import compose
from imaginaire.errors import DataError
from imaginaire.training import preflight
from tests.data.sources_robots import write_robot
from tests.training import run_dir, train

BASE = "cosmos_predict2/configs/base/config.py"
TINY = "predict2_video2world_tiny_{}_action_conditioned"
ROOT, UNITS = "dataloader_train.dataset.root", "dataloader_train.dataset.units"
FOLDERS = {"droid": "droid_lerobot", "agibot_world": "agibot_world", "so100": "so100_degrees"}


def test_every_robot_has_its_sections() -> None:
    assert set(ROBOTS) == set(ROBOT_SIZES) == set(FOLDERS)
    for robot in ROBOTS.values():
        for form in robot.forms.values():
            assert sum((part.end or 0) - part.start for part in form.action) == robot.action_dim
            assert all(part.absolute is not None for part in form.action)


@pytest.mark.parametrize("robot", FOLDERS)
def test_a_recipe_takes_all_but_the_folder_from_the_robot(robot: str, tmp_path: Path) -> None:
    root = write_robot(tmp_path / "data", FOLDERS[robot], "v3.0", episodes=3, length=48)
    own = [f"experiment={TINY.format(robot)}", f"{ROOT}={root}"]
    with_units = [*own, f"{UNITS}=degrees"] if robot == "so100" else own
    config = compose(BASE, with_units)
    assert [str(one) for one in preflight.findings(config) if one.key.startswith("dataloader")] == []
    train_data, val = config.dataloader_train.dataset, config.dataloader_val.dataset
    assert (train_data.embodiment, train_data.stride, train_data.skip_idle) == (robot, 3, robot == "droid")
    assert (val.embodiment, val.root, val.units) == (robot, str(root), train_data.units)
    assert (train_data.data_split, val.data_split) == ("train", "val")
    assert config.model.config.pipe_config.net.action_dim == ROBOTS[robot].action_dim
    if robot == "so100":
        found = [one for one in preflight.findings(compose(BASE, own)) if one.key == "dataloader_train.dataset"]
        assert len(found) == 1 and "units is required" in found[0].text and found[0].level == "error"


def options(robot: str, root: Path, *more: str) -> list[str]:
    """Two iterations of the tiny model."""
    short = ["trainer.max_iter=2", "checkpoint.save_iter=2", "trainer.run_validation=false"]
    short += ["dataloader_train.num_workers=0", "dataloader_train.batch_size=1", "trainer.callbacks.draw_samples=null"]
    name = ["job.project=tests", "job.group=engine", f"job.name={robot}"]
    return [f"experiment={TINY.format(robot)}", f"{ROOT}={root}", *short, *name, *more]


def test_positions_are_not_summed_and_velocities_are(tmp_path: Path) -> None:
    for name, moves in (("droid_cosmos3", []), ("droid_openpi", [*range(7)])):
        root = write_robot(tmp_path / name, name, episodes=3, length=48)
        config = compose(BASE, [f"experiment={TINY.format('droid')}", f"{ROOT}={root}"])
        assert list(config.model.config.pipe_config.net.summed_action_dims) == moves


@pytest.mark.slow
def test_weights_keep_quantiles_and_refuse_other_units(tmp_path: Path) -> None:
    root = write_robot(tmp_path / "droid", "droid_lerobot", "v3.0", episodes=4)
    quantiles = "dataloader_train.dataset.action_transform=quantiles"
    assert train(tmp_path, options("droid", root, quantiles), config=BASE) == 0
    kept = read_card(str(run_dir(tmp_path, "droid"))).action_transform
    assert kept is not None and kept.stats is not None and kept.scale[7] == 1
    ends = kept.apply([kept.stats["q01"], kept.stats["q99"]])
    assert numpy.allclose(ends[:, :7], [[-1.0] * 7, [1.0] * 7])
    root, camera = write_robot(tmp_path / "so100", "so100_m100", episodes=2), "dataloader_train.dataset.camera=front"
    assert train(tmp_path, options("so100", root, camera, f"{UNITS}=m100"), config=BASE) == 0
    with pytest.raises(DataError, match=r"scale \[0.0111.* but the checkpoint has .* scale \[0.01,"):
        train(tmp_path, options("so100", root, camera, f"{UNITS}=degrees", "trainer.max_iter=3"), config=BASE)
