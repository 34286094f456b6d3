# SPDX-License-Identifier: Apache-2.0
"""The toy world on disk: as clips, in the layouts of Bridge and LeRobot, and as bare states."""

import json
from pathlib import Path

import numpy
import pytest
import torch

from cosmos_predict2.data.action_conditioned.dataset_bridge import ActionConditionedDataset
from cosmos_predict2.data.lerobot.info import read_info
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.toy.videos import ToyWorldStates, ToyWorldVideos, read_states
from cosmos_predict2.data.video.media import read_video
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings import pickles
from cosmos_predict2.text.embeddings.folder import read_embedding
from cosmos_predict2.tools.prepare import toy_folder
from cosmos_predict2.tools.prepare.toy_folder import METRES_PER_PIXEL, ToyFolder, write_folder
from cosmos_predict2.toy_world.episodes import make_episodes
from imaginaire.errors import ConfigError, DataError
from scripts import make_toy_world
from tests.actions.integrated import integrate
from tests.data.video_files import same
from tests.findings import problems
from tests.programs import call
from tests.tools.prepare.conftest import Start, names

FEW = dict(episodes=4, frames=9, val_fraction=0.25)
TEXT = dict(text_encoder="bytes", num_tokens=64, text_width=32)
CLIPS = ToyFolder(**FEW, **TEXT)
ENCODER = BytesEncoder(64, 32)
SPLITS = {index: "val" if index == 3 else "train" for index in range(4)}


def _written(factory: pytest.TempPathFactory, settings: ToyFolder) -> Path:
    out = factory.mktemp("toy") / settings.form
    write_folder(str(out), settings, command="a command")
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory, CLIPS)


@pytest.fixture(scope="module")
def bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory, ToyFolder(**FEW, **TEXT, form="bridge", mix="expert"))


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _written(tmp_path_factory, ToyFolder(**FEW, form="states", fps=5.0))


@pytest.mark.parametrize(
    ("form", "once", "of_each"),
    [
        (
            "folder",
            ["train/t5_xxl/embeddings.json", "val/t5_xxl/embeddings.json"],
            ["{s}/videos/{n}.mp4", "{s}/metas/{n}.txt", "{s}/annotation/{n}.json", "{s}/t5_xxl/{n}.pickle"],
        ),
        ("bridge", [], ["annotation/{s}/{n}.json", "annotation/{s}/{n}.npy", "videos/{s}/{n}/rgb.mp4"]),
        ("states", ["train/states-000000.npz", "val/states-000003.npz"], []),
    ],
)
def test_a_form_has_its_files_and_nothing_else(
    form: str, once: list[str], of_each: list[str], request: pytest.FixtureRequest
) -> None:
    every = {path.format(s=split, n=f"episode_{i:06d}") for i, split in SPLITS.items() for path in of_each}
    out = request.getfixturevalue(form)
    assert names(out) == {"dataset.json", "README.md", *once, *every}
    record = json.loads((out / "dataset.json").read_text())
    assert record["is_complete"] and record["command"] == "a command" and record["settings"]["frames"] == 9
    assert (record["counts"]["train"], record["counts"]["val"]) == (3, 1)
    assert "a command" in (out / "README.md").read_text()


def test_clips_are_what_the_simulator_did(folder: Path) -> None:
    episodes = CLIPS.make(0, 4)
    for index, split in SPLITS.items():
        place, name, caption = folder / split, f"episode_{index:06d}", episodes.captions[index]
        video, fps = read_video(place / "videos" / f"{name}.mp4")
        assert fps == 10 and video.shape == (3, 9, 48, 48)
        error = video.permute(1, 2, 3, 0).float() - torch.from_numpy(episodes.render(index)).float()
        assert error.abs().mean() < 4  # of 255: the codec halves the resolution of colour
        annotation = json.loads((place / "annotation" / f"{name}.json").read_text())
        assert numpy.allclose(annotation["actions"], episodes.actions[index], atol=1e-6)
        found = numpy.array(annotation["states"], dtype=float)
        assert numpy.isnan(found[:, 6:8]).all()  # there is no box
        there = [0, 1, 2, 3, 4, 5, 8, 9]
        assert numpy.allclose(found[:, there], episodes.states[index][:, there], atol=1e-5)
        assert annotation["success"] == episodes.success[index] and len(annotation["rewards"]) == 8
        assert annotation["caption"] == caption == (place / "metas" / f"{name}.txt").read_text().strip()
        embedding = read_embedding(place / "t5_xxl" / f"{name}.pickle")
        assert torch.equal(embedding, pickles.trimmed(ENCODER.encode([caption])[0]))


