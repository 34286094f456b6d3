# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.{toy_forms, toy_states}: the toy world in the Bridge layout and as bare states."""

import json
import sys
from pathlib import Path

import numpy
import pytest
import torch

from cosmos_predict2.actions.transforms import integrate
from cosmos_predict2.data.action_conditioned.dataset_bridge import ActionConditionedDataset
from cosmos_predict2.data.toy.states import read_states
from cosmos_predict2.data.toy.videos import ToyWorldStates, ToyWorldVideos
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.tools.prepare.toy import settings as toy_settings
from cosmos_predict2.tools.prepare.toy.folder import write_folder
from cosmos_predict2.tools.prepare.toy.forms import METRES_PER_PIXEL
from cosmos_predict2.tools.prepare.toy.settings import ToyFolder
from imaginaire.errors import ConfigError, DataError
from scripts import make_toy_world
from tests.findings import problems

SMALL = dict(episodes=4, frames=9, val_fraction=0.25)


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("toy") / "bridge"
    settings = ToyFolder(**SMALL, form="bridge", text_encoder="bytes", num_tokens=64, text_width=32, mix="expert")
    write_folder(str(out), settings)
    return out


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("toy") / "states"
    write_folder(str(out), ToyFolder(**SMALL, form="states", fps=5.0))
    return out


def _dataset(root: Path, mode: str = "train", **changes: object) -> ActionConditionedDataset:
    paths = {f"{split}_annotation_path": str(root / "annotation" / split) for split in ("train", "val")}
    options = dict(video_path=str(root), num_frames=9, video_size=(48, 48), mode=mode)
    return ActionConditionedDataset(**paths, **options | changes)


def test_the_bridge_form_has_its_files_and_nothing_else(bridge: Path) -> None:
    expected = {"dataset.json", "README.md"}
    for index in range(4):
        split, name = "val" if index == 3 else "train", f"episode_{index:06d}"
        expected |= {
            f"annotation/{split}/{name}.json",
            f"annotation/{split}/{name}.npy",
            f"videos/{split}/{name}/rgb.mp4",
        }
    assert {path.relative_to(bridge).as_posix() for path in bridge.rglob("*") if path.is_file()} == expected
    assert "continuous_gripper_state" in (bridge / "README.md").read_text()


def test_actions_of_the_bridge_form_lead_the_gripper_along_its_way(bridge: Path) -> None:
    episodes = ToyFolder(**SMALL, mix="expert").make(0, 4)
    dataset = _dataset(bridge)
    assert len(dataset) == 3 and len(_dataset(bridge, "val")) == 1
    for i in range(3):
        item = dataset[i]
        way = episodes.states[i][:, :2] * METRES_PER_PIXEL
        poses, closed = integrate([*way[0], 0, 0, 0, 0], item["action"].double().numpy())
        assert numpy.allclose(poses[:, :2], way, atol=1e-6) and not poses[:, 2:].any()
        assert numpy.allclose(closed, episodes.states[i][1:, 2], atol=1e-6)
        assert 0.05 < item["action"][:, :2].abs().max() < 1  # like those of a real arm
        drawn = torch.from_numpy(episodes.render(i)).permute(3, 0, 1, 2).float()
        assert (item["video"].float() - drawn).abs().mean() < 4
        assert item["ai_caption"] == episodes.captions[i]


def test_embeddings_of_the_bridge_form_are_read(bridge: Path) -> None:
    item = _dataset(bridge, load_t5_embeddings=True, num_tokens=64, text_width=32)[1]
    expected = BytesEncoder(64, 32).encode([item["ai_caption"]])[0]
    assert torch.allclose(item["t5_text_embeddings"], expected, atol=1e-3)
    assert torch.equal(item["t5_text_mask"], (expected != 0).any(-1).long())


def test_the_recorded_action_field_is_the_difference_of_the_states(bridge: Path) -> None:
    annotation = json.loads((bridge / "annotation/train/episode_000000.json").read_text())
    state, action = numpy.array(annotation["state"]), numpy.array(annotation["action"])
    assert action.shape == (8, 7) and numpy.allclose(numpy.diff(state, axis=0), action[:, :6], atol=1e-7)
    assert numpy.array(annotation["toy_states"], dtype=float).shape == (9, 10)


