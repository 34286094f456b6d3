# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.action_conditioned.dataset_bridge: from a folder to samples and batches."""

import json
import re
from pathlib import Path
from typing import Any

import attrs
import numpy
import pytest
import torch

from cosmos_predict2.actions.transforms import actions_from_field, pose_differences, relative_pose
from cosmos_predict2.data.action_conditioned.dataset_bridge import ActionConditionedDataset
from cosmos_predict2.data.action_conditioned.recordings import recording_of
from cosmos_predict2.data.video.clips import probe
from imaginaire.data.facts import facts_of
from imaginaire.errors import ConfigError, DataError
from tests.data.sources_bridge import bridge_tree, frame_value, recording
from tests.findings import problems

KEYS = {
    "video", "action", "action_transform", "t5_text_embeddings", "t5_text_mask", "fps", "image_size", "num_frames",
    "padding_mask", "ai_caption", "annotation_file", "__key__", "video_name",
}  # fmt: skip


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bridge_tree(tmp_path_factory.mktemp("bridge"), cameras=2)


def _dataset(root: Path, **changes: Any) -> ActionConditionedDataset:
    splits = {f"{split}_annotation_path": str(root / "annotation" / split) for split in ("train", "val", "test")}
    return ActionConditionedDataset(**{**splits, "video_path": str(root), "video_size": (32, 48), **changes})


def test_an_item_has_these_keys_and_names(bridge: Path) -> None:
    item = _dataset(bridge, video_size=(16, 32), num_tokens=8, text_width=4)[0]
    assert item.keys() == KEYS
    assert (item["fps"], item["num_frames"]) == (4.0, 13) and item["action"].shape == (12, 7)
    assert not item["t5_text_embeddings"].any() and item["t5_text_mask"].all()
    assert item["__key__"] == "0" and item["annotation_file"] == str(bridge / "annotation/train/0.json")
    assert item["ai_caption"] == "put the spoon on the towel, take 0"
    assert item["video_name"]["video_path"] == str(bridge / "videos/train/0/rgb.mp4")


def test_windows_frames_and_actions_belong_together(bridge: Path) -> None:
    dataset = _dataset(bridge, num_frames=5, sequence_interval=3)
    assert len(dataset) == 2 * (20 - 4 * 3)
    item = dataset[8 + 2]  # the third window of the second recording
    frames = numpy.arange(2, 2 + 5 * 3, 3)
    greys = item["video"].float().mean(dim=(0, 2, 3))
    assert torch.allclose(greys, torch.tensor([float(frame_value(1, k)) for k in frames]), atol=2)
    annotation = recording(1, 20)
    states, gripper = (numpy.array(annotation[key])[frames] for key in ("state", "continuous_gripper_state"))
    assert numpy.array_equal(item["action"], relative_pose().apply(pose_differences(states, gripper)).astype("float32"))


def test_validation_starts_at_intervals_and_modes_read_their_own_folder(bridge: Path) -> None:
    dataset = _dataset(bridge, mode="val", val_start_frame_interval=3)
    assert [dataset.windows[i][1][0] for i in range(len(dataset))] == [0, 3, 6]
    assert dataset[0]["__key__"] == "2"
    assert _dataset(bridge, mode="test")[0]["__key__"] == "3"
    assert len(_dataset(bridge, debug=True)) == 10


def test_accumulated_actions_and_the_other_options(bridge: Path) -> None:
    annotation = recording(0, 20)
    states, gripper = (numpy.array(annotation[key])[:13] for key in ("state", "continuous_gripper_state"))
    for options, wanted in [
        (dict(accumulate_action=True), relative_pose(accumulate="window")),
        (dict(accumulate_action=4), relative_pose(accumulate=4)),
        (dict(quaternion=True, gripper_rescale_factor=0.5), relative_pose(gripper_scale=0.5, quaternion=True)),
        (dict(action_scale=2.0), relative_pose(2.0)),
        (dict(rot6d="rows"), relative_pose(rot6d="rows")),
        (dict(rot6d="columns", accumulate_action=4), relative_pose(rot6d="columns", accumulate=4)),
    ]:
        dataset = _dataset(bridge, **options)
        form = dict(accumulate=wanted.accumulate, quaternion=wanted.quaternion, rot6d=wanted.rot6d)
        expected = wanted.apply(pose_differences(states, gripper, **form)).astype("float32")
        assert numpy.array_equal(dataset[0]["action"], expected), options
        assert dataset.action_transform.dim == expected.shape[1]
    assert "action" not in _dataset(bridge, load_action=False)[0]