@pytest.mark.parametrize("mix", ["expert", "full_skill", "varied", "outcomes"])
def test_the_ring_of_what_follows_from_the_first_frame_stays_where_the_driver_saw_it(mix: str) -> None:
    seen = make_episodes(40, mix=mix, ring_elsewhere=0.0)
    assert numpy.array_equal(ToyFolder(mix=mix).make(0, 40).states, seen.states)


# ---- one folder, several runs ----------------------------------------------------------------------------------------


def test_what_was_interrupted_goes_on_and_ends_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, written, write_video = tmp_path / "world", [], toy_folder.write_video

    def stop_at_the_third(*args: object) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(args)
        write_video(*args)

    monkeypatch.setattr(toy_folder, "write_video", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        write_folder(str(out), CLIPS, command="a command")
    with pytest.raises(DataError, match=r"frames 9 \(now 13\)"):
        write_folder(str(out), ToyFolder(**FEW | TEXT | {"frames": 13}))
    (out / "train" / "metas" / ".x.txt.tmp-999999999").write_text("half")  # of a process that was killed
    monkeypatch.setattr(toy_folder, "write_video", lambda *args: (written.append(args), write_video(*args)))
    write_folder(str(out), CLIPS, command="a command")
    assert len(written) == 4  # the two that were there were not written again
    assert names(out) == names(folder)
    assert all((out / n).read_bytes() == (folder / n).read_bytes() for n in names(out) if not n.endswith(".mp4"))


def test_a_finished_folder_is_kept_unless_it_is_overwritten(tmp_path: Path) -> None:
    out, two = tmp_path / "world", ToyFolder(episodes=2, frames=5)
    write_folder(str(out), two)
    (out / "mine.txt").write_text("kept")
    written = {path: path.stat().st_mtime_ns for path in out.rglob("*.mp4")}
    record = json.loads((out / "dataset.json").read_text())
    del record["settings"]["form"]  # as in older versions
    (out / "dataset.json").write_text(json.dumps(record))
    write_folder(str(out), two)  # the same again: nothing is left to do
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.mp4")} == written
    for changed, named in (({"episodes": 1}, "episodes 2"), ({"form": "states"}, r"form video \(now states\)")):
        with pytest.raises(DataError, match=named):
            write_folder(str(out), ToyFolder(**{"episodes": 2, "frames": 5} | changed))
    write_folder(str(out), ToyFolder(episodes=1, frames=5), overwrite=True)
    assert len(list(out.rglob("*.mp4"))) == 1 and (out / "mine.txt").exists()
    write_folder(str(out), ToyFolder(episodes=1, frames=5, form="bridge"), overwrite=True)
    write_folder(str(out), ToyFolder(**FEW, form="states"), overwrite=True)
    assert {path.name for path in out.iterdir()} == {"README.md", "dataset.json", "mine.txt", "train", "val"}


def test_folders_of_others_and_a_full_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(DataError, match=str(tmp_path)):
            write_folder(str(tmp_path), CLIPS, overwrite=overwrite)
    assert names(tmp_path) == {"dataset.json"}
    for place, error in ((str(tmp_path / "dataset.json"), DataError), ("s3://bucket/world", ConfigError)):
        with pytest.raises(error, match=place):
            write_folder(place, CLIPS)
    monkeypatch.setattr("imaginaire.storage.free_bytes", lambda path: 10_000)
    with pytest.raises(DataError, match=r"10\.0 kB"):
        write_folder(str(tmp_path / "world"), CLIPS)
    assert names(tmp_path) == {"dataset.json"}


def test_the_estimate_of_the_size_is_enough_but_not_absurd(folder: Path, tmp_path: Path) -> None:
    taken = sum((path.stat().st_size + 4095) // 4096 * 4096 for path in folder.rglob("*") if path.is_file())
    assert taken / 2 < CLIPS.bytes_needed() < 4 * taken
    settings = ToyFolder(episodes=300, form="states")
    write_folder(str(tmp_path), settings)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.npz")) < settings.bytes_needed() < 5_000_000


def test_recordings_of_a_covered_table_have_two_cameras_and_the_grippers_state_alone(tmp_path: Path) -> None:
    """The ring's place is in no column that a policy could be given."""
    command = ["--out", str(tmp_path), "--form", "lerobot", "--setting", "covered", "--episodes", "2"]
    assert call(make_toy_world, *command, "--frames", "9") == 0
    source = LeRobotSource.open(tmp_path)
    (episodes,) = ToyFolder(episodes=2, frames=9, setting="covered", tasks=("reach_ring",)).batches()
    for name, film in episodes.cameras(1).items():
        drawn = source.frames(1, source.camera(name), range(9)).permute(1, 2, 3, 0).numpy()
        assert abs(drawn.astype(int) - film).mean() < 4
    assert source.caption(1) == "reach the green ring" and list(episodes.cameras(1)) == ["front", "wrist"]
    state = source.columns(1, ["observation.state"])["observation.state"]
    assert numpy.allclose(state, episodes.states[1, :, :3], atol=1e-5)
    assert read_info(tmp_path).modality.state.keys() == {"gripper_x", "gripper_y", "closed"}


# ---- the Bridge layout -----------------------------------------------------------------------------------------------


def _dataset(root: Path, mode: str = "train", **changes: object) -> ActionConditionedDataset:
    paths = {f"{split}_annotation_path": str(root / "annotation" / split) for split in ("train", "val")}
    options = dict(video_path=str(root), num_frames=9, video_size=(48, 48), mode=mode)
    return ActionConditionedDataset(**paths, **options | changes)


def test_actions_of_the_bridge_form_lead_the_gripper_along_its_way(bridge: Path) -> None:
    episodes = ToyFolder(**FEW, mix="expert").make(0, 4)
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


def test_embeddings_and_recorded_actions_of_the_bridge_form(bridge: Path) -> None:
    item = _dataset(bridge, load_t5_embeddings=True, num_tokens=64, text_width=32)[1]
    expected = ENCODER.encode([item["ai_caption"]])[0]
    assert torch.allclose(item["t5_text_embeddings"], expected, atol=1e-3)
    assert torch.equal(item["t5_text_mask"], (expected != 0).any(-1).long())
    annotation = json.loads((bridge / "annotation/train/episode_000000.json").read_text())
    state, action = numpy.array(annotation["state"]), numpy.array(annotation["action"])
    assert action.shape == (8, 7) and numpy.allclose(numpy.diff(state, axis=0), action[:, :6], atol=1e-7)
    assert numpy.array(annotation["toy_states"], dtype=float).shape == (9, 10)


# ---- states ----------------------------------------------------------------------------------------------------------


def test_states_give_the_same_samples_as_the_simulator(states: Path) -> None:
    read = ToyWorldStates(str(states / "train"), num_frames=5, start=2)
    made = ToyWorldVideos(num_episodes=4, num_frames=5, mix="mixed", num_steps=8, start=2)
    assert len(read) == 3
    for i in range(3):
        ours, theirs = read[i], made[i]
        assert same(ours, {**theirs, "fps": 5.0, "video_name": ours["video_name"]})
    assert torch.equal(ToyWorldStates(str(states / "val"), num_frames=5, start=2)[0]["video"], made[3]["video"])
    with pytest.raises(ConfigError, match="Frames 0 to 9"):
        ToyWorldStates(str(states / "train"), num_frames=10)


def test_states_of_many_files_are_joined_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy_folder, "EPISODES_AT_ONCE", 3)
    settings = ToyFolder(**FEW | {"episodes": 8}, form="states")
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
    with pytest.raises(DataError, match="holds no states"):
        read_states(states)
    assert "--form states" in problems(ToyWorldStates, folder=str(tmp_path))[0]
    assert not problems(ToyWorldStates, folder=str(states / "train"))
    content = (states / "train" / "states-000000.npz").read_bytes()
    for broken in (b"", content[:500], content[:-2000], b"no archive at all"):
        (tmp_path / "states-000000.npz").write_bytes(broken)
        with pytest.raises(DataError, match="states-000000"):
            read_states(tmp_path)
    (tmp_path / "states-000000.npz").write_bytes(content)
    write_folder(str(tmp_path / "other"), ToyFolder(**FEW, form="states", seed=1))
    (tmp_path / "states-000003.npz").write_bytes((tmp_path / "other/train/states-000000.npz").read_bytes())
    with pytest.raises(DataError, match=r"has the seed 1, but .* 0"):
        read_states(tmp_path)


# ---- the script ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["video", "bridge", "states"])
def test_the_script_writes_a_form(form: str, start: Start, tmp_path: Path) -> None:
    flags = ["--episodes", 2, "--frames", 5, "--setting", "hard", "--tasks", "carry_box", "choose_puck"]
    flags += ["--action_dim", 7, "--mix", "expert", "--form", form]
    assert start(make_toy_world, "--out", tmp_path / "world", *flags) == 0
    record = json.loads((tmp_path / "world" / "dataset.json").read_text())
    assert record["settings"]["size"] == 64 and record["settings"]["action_dim"] == 7
    assert record["settings"]["form"] == form and record["command"].startswith("python -m scripts.make_toy_world --out")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--frames 1", "frames"),
        ("--size 20", "40 pixels"),
        ("--val_fraction 1.5", "val_fraction"),
        ("--form states --text_encoder bytes", "'states'"),
        ("--form bridges", "bridges"),
    ],
)
def test_wrong_flags_are_exit_2_and_named(
    flags: str, named: str, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert start(make_toy_world, "--out", tmp_path / "world", *flags.split()) == 2
    assert named in capsys.readouterr().err and not (tmp_path / "world").exists()
