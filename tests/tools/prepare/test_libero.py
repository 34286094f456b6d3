# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.tools.prepare.libero and its command: demonstrations to folders that train."""

import json
from pathlib import Path

import numpy
import pytest
import torch

from cosmos_predict2.actions.statistics import read_statistics
from cosmos_predict2.actions.transforms import ActionTransform, controller, relative_pose
from cosmos_predict2.data.action_conditioned.dataset_bridge import ActionConditionedDataset
from cosmos_predict2.data.action_conditioned.dataset_libero import list_demos, read_poses
from cosmos_predict2.tools.prepare import libero
from scripts import prepare_libero_data
from tests.checkpoints.hub_server import Hub
from tests.data.sources_libero import CAMERAS, demo, libero_tree
from tests.tools.prepare.conftest import Start

pytest.importorskip("h5py", reason="h5py is not installed")
TASK = "pick_up_the_black_bowl_next_to_the_plate_and_place_it_on_the_plate"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return libero_tree(tmp_path_factory.mktemp("libero"))


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "bridge"
    outcome = libero.prepare(source, out, libero.LiberoSettings(val_every=3), workers=0)
    assert len(outcome.results) == 6 and not outcome.faults
    return out


@pytest.fixture
def run(start: Start):
    return lambda *arguments: start(prepare_libero_data, *arguments, "--workers", 0)


def test_demonstrations_become_recordings_that_train(source: Path, exported: Path) -> None:
    splits = {f"{split}_annotation_path": str(exported / "annotation" / split) for split in ("train", "val")}
    options = dict(video_path=str(exported), video_size=(16, 16), cam_id=0)
    train, val = (ActionConditionedDataset(**splits, **options, mode=mode) for mode in ("train", "val"))
    assert len(train) == 4 * 4 and len(val) == 2 * 4
    item = next(item for item in train if item["__key__"] == f"libero_spatial-{TASK}-demo_1")
    assert item["ai_caption"] == TASK.replace("_", " ")
    stored = torch.from_numpy(demo(1, 16)["obs/agentview_rgb"][:13]).permute(3, 0, 1, 2)
    assert (item["video"].float() - stored.flip(-1, -2).float()).abs().mean() < 4
    poses, closed = read_poses(list_demos(source / "libero_spatial" / f"{TASK}_demo.hdf5")[1])
    way = numpy.linalg.norm(numpy.diff(poses[:13, :3], axis=0), axis=1) * 20
    assert numpy.allclose(item["action"][:, :3].norm(dim=1), way, atol=1e-4)
    assert numpy.allclose(item["action"][:, 6], closed[1:13], atol=1e-5)


def test_the_annotation_keeps_the_controllers_actions_and_all_cameras(exported: Path) -> None:
    annotation = json.loads((exported / f"annotation/train/libero_spatial-{TASK}-demo_0.json").read_text())
    assert numpy.allclose(annotation["action"], demo(0, 16)["actions"][:-1], atol=1e-6)
    assert [Path(video["video_path"]).stem for video in annotation["videos"]] == list(CAMERAS)
    assert all((exported / video["video_path"]).is_file() for video in annotation["videos"])


def test_the_record_says_rotation_transform_and_counts(exported: Path) -> None:
    record = json.loads((exported / "dataset.json").read_text())
    assert record["is_complete"] and record["is_rotated"] and record["form"] == "bridge"
    assert record["counts"] == {"train": 4, "val": 2, "frames": 96}
    assert ActionTransform.from_dict(record["action_transform"]) == relative_pose()
    statistics = read_statistics(exported / "dataset_statistics.json", "libero_spatial")
    actions = numpy.concatenate([demo(k, 16)["actions"] for k in (0, 1)])  # those of training
    assert numpy.allclose(statistics.action.mean, actions.mean(0)) and statistics.num_trajectories == 2
    assert statistics.proprio is not None and len(statistics.proprio.mean) == 8
    assert statistics.action.mask is not None and statistics.action.mask.tolist() == [True] * 6 + [False]


