# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.action_conditioned.dataset_libero: HDF5 demonstrations to samples."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.actions.rotations import axis_angle_to_matrix, euler_to_matrix
from cosmos_predict2.configs.action_conditioned.defaults.data import libero_with_rollouts
from cosmos_predict2.data.action_conditioned.dataset_libero import (
    LiberoDataset,
    caption,
    find_suites,
    list_demos,
    read_poses,
)
from cosmos_predict2.text.embeddings import pickles
from imaginaire.config import lazy_config
from imaginaire.data.facts import facts_of
from imaginaire.errors import ConfigError, DataError
from tests.data.action_conditioned.test_dataset_bridge import KEYS
from tests.data.sources_libero import demo, libero_tree
from tests.findings import problems

h5py = pytest.importorskip("h5py", reason="h5py is not installed")


@pytest.fixture(scope="module")
def libero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return libero_tree(tmp_path_factory.mktemp("libero"), num_demos=11)


def _dataset(root: Path, **changes: Any) -> LiberoDataset:
    return LiberoDataset(**{"root": str(root), "video_size": (16, 16), "num_tokens": 8, "text_width": 4, **changes})


def test_an_item_has_the_frames_and_the_controllers_actions(libero: Path) -> None:
    dataset = _dataset(libero, suites=["libero_spatial"], num_frames=5, video_size=(32, 48))
    assert len(dataset) == 10 * (16 - 4)
    item = dataset[12 + 3]  # the fourth window of demo_1
    wanted = demo(1, 16)
    assert item.keys() == KEYS
    assert numpy.array_equal(item["action"], (20 * wanted["actions"][3:7]).astype("float32"))
    assert item["ai_caption"] == "pick up the black bowl next to the plate and place it on the plate"
    assert item["__key__"].startswith("libero_spatial/pick_up") and item["__key__"].endswith("/demo_1")
    assert item["fps"] == 4.0 and not item["t5_text_embeddings"].any() and item["t5_text_mask"].all()


def test_the_pictures_are_turned_when_asked(libero: Path) -> None:
    stored = torch.from_numpy(demo(0, 16)["obs/agentview_rgb"][:13]).permute(3, 0, 1, 2)
    assert torch.equal(_dataset(libero, rotate=False, suites=["libero_10"])[0]["video"], stored)
    assert torch.equal(_dataset(libero, rotate=True, suites=["libero_10"])[0]["video"], stored.flip(-1, -2))


def test_validation_takes_every_tenth_demonstration(libero: Path) -> None:
    keys = {
        mode: {item["__key__"].rpartition("_")[2] for item in _dataset(libero, mode=mode)} for mode in ("val", "all")
    }
    assert keys == {"val": {"9"}, "all": {str(k) for k in range(11)}}
    assert {i["__key__"].rpartition("_")[2] for i in _dataset(libero)} == {str(k) for k in range(11) if k != 9}
    with pytest.raises(DataError, match="mode='val'"):
        _dataset(libero, mode="val", val_every=0)


def test_with_a_stride_moves_add_up_and_the_gripper_is_the_last(libero: Path) -> None:
    item = _dataset(libero, suites=["libero_10"], num_frames=4, stride=3)[1]
    actions = demo(0, 16)["actions"][1:10].reshape(3, 3, 7)
    expected = numpy.concatenate([actions[:, :, :6].sum(1), actions[:, -1, 6:]], axis=1) * 20
    assert numpy.allclose(item["action"], expected, atol=1e-5)
    assert facts_of(dict(_target_=LiberoDataset, root=str(libero), stride=4)).rate == 5
    assert item["video"][0, :, 15, 0].tolist() == [20 + 5 * k for k in (1, 4, 7, 10)]


def test_a_transform_may_be_given_as_plain_values(libero: Path) -> None:
    row = {"kind": "controller", "scale": [1.0] * 6 + [0.5]}
    item = _dataset(libero, suites=["libero_10"], action_transform=row)[0]
    assert numpy.allclose(item["action"][:, 6], 0.5 * demo(0, 16)["actions"][:12, 6])
    own = _dataset(libero, suites=["libero_10"], action_transform="statistics")
    raw = own.action_transform.undo(own[0]["action"])
    assert own.action_transform.proposed and numpy.allclose(raw, demo(0, 16)["actions"][:12], atol=1e-6)
    assert 0.3 < own[0]["action"].abs().max() < 3
    with pytest.raises(ConfigError, match="hold controller actions"):
        _dataset(libero, action_transform={"kind": "relative_pose", "scale": [20.0] * 6 + [1.0]})
    with pytest.raises(DataError, match=r"\[12, 7\].*3 numbers"):
        _dataset(libero, action_transform={"kind": "controller", "scale": [1.0] * 3})[0]


def test_a_camera_that_is_not_there_is_named(libero: Path) -> None:
    with pytest.raises(DataError, match="'obs/agentview'"):
        _dataset(libero, cameras=["agentview"])[0]


def test_captions_leave_the_scene_out() -> None:
    assert caption("KITCHEN_SCENE10_close_the_drawer") == "close the drawer"
    assert caption("LIVING_ROOM_SCENE2_put_both_pots") == "put both pots"
    assert caption("open_the_middle_drawer") == "open the middle drawer"