def test_statistics_bring_recordings_of_any_scale_to_the_order_of_one(tmp_path: Path) -> None:
    root = bridge_tree(tmp_path, episodes={"train": 2, "val": 1})
    for path in (root / "annotation").rglob("*.json"):  # millimetres
        content = json.loads(path.read_text())
        content["state"] = [[*(1000 * x for x in row[:3]), *row[3:]] for row in content["state"]]
        path.write_text(json.dumps(content))
    for options in (
        {},
        dict(accumulate_action=True),
        dict(accumulate_action=4, sequence_interval=1),
        dict(rot6d="rows"),
        dict(quaternion=True),
    ):
        times_20, data = (_dataset(root, **options, action_transform=given) for given in (None, "statistics"))
        transform = data.action_transform
        assert transform.proposed and times_20.action_transform.proposed, "both are defaults"
        assert not transform.offset, "no motion stays 0"
        assert transform.yields_to(times_20.action_transform) and times_20.action_transform.yields_to(transform)
        actions = numpy.concatenate([data[i]["action"] for i in (0, len(data) - 1)])
        quantiles = _dataset(root, **options, action_transform="quantiles").action_transform
        assert quantiles.raw_form == transform.raw_form
        assert 0.3 < numpy.abs(actions[:, :3]).max() < 2 and numpy.abs(actions).max() < 3, options
        raw = times_20.action_transform.undo(times_20[0]["action"])
        assert numpy.allclose(data[0]["action"], transform.apply(raw), atol=1e-4)
        explicit = _dataset(
            root, **options, mode="val", action_transform=attrs.evolve(transform, proposed=False).to_dict()
        )
        assert explicit.action_transform == transform and not explicit.action_transform.proposed
    assert not transform.yields_to(_dataset(root).action_transform), "other raw numbers"
    assert not _dataset(root, action_scale=10.0).action_transform.proposed
    for options, message in [
        (dict(action_transform="statistic"), "action_transform"),
        (dict(action_transform="statistics", action_scale=2.0), "action_scale"),
        (dict(action_transform=transform), "quaternion"),
        (dict(rot6d="rows", action_transform=relative_pose(rot6d="columns")), "rot6d=rows"),
    ]:
        with pytest.raises(ConfigError, match=message):
            _dataset(root, **options)


RATIOS = ("sequence_interval", "fps_downsample_ratio")


def test_the_newer_names_mean_the_same(bridge: Path) -> None:
    old = _dataset(bridge, num_frames=5, sequence_interval=2)
    new = _dataset(bridge, num_action_per_chunk=4, fps_downsample_ratio=2)
    assert len(old) == len(new) and torch.equal(old[3]["video"], new[3]["video"])
    node = dict(_target_=ActionConditionedDataset, train_annotation_path=str(bridge / "annotation/train"))
    rates = [facts_of({**node, "video_path": str(bridge), name: 2}).rate for name in RATIOS]
    assert rates == [probe(bridge / "videos/train/0/rgb.mp4")[1] / 2] * 2
    with pytest.raises(ConfigError, match="num_frames=5"):
        _dataset(bridge, num_frames=5, num_action_per_chunk=12)


def test_a_camera_is_given(bridge: Path) -> None:
    assert _dataset(bridge, cam_id=1)[0]["video_name"]["video_path"].endswith("rgb_1.mp4")
    with pytest.raises(DataError, match=r"0\.json"):
        _dataset(bridge, cam_ids=[2])