def test_states_give_the_same_samples_as_the_simulator(states: Path) -> None:
    assert {path.name for path in states.rglob("*.npz")} == {"states-000000.npz", "states-000003.npz"}
    read = ToyWorldStates(str(states / "train"), num_frames=5, start=2)
    made = ToyWorldVideos(num_episodes=4, num_frames=5, mix="mixed", num_steps=8, start=2)
    assert len(read) == 3
    for i in range(3):
        ours, theirs = read[i], made[i]
        assert ours.keys() == theirs.keys() and ours["fps"] == 5.0
        for key in ("video", "action", "t5_text_embeddings", "t5_text_mask", "image_size", "padding_mask"):
            assert torch.equal(ours[key], theirs[key]), key
        assert ours["ai_caption"] == theirs["ai_caption"]
    assert torch.equal(ToyWorldStates(str(states / "val"), num_frames=5, start=2)[0]["video"], made[3]["video"])


def test_states_of_many_files_are_joined_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_settings, "EPISODES_AT_ONCE", 3)
    settings = ToyFolder(**{**SMALL, "episodes": 8}, form="states")
    write_folder(str(tmp_path / "world"), settings)
    files = sorted((tmp_path / "world").rglob("*.npz"))
    assert [path.name for path in files] == ["states-000000.npz", "states-000003.npz", "states-000006.npz"]
    before = {path: path.stat().st_mtime_ns for path in files}
    files[1].unlink()
    write_folder(str(tmp_path / "world"), settings)
    assert [path.stat().st_mtime_ns == before[path] for path in files] == [True, False, True]
    episodes, fps = read_states(tmp_path / "world" / "train")
    expected = settings.make(0, 6)
    assert numpy.array_equal(episodes.states, expected.states) and episodes.captions == expected.captions
    assert fps == 10 and episodes.actions.dtype == numpy.float32


def test_broken_and_mixed_states_are_told(states: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no states.*There are some in .*train, .*val"):
        read_states(states)
    assert "--form states" in problems(ToyWorldStates, folder=str(tmp_path))[0]
    assert not problems(ToyWorldStates, folder=str(states / "train"))
    content = (states / "train" / "states-000000.npz").read_bytes()
    for broken in (b"", content[:500], content[:-2000], b"no archive at all"):
        (tmp_path / "states-000000.npz").write_bytes(broken)
        with pytest.raises(DataError, match="states-000000"):
            read_states(tmp_path)
    (tmp_path / "states-000000.npz").write_bytes(content)
    write_folder(str(tmp_path / "other"), ToyFolder(**SMALL, form="states", seed=1))
    (tmp_path / "states-000003.npz").write_bytes((tmp_path / "other/train/states-000000.npz").read_bytes())
    with pytest.raises(DataError, match=r"has the seed 1, but .* 0"):
        read_states(tmp_path)
    with pytest.raises(ConfigError, match="Frames 0 to 9 of episodes with 9 frames"):
        ToyWorldStates(str(states / "train"), num_frames=10)


def test_forms_do_not_mix_and_unknown_ones_are_named(bridge: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"form bridge \(now video\)"):
        write_folder(str(bridge), ToyFolder(**SMALL))
    with pytest.raises(ConfigError, match=r"no form 'bridges'\. Did you mean bridge"):
        ToyFolder(form="bridges")
    with pytest.raises(ConfigError, match="keeps no embeddings"):
        ToyFolder(form="states", text_encoder="bytes")
    out = tmp_path / "world"
    write_folder(str(out), ToyFolder(**SMALL, form="bridge"))
    write_folder(str(out), ToyFolder(**SMALL, form="states"), overwrite=True)
    assert sorted(path.name for path in out.iterdir()) == ["README.md", "dataset.json", "train", "val"]


def test_a_folder_of_an_older_version_is_one_of_clips(tmp_path: Path) -> None:
    write_folder(str(tmp_path / "world"), ToyFolder(**SMALL))
    path = tmp_path / "world" / "dataset.json"
    record = json.loads(path.read_text())
    del record["settings"]["form"]
    path.write_text(json.dumps(record))
    write_folder(str(tmp_path / "world"), ToyFolder(**SMALL))  # the same: nothing is left to do


@pytest.mark.parametrize("form", ["bridge", "states"])
def test_the_script_writes_the_form(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--out", str(tmp_path / "world"), "--episodes", "2", "--frames", "5", "--form", form]
    monkeypatch.setattr(sys, "argv", ["make_toy_world", *arguments])
    assert make_toy_world.main() == 0
    assert json.loads((tmp_path / "world" / "dataset.json").read_text())["settings"]["form"] == form


def test_the_estimate_of_the_size_of_states_is_enough(tmp_path: Path) -> None:
    settings = ToyFolder(episodes=300, form="states")
    write_folder(str(tmp_path), settings)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.npz")) < settings.bytes_needed() < 5_000_000
