# SPDX-License-Identifier: Apache-2.0
"""Training on robot data as it lies on disk: it runs, saves which actions it knows, and resumes as if uninterrupted."""

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch

from cosmos_predict2.actions.transforms import ActionTransform, controller, relative_pose
from cosmos_predict2.checkpoints.card import read_card
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.tools.prepare.toy_folder import ToyFolder, write_folder
from imaginaire.errors import CheckpointError, DataError
from scripts.convert import convert
from tests.data.sources_libero import libero_tree
from tests.multiprocess import run_distributed
from tests.training import assert_resumes, run_dir, saved, train

CONFIG = "cosmos_predict2/configs/base/config.py"
BRIDGE, LIBERO = (
    "experiment=predict2_video2world_2b_action_conditioned_training",
    "experiment=predict2_video2world_2b_libero_action_conditioned",
)
PREDICT2P5 = "experiment=ac_reason_embeddings_rectified_flow_2b_256_320"
TINY, TINY_P25 = "model=predict2_v2w_tiny_action_conditioned", "model=predict2p5_v2w_tiny_action_conditioned"
NET = "model.config.pipe_config.net"
DATA = "dataloader_train.dataset"
NAME = "actions"
SHORT = [
    "job.project=tests",
    "job.group=engine",
    f"job.name={NAME}",
    "trainer.logging_iter=1",
    "checkpoint.save_iter=2",
    "dataloader_train.num_workers=0",
    "dataloader_train.batch_size=2",
    f"{DATA}.video_size=[48,48]",
    f"{DATA}.num_tokens=64",
    f"{DATA}.text_width=64",
    "model.config.pipe_config.ema.enabled=true",
]


def _toy(folder: Path, form: str) -> str:
    write_folder(str(folder), ToyFolder(episodes=4, frames=15, val_fraction=0.25, form=form, action_dim=4))
    return str(folder)


def bridge(folder: Path) -> list[str]:
    """The toy world in Bridge's layout: poses, from which actions of seven numbers are computed."""
    root = _toy(folder, "bridge")
    paths = [f"{DATA}.train_annotation_path={root}/annotation/train", f"{DATA}.video_path={root}"]
    return [BRIDGE, TINY, f"{NET}.action_dim=7", *SHORT, *paths]


def bridge_own(folder: Path) -> list[str]:
    """The same, as a user's own data."""
    return [*bridge(folder)[:-2], "dataloader_train=bridge_json_train", f"{DATA}.video_path={folder}"]


def bridge_p25(folder: Path) -> list[str]:
    return [PREDICT2P5, TINY_P25, *bridge(folder)[2:], "trainer.callbacks.draw_samples=null"]


def libero(folder: Path) -> list[str]:
    root = libero_tree(folder)
    return [LIBERO, TINY, f"{NET}.action_dim=7", *SHORT, f"{DATA}.root={root}"]


def lerobot(folder: Path) -> list[str]:
    root = _toy(folder, "lerobot")
    return [LIBERO, TINY, "dataloader_train=lerobot_train", *SHORT, f"{DATA}.root={root}"]


def views_and_state(folder: Path) -> list[str]:
    """Recordings with two cameras and a state; one episode lacks the second camera."""
    write_folder(
        str(folder),
        ToyFolder(episodes=4, frames=15, val_fraction=0, form="lerobot", setting="covered", tasks=("reach_ring",)),
    )
    files = LeRobotSource.open(folder)
    files.file_of(1, files.camera("wrist")).unlink()
    data = ["split_file=null", f"root={folder}", "camera=front+wrist", "missing_cameras=mask", "video_size=[32,32]"]
    return [
        *("experiment=world_model_recordings", "job.project=tests", "job.group=engine", f"job.name={NAME}"),
        *("trainer.logging_iter=1", "checkpoint.save_iter=2", "trainer.run_validation=false", f"{NET}.num_blocks=1"),
        *(f"trainer.callbacks.{name}=null" for name in ("draw_samples", "stop_rule")),
        *("dataloader_train.num_workers=0", "dataloader_train.batch_size=2", *(f"{DATA}.{key}" for key in data)),
        *("model.config.pipe_config.tokenizer.weights=null", "model.config.pipe_config.state=observation.state"),
    ]