def test_embeddings_beside_the_annotations_are_read(tmp_path: Path) -> None:
    root = bridge_tree(tmp_path, episodes={"train": 1}, num_frames=13)
    with pytest.raises(DataError, match=r"annotation/train/0\.npy"):
        _dataset(root, load_t5_embeddings=True)[0]
    rows = numpy.ones((1, 3, 4), dtype=numpy.float16)
    numpy.save(root / "annotation/train/0.npy", rows)
    item = _dataset(root, load_t5_embeddings=True, num_tokens=8, text_width=4)[0]
    assert item["t5_text_embeddings"].sum() == 12 and item["t5_text_mask"].tolist() == [1] * 3 + [0] * 5
    assert item["video_name"]["t5_embedding_path"].endswith("0.npy")
    with pytest.raises(DataError, match=r"\[3, 4\].*1024"):
        _dataset(root, load_t5_embeddings=True)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("state"), "it has no 'state'"),
        (lambda content: content.update(states=content.pop("state")), "Did you mean states"),
        (lambda content: content["continuous_gripper_state"].pop(), "20 states, but 19 gripper states"),
        (lambda content: content["state"][3].__setitem__(1, float("nan")), "NaN is no number"),
        (lambda content: content["state"][3].pop(), "not rows of equally many numbers"),
        (lambda content: content.update(videos=[]), "camera 0 is asked for"),
    ],
)
def test_a_broken_annotation_is_named_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, message: str
) -> None:
    root = bridge_tree(tmp_path, episodes={"train": 2})
    path = root / "annotation/train/0.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"0\.json") as error:
        _dataset(root)
    assert message in str(error.value)
    dataset = _dataset(root, skip_bad_samples=True)
    assert len(dataset) == 8 and dataset[0]["__key__"] == "1" and "1 of 2 annotations in" in caplog.text
    path.write_text("{")
    with pytest.raises(DataError, match=r"0\.json"):
        _dataset(root)


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    root = bridge_tree(tmp_path, episodes={"train": 1})
    right = dict(train_annotation_path=str(root / "annotation/train"), video_path=str(root))
    assert not list(problems(ActionConditionedDataset, **right))
    wrong = dict(train_annotation_path=str(root / "annotations/train"), video_path=str(root / "nowhere"))
    found = list(problems(ActionConditionedDataset, **wrong))
    assert len(found) == 2 and "annotations/train" in found[0] and "nowhere does not exist" in found[1]
    for path in (root / "annotations/train", root / "annotation"):
        with pytest.raises(DataError, match=str(path)):
            _dataset(root, train_annotation_path=str(path))
    (problem,) = problems(ActionConditionedDataset, **right, action_scale=0.0)
    assert "needs a number other than 0" in problem


def test_wrong_settings_are_reported(bridge: Path) -> None:
    for changes, message in [
        (dict(normalize=True), "destroys"),
        (dict(pre_encode=True), "pre_encode"),
        (dict(mode="training"), "Did you mean train"),
        (dict(video_size=(30, 48)), "multiples of 16"),
        (dict(num_frames=1), "2 frames at least"),
        (dict(sequence_interval=0), "sequence_interval=0"),
        (dict(cam_ids=[]), "cam_ids"),
        (dict(accumulate_action="frame"), "'frame'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            _dataset(bridge, **changes)
    with pytest.raises(DataError, match="num_frames=21"):
        _dataset(bridge, num_frames=21)


def test_rollouts_are_distinguished(tmp_path: Path) -> None:
    root = bridge_tree(tmp_path, episodes={"train": 2}, num_frames=13)
    path = root / "annotation/train/1.json"
    content = json.loads(path.read_text())
    del content["episode_id"]
    path.write_text(json.dumps(content | {"episode_metadata": {"is_eval": True, "segment_id": "s"}}))
    keys = {which: [item["__key__"] for item in _dataset(root, is_rollout=which)] for which in (None, True, False)}
    assert keys == {None: ["0", "s"], True: ["s"], False: ["0"]}


def test_the_page_of_the_layout_shows_what_is_computed(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[3] / "documentations/bridge_json.md").read_text()
    (example,) = re.findall(r"^```json\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    recording = recording_of(tmp_path / "0.json", json.loads(example))
    assert (recording.key, recording.caption) == ("0", "pick up the spoon")
    poses, gripper = recording.poses[:, :6], recording.poses[:, 6]
    actions = relative_pose().apply(pose_differences(poses, gripper))
    shown = " ".join(line[1:] for line in text.splitlines() if line.startswith(("# [[", "#  [")))
    numbers = numpy.array([float(word) for word in re.findall(r"-?\d+\.\d*", shown)]).reshape(2, 7)
    assert numbers == pytest.approx(actions, abs=6e-4)
    assert actions_from_field(json.loads(example)["action"], gripper) == pytest.approx(actions, abs=2e-3)