def test_embeddings_of_the_tasks_are_read(tmp_path: Path) -> None:
    root = libero_tree(tmp_path, suites={"libero_goal": ["open_the_drawer"]}, num_demos=1)
    with pytest.raises(DataError, match="prepare_libero_data"):
        _dataset(root, load_t5_embeddings=True)
    (root / "t5_xxl").mkdir()
    pickles.write(root / "t5_xxl" / "open_the_drawer.pickle", torch.ones(3, 4))
    item = _dataset(root, load_t5_embeddings=True)[0]
    assert item["t5_text_embeddings"].sum() == 12 and item["t5_text_mask"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]


def test_poses_are_angles_and_the_gripper_is_0_to_1(libero: Path) -> None:
    file = next((libero / "libero_10").glob("*.hdf5"))
    poses, closed = read_poses(list_demos(file)[2])
    wanted = demo(2, 16)
    assert numpy.array_equal(poses[:, :3], wanted["obs/ee_pos"])
    assert numpy.allclose(euler_to_matrix(poses[:, 3:]), axis_angle_to_matrix(wanted["obs/ee_ori"]), atol=1e-12)
    assert numpy.allclose(closed, 1 - wanted["obs/gripper_states"][:, 0] / 0.04)


def test_broken_files_are_named_or_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = libero_tree(tmp_path, suites={"libero_goal": ["a_task", "b_task", "c_task"]}, num_demos=1)
    file = root / "libero_goal" / "a_task_demo.hdf5"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match=r"a_task_demo\.hdf5"):
        _dataset(root)
    with h5py.File(root / "libero_goal" / "b_task_demo.hdf5", "a") as content:
        del content["data/demo_0/obs/agentview_rgb"]
    dataset = _dataset(root, skip_bad_samples=True)
    assert "1 of 3 files are excluded" in caplog.text and len(dataset) == 8
    assert dataset[1]["__key__"] == "libero_goal/c_task/demo_0" and "no 'obs/agentview_rgb'" in caplog.text


def test_wrong_settings_and_folders_are_reported(libero: Path, tmp_path: Path) -> None:
    for changes, message in [
        (dict(mode="test"), "'test'"),
        (dict(cameras="agentview_rgb"), "a list of one name"),
        (dict(val_every=1), "2 or more, or 0"),
        (dict(stride=0), "stride=0"),
        (dict(start_interval=0), "start_interval=0"),
        (dict(video_size=(10, 16)), "multiples of 16"),
    ]:
        with pytest.raises(ConfigError, match=message):
            _dataset(libero, **changes)
    for root, suites, message in [
        (libero / "nowhere", None, "does not exist"),
        (libero, ["libero_spatia"], "libero_spatial"),
        (tmp_path, None, "has no folder with"),
    ]:
        with pytest.raises(DataError, match=message):
            find_suites(root, suites)
        assert any(problems(LiberoDataset, root=str(root), suites=suites))
    assert not list(problems(LiberoDataset, root=str(libero)))
    for transform, message in [
        (dict(kind="relative_pose", scale=[20.0] * 7), "action_transform.kind"),
        (dict(kind="controller", statistics=str(tmp_path / "none.json")), "none.json"),
    ]:
        assert message in "".join(problems(LiberoDataset, root=str(libero), action_transform=transform))


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy's own attempts, of which those with an even number fail."""
    import h5py

    root = libero_tree(tmp_path_factory.mktemp("attempts"), num_demos=6)
    for path in root.rglob("*.hdf5"):
        with h5py.File(path, "a") as file:
            for k in (0, 2, 4):
                file[f"data/demo_{k}/rewards"][:] = 0
    return root


def test_attempts_are_chosen_by_how_they_ended(attempts: Path) -> None:
    def numbers(**options: Any) -> set[str]:
        return {item["__key__"][-1] for item in _dataset(attempts, suites=["libero_10"], mode="all", **options)}

    assert numbers() == {str(k) for k in range(6)}
    assert numbers(outcome="success") == {"1", "3", "5"} and numbers(outcome="failure") == {"0", "2", "4"}
    with pytest.raises(ConfigError, match="Did you mean failure"):
        _dataset(attempts, outcome="failures")
    with pytest.raises(DataError, match="no demonstration that ended in failure"):
        _dataset(libero_tree(attempts.parent / "good", num_demos=1), outcome="failure")


def test_demonstrations_and_attempts_of_both_ends_are_mixed(libero: Path, attempts: Path) -> None:
    loader = libero_with_rollouts("spatial")
    for name, node in loader.datasets.items():
        node.root = str(libero if name == "demonstrations" else attempts)
        node.num_frames, node.video_size, node.num_tokens, node.text_width = 5, [16, 16], 4, 8
    loader.num_workers = 0
    loader.batch_size = 8
    names = next(iter(lazy_config.instantiate(loader)))["dataset_name"]
    assert [names.count(name) for name in ("demonstrations", "successes", "failures")] == [4, 2, 2]