FORMS: list[tuple[Callable[[Path], list[str]], ActionTransform]] = [
    (bridge, relative_pose()),
    (bridge_p25, relative_pose()),
    (bridge_own, attrs.evolve(relative_pose(), scale=(64.0, 64.0, *[1.0] * 5))),  # by their statistics
    (libero, controller()),
    (lerobot, controller(4, 1.0)),  # by its statistics
    (views_and_state, controller(4, 1.0)),
]
SLOW = (views_and_state,)  # the others are long


@pytest.mark.parametrize(
    ("form", "transform"),
    [
        pytest.param(*row, id=row[0].__name__, marks=pytest.mark.slow if row[0] in SLOW else pytest.mark.long)
        for row in FORMS
    ],
)
def test_every_form_trains_and_resumes_bit_by_bit(
    form: Callable[[Path], list[str]], transform: ActionTransform, tmp_path: Path
) -> None:
    assert_resumes(tmp_path, form(tmp_path / "data"), 2, 4, name=NAME, config=CONFIG)
    assert read_card(str(run_dir(tmp_path / "parts", NAME))).action_transform == transform


@pytest.mark.slow
def test_other_actions_do_not_go_on_with_a_run_and_shards_keep_what_it_knows(tmp_path: Path) -> None:
    options = bridge(tmp_path / "data")
    sharded = [*options, "ckpt_type=dcp"]
    assert train(tmp_path, [*sharded, "trainer.max_iter=1"], config=CONFIG) == 0
    assert read_card(str(run_dir(tmp_path, NAME))).action_transform == relative_pose()
    with pytest.raises(DataError, match=r"trained with actions .*scale \[20.* the data have .*scale \[10.*job.name="):
        train(tmp_path, [*sharded, "trainer.max_iter=2", f"{DATA}.action_scale=10"], config=CONFIG)
    other = "model.config.pipe_config.action_transform={kind: controller, scale: [20,20,20,20,20,20,20]}"
    with pytest.raises((CheckpointError, DataError), match=r"controller of 7 numbers"):
        train(tmp_path, [*sharded, "trainer.max_iter=2", other], config=CONFIG)
    convert(str(run_dir(tmp_path, NAME)), str(tmp_path / "converted"), "standard")
    facts = read_card(str(tmp_path / "converted")).pipeline  # far from its config.yaml
    assert facts["state_t"] == 4 and facts["net"]["action_dim"] == 7
    assert read_card(str(tmp_path / "converted")).action_transform == relative_pose()


LAYOUTS = {  # of two processes, for four samples a step
    "replicated": ["dataloader_train.batch_size=2"],
    "spread_and_sharded": [
        "dataloader_train.batch_size=4",
        "model_parallel.context_parallel_size=2",
        "trainer.distributed_parallelism=fsdp",
        "model.config.fsdp_shard_size=2",
        "ckpt_type=dcp",
    ],
}


def _train_layouts(root: Path, options: list[str], layouts: dict[str, list[str]]) -> None:
    for name, layout in layouts.items():
        assert train(root, [*options, *layout, f"job.name={name}", "trainer.max_iter=3"], config=CONFIG) == 0


@pytest.mark.long
def test_two_processes_train_with_actions_and_a_state_what_one_does(tmp_path: Path) -> None:
    options = [item for item in bridge(tmp_path / "data") if "batch_size" not in item]
    options += [f"{DATA}.state=pose", "model.config.pipe_config.state=pose"]
    options += ["+" + NET + ".state_range=${recorded_state_range:}"]
    run_distributed(_train_layouts, 2, (tmp_path, options, LAYOUTS))
    _train_layouts(tmp_path, options, {"one": ["dataloader_train.batch_size=4"]})
    one = saved(tmp_path, "one")["model"]
    for layout in LAYOUTS:
        two = saved(tmp_path, layout)["model"]
        assert "action_transform" in one and "net.state_head.leave.weight" in one
        assert read_card(str(run_dir(tmp_path, layout))).action_transform == relative_pose()
        torch.testing.assert_close(two, one, rtol=1e-5, atol=2e-5)