def test_what_is_there_is_not_written_again(
    source: Path, run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--source", source, "--out", out, "--suites", "libero_10", "--cameras", "agentview_rgb"]
    assert run(*arguments, "--dry-run") == 0 and not out.exists()
    assert run(*arguments) == 0
    videos = sorted(out.rglob("*.mp4"))
    assert len(videos) == 3
    annotation = next((out / "annotation" / "train").glob("*demo_1.json"))
    before = {path: path.stat().st_mtime_ns for path in videos}
    annotation.unlink()  # as if it had been stopped there
    assert run(*arguments) == 0
    assert [path.parent.name for path in videos if path.stat().st_mtime_ns != before[path]] == [annotation.stem]
    assert run(*arguments, "--no-rotate") == 2
    assert "is_rotated True (now False)" in capsys.readouterr().err
    assert run("--source", source, "--out", out, "--cameras", "agentview_rgb") == 2
    assert "suites ['libero_10'] (now ['libero_10', 'libero_spatial'])" in capsys.readouterr().err


def test_keeping_the_files_writes_captions_statistics_and_the_record(run, tmp_path: Path) -> None:
    source = libero_tree(tmp_path)
    assert run("--source", source, "--form", "keep", "--dry-run") == 0
    assert not (source / "metas").exists()
    assert run("--source", source, "--form", "keep") == 0
    captions = {path.stem: path.read_text() for path in (source / "metas").iterdir()}
    assert captions[TASK] == TASK.replace("_", " ") + "\n"
    assert "turn on the stove and put the moka pot on it\n" in captions.values()
    record = json.loads((source / "dataset.json").read_text())
    assert ActionTransform.from_dict(record["action_transform"]) == controller() and not record["is_rotated"]
    assert read_statistics(source / "dataset_statistics.json", "libero_10").num_transitions == 48


def test_a_broken_file_fails_alone(run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = libero_tree(tmp_path / "in", suites={"libero_goal": ["a_task", "b_task"]}, num_demos=1)
    file = source / "libero_goal" / "a_task_demo.hdf5"
    file.write_bytes(file.read_bytes()[:1000])
    out = tmp_path / "out"
    assert run("--source", source, "--out", out) == 1
    assert "a_task_demo.hdf5 is not an HDF5 file" in caplog.text
    assert [path.stem for path in out.rglob("*.json") if "demo" in path.stem] == ["libero_goal-b_task-demo_0"]
    assert not json.loads((out / "dataset.json").read_text())["is_complete"]
    libero_tree(tmp_path / "in", suites={"libero_goal": ["a_task"]}, num_demos=1)  # fetched again
    assert run("--source", source, "--out", out) == 0
    assert json.loads((out / "dataset.json").read_text())["is_complete"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actions", "text"),
        ("actions", numpy.full((16, 7), numpy.nan)),
        ("actions", numpy.zeros(16)),
        ("obs", numpy.zeros(3)),
        ("obs/ee_ori", numpy.full((16, 3), numpy.inf)),
    ],
)
def test_a_demonstration_of_other_content_fails_alone_and_is_named(
    key: str, value: object, run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import h5py

    source = libero_tree(tmp_path / "in", suites={"libero_goal": ["a_task", "b_task"]}, num_demos=1)
    with h5py.File(source / "libero_goal" / "a_task_demo.hdf5", "a") as file:
        del file[f"data/demo_0/{key}"]
        file[f"data/demo_0/{key}"] = value
    assert run("--source", source, "--out", tmp_path / "out") == 1
    assert "a_task_demo.hdf5: demo_0" in caplog.text
    assert [path.stem for path in (tmp_path / "out").rglob("*demo*.json")] == ["libero_goal-b_task-demo_0"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--out mine", "mine"),
        ("--out full", "full"),
        ("--out out --val_every 1", "val_every"),
        ("--out out --suites libero_gaol", "libero_goal"),
        ("--out out --cameras agentview", "agentview_rgb"),
        ("--form keep --no_rotate", "--no_rotate"),
    ],
)
def test_wrong_input_is_exit_2_and_named(
    flags: str, named: str, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = libero_tree(tmp_path / "in", suites={"libero_goal": ["a_task"]}, num_demos=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    if "full" in flags:
        monkeypatch.setattr("imaginaire.storage.free_bytes", lambda path: 100)
    monkeypatch.chdir(tmp_path)
    assert run("--source", source, *flags.split()) == 2 and named in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / "full").exists()


def test_suites_are_fetched_from_the_hub(source: Path, hub: Hub, run, tmp_path: Path) -> None:
    files = {path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*.hdf5")}
    hub.repositories[libero.REPOSITORY] = files
    arguments = ["--repo_id", "--source", tmp_path / "in", "--suites", "libero_10", "--form", "keep"]
    assert run(*arguments, "--dry_run") == 0 and not (tmp_path / "in").exists()
    assert run(*arguments) == 0
    assert [path.parent.name for path in (tmp_path / "in").rglob("*.hdf5")] == ["libero_10"]
