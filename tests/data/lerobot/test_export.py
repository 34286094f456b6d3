# SPDX-License-Identifier: Apache-2.0
"""The export of LeRobot data sets, and scripts.prepare_lerobot_data: fetched, and written as captioned clips."""

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.lerobot.writer import COUNTERS, Recording, Writer
from cosmos_predict2.data.video.media import read_video
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.tools.prepare import lerobot_export
from cosmos_predict2.tools.prepare.lerobot_export import copy_cut, copy_to_extend, export, fetch_source
from cosmos_predict2.tools.prepare.toy_folder import ToyFolder, write_folder
from imaginaire.errors import DataError
from scripts import prepare_lerobot_data
from tests.checkpoints.hub_server import Hub, serve
from tests.data import sources_lerobot as made
from tests.data.lerobot.conftest import BY_LEROBOT
from tests.data.sources_lerobot import FPS, FRONT, LENGTHS, TASKS, WRIST, action, front, grey, state
from tests.programs import call
from tests.tools.prepare.conftest import names

V3 = BY_LEROBOT["v3.0 by lerobot"]
NAME = "robots/arm"


def check_clips(out: Path, split_of: dict[int, str], camera: str = FRONT) -> None:
    for i, split in split_of.items():
        video, fps = read_video(out / split / "videos" / f"episode_{i:06d}.mp4")
        assert fps == made.FPS and video.shape[1] == LENGTHS[i]
        assert (out / split / "metas" / f"episode_{i:06d}.txt").read_text().strip() == TASKS[i]
        if camera == FRONT:
            expected = [grey(i, k) for k in range(LENGTHS[i])]
            assert video.float().mean((0, 2, 3)).tolist() == pytest.approx(expected, abs=4)
        else:
            assert video.shape[2:] == (16, 24)
    assert len(list(out.rglob("*.mp4"))) == len(split_of)


@pytest.mark.parametrize("name", ["v2.1", "v3.0", "v3.0 by lerobot", "v2.1 by lerobot"])
def test_episodes_are_added_to_a_copy_of_what_another_program_wrote(
    name: str, data_sets: dict[str, Path], tmp_path: Path
) -> None:
    """Numbers are as they were, so that a split can be extended, and keep their names; pictures become videos."""
    before, out = LeRobotSource.open(data_sets[name]), tmp_path / "out"
    with pytest.raises(DataError, match=r"another program wrote.*--base .* --out ANOTHER"):
        Writer.after(before.info.root)
    copy_to_extend(before.info.root, out)
    writer = Writer.after(out)
    columns = {key: value for key, value in before.episode(1).items() if key not in COUNTERS}
    films = {key: torch.from_numpy(one).permute(3, 0, 1, 2) for key, one in ((FRONT, front(1)), (WRIST, made.wrist(1)))}
    turned = {key: film.transpose(-1, -2) for key, film in films.items()}
    with pytest.raises(DataError, match="the same columns and cameras"):
        writer.add(Recording(columns, turned, "height and width exchanged"))
    with pytest.raises(DataError, match=r"episode 3 has columns and pictures of unequal lengths: .*action \d+"):
        writer.add(Recording(columns | {"action": columns["action"][:-1]}, films, "the last action left out"))
    with pytest.raises(DataError, match=rf"unequal lengths: .*{FRONT} {LENGTHS[1] - 1}"):
        writer.add(Recording(columns, films | {FRONT: films[FRONT][:, :-1]}, "the last picture left out"))
    with pytest.raises(DataError, match=r"episode 3, column 'action' holds .*where numbers are expected"):
        writer.add(Recording(columns | {"action": columns["action"].astype(str)}, films, "no numbers"))
    assert not list(out.rglob("episode_000003.*"))
    writer.add(Recording(columns, films, "again"))
    writer.finish()
    after = LeRobotSource.open(out)
    assert [*after.episodes.lengths] == [*before.episodes.lengths, LENGTHS[1]] and after.caption(3) == "again"
    for i, length in enumerate(LENGTHS):
        assert after.caption(i) == before.caption(i)
        for key, values in before.episode(i).items():
            found = after.episode(i)[key]
            assert key == "index" or (numpy.array_equal(found, values) and found.dtype == values.dtype), key
        found, known = (source.frames(i, FRONT, range(length)) for source in (after, before))
        assert (found.float() - known.float()).abs().max() <= 2
    contracts = [source.action_contract(source.action_parts()) for source in (after, before)]
    assert contracts[0] == contracts[1] and contracts[0].names


SPLIT = {0: "train", 1: "val", 2: "train"}


@pytest.mark.parametrize(
    ("name", "camera", "how"),
    [
        ("v2.0", "front", ["copied"] * 3),
        ("v2.1 by lerobot", "front", ["copied"] * 3),
        ("v3.0 by lerobot", "front", ["cut"] * 3),  # each episode begins with a keyframe
        ("v3.0", "front", ["encoded", "copied", "encoded"]),  # two in one group of pictures, one alone in its file
        ("v3.0 by lerobot", "wrist", ["encoded"] * 3),
    ],
)
def test_clips_are_the_episodes(
    name: str, camera: str, how: list[str], data_sets: dict[str, Path], tmp_path: Path
) -> None:
    outcome = export(data_sets[name], tmp_path / "out", camera=camera, workers=0, command="a command")
    assert outcome.results == how
    check_clips(tmp_path / "out", SPLIT, FRONT if camera == "front" else WRIST)
    record = json.loads((tmp_path / "out/dataset.json").read_text())
    assert record["is_complete"] and record["command"] == "a command" and record["fps"] == made.FPS
    assert record["counts"] == {"train": 2, "val": 1}


def test_a_cut_is_refused_where_it_would_not_be_exact(tmp_path: Path) -> None:
    video = V3 / f"videos/{FRONT}/chunk-000/file-000.mp4"
    assert copy_cut(video, tmp_path / "a.mp4", 7, 5)
    assert read_video(tmp_path / "a.mp4")[0].shape[1] == 5
    assert not copy_cut(video, tmp_path / "b.mp4", 8, 4)  # not a keyframe
    assert not copy_cut(video, tmp_path / "b.mp4", 12, 10)  # there are 21
    assert not (tmp_path / "b.mp4").exists()


def test_the_same_again_writes_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(V3, out, camera="front", workers=0)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("episode*")}
    (out / "train/metas/episode_000002.txt").unlink()  # as if it had been stopped there
    assert export(V3, out, camera="front", workers=0).results == ["cut"]
    changed = {path.name for path in before if path.stat().st_mtime_ns != before[path]}
    assert changed == {"episode_000002.mp4", "episode_000002.txt"}
    assert export(V3, out, camera="front", workers=0).results == []


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(V3, out, camera="front", workers=0)
    with pytest.raises(DataError, match="camera"):
        export(V3, out, camera="wrist", workers=0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.txt").write_text("kept")
    with pytest.raises(DataError, match="holds other files"):
        export(V3, tmp_path / "other", camera="front", workers=0)
    assert names(tmp_path / "other") == {"mine.txt"}


def test_episodes_without_a_task_are_faults_unless_a_caption_is_given(
    data_sets: dict[str, Path], tmp_path: Path
) -> None:
    root = Path(shutil.copytree(data_sets["v2.0"], tmp_path / "set"))
    lines = [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
    lines[2]["tasks"] = []
    (root / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (root / "meta/tasks.jsonl").unlink()
    outcome = export(root, tmp_path / "out", camera="front", workers=0)
    assert len(outcome.results) == 2 and "episode_000002 has no task. Give --caption" in outcome.faults[0]
    assert not json.loads((tmp_path / "out/dataset.json").read_text())["is_complete"]
    export(root, tmp_path / "out2", camera="front", caption="a robot", workers=0)
    assert (tmp_path / "out2/train/metas/episode_000002.txt").read_text() == "a robot\n"


def test_a_broken_video_is_a_fault_that_names_it(data_sets: dict[str, Path], tmp_path: Path) -> None:
    root = Path(shutil.copytree(data_sets["v2.0"], tmp_path / "set"))
    videos = root / f"videos/chunk-000/{FRONT}"
    (videos / "episode_000000.mp4").write_bytes(b"no video")
    shutil.copy(videos / "episode_000001.mp4", videos / "episode_000002.mp4")  # five frames, not nine
    outcome = export(root, tmp_path / "out", camera="front", workers=0)
    assert len(outcome.faults) == 2 and outcome.results == ["copied"]
    assert "episode_000000.mp4" in outcome.faults[0]
    assert "episode_000002.mp4 has 5 frames" in outcome.faults[1]


# ---- from a hub ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(lerobot_export.repositories, "RESERVE", 0)
    files = {name: (V3 / name).read_bytes() for name in names(V3) if not name.endswith(("make.py", "README.md"))}
    files |= {"README.md": b"read", "videos/observation.images.back/chunk-000/file-000.mp4": b"another camera"}
    with serve(Hub({NAME: files})) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def test_a_data_set_is_fetched_with_the_videos_of_one_camera(hub: Hub, tmp_path: Path) -> None:
    target = tmp_path / "set"
    assert not fetch_source(NAME, target, camera="front", dry_run=True)
    assert not target.exists()
    assert fetch_source(NAME, target, camera="front")
    expected = {name for name in hub.repositories[NAME] if name != "README.md" and "back" not in name}
    assert names(target) == expected
    hub.asked.clear()
    assert fetch_source(NAME, target, camera="front") and not hub.asked
    assert fetch_source(NAME, target, dry_run=True) and not hub.asked
    export(target, tmp_path / "out", camera="front", workers=0)
    check_clips(tmp_path / "out", SPLIT)


def test_a_repository_of_other_data_is_reported(hub: Hub, tmp_path: Path) -> None:
    del hub.repositories[NAME]["meta/info.json"]
    with pytest.raises(DataError, match="robots/arm is not a LeRobot data set"):
        fetch_source(NAME, tmp_path / "set")


# ---- the script ------------------------------------------------------------------------------------------------------


def test_the_script_fetches_looks_and_writes(hub: Hub, tmp_path: Path) -> None:
    source, out = str(tmp_path / "set"), str(tmp_path / "out")
    fetch = ["--repo_id", NAME, "--source", source, "--camera", "front"]
    assert call(prepare_lerobot_data, *fetch, "--out", out, "--dry-run") == 0 and not (tmp_path / "set").exists()
    assert call(prepare_lerobot_data, *fetch) == 0
    local = ["--source", source, "--camera", "front", "--out", out]
    assert call(prepare_lerobot_data, *local, "--splits", "full", "--workers", "0") == 0
    check_clips(tmp_path / "out", dict.fromkeys(range(3), "full"))
    assert json.loads((tmp_path / "out/dataset.json").read_text())["command"].startswith("python -m scripts.prepare")


def test_the_script_reports_faults_by_its_exit_code(
    data_sets: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert call(prepare_lerobot_data) == 2 and "Give --source DIR" in capsys.readouterr().err
    assert call(prepare_lerobot_data, "--source", str(tmp_path)) == 2 and "meta/info.json" in capsys.readouterr().err
    root = Path(shutil.copytree(data_sets["v2.0"], tmp_path / "set"))
    assert call(prepare_lerobot_data, "--source", str(root), "--out", str(tmp_path / "out")) == 2
    assert "which camera" in capsys.readouterr().err
    (root / f"videos/chunk-000/{FRONT}/episode_000001.mp4").unlink()
    assert call(prepare_lerobot_data, "--source", str(root)) == 1
    arguments = ["--source", str(root), "--camera", "front", "--out", str(tmp_path / "out"), "--workers", "0"]
    assert call(prepare_lerobot_data, *arguments) == 1
    assert len(list((tmp_path / "out").rglob("*.mp4"))) == 2


SMALL = ToyFolder(
    episodes=4, frames=9, val_fraction=0.25, form="lerobot", text_encoder="bytes", num_tokens=64, text_width=32
)


def write(folder: Path, episodes: range) -> None:
    writer = Writer(folder, FPS, robot="toy")
    for i in episodes:
        columns = {"observation.state": state(i), "action": action(i)}
        writer.add(Recording(columns, {FRONT: torch.from_numpy(front(i)).permute(3, 0, 1, 2)}, TASKS[i]))
    writer.finish({"train": (0, 2), "val": (2, 3)})


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    source = LeRobotSource.open(tmp_path)
    assert source.info.version == "v2.1" and source.info.robot == "toy" and len(source.tasks) == 2
    assert source.info.splits == {"train": "0:2", "val": "2:3"}
    for i, length in enumerate(LENGTHS):
        episode = source.episode(i)
        assert numpy.array_equal(episode["action"], action(i))
        assert episode["index"].tolist() == list(range(sum(LENGTHS[:i]), sum(LENGTHS[: i + 1])))
        greys = source.frames(i, source.camera(), range(length)).float().mean((0, 2, 3)).tolist()
        assert greys == pytest.approx([grey(i, k) for k in range(length)], abs=3)
        assert source.caption(i) == TASKS[i]


def test_statistics_are_those_of_each_episode(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    entries = [json.loads(line) for line in (tmp_path / "meta/episodes_stats.jsonl").read_text().splitlines()]
    figures = entries[1]["stats"]["action"]
    assert figures["count"] == [5] and figures["min"] == pytest.approx(action(1).min(0))
    assert figures["std"] == pytest.approx(action(1).astype(float).std(0))
    colours = entries[1]["stats"][FRONT]
    assert numpy.shape(colours["mean"]) == (3, 1, 1)
    assert colours["max"][0][0][0] == pytest.approx(grey(1, 4) / 255)


def test_what_a_recording_script_may_give_is_taken_or_refused_by_name(tmp_path: Path) -> None:
    for fps in (None, 0, -10, math.nan, "10"):
        with pytest.raises(DataError, match=rf"fps={re.escape(repr(fps))} is no rate"):
            Writer(tmp_path, fps)  # type: ignore[arg-type]
    writer = Writer(str(tmp_path), 10)  # type: ignore[arg-type]
    film = numpy.zeros((3, 4, 16, 16), numpy.uint8)
    for wrong in (film / 255, film.transpose(1, 2, 3, 0), film[:, 0]):
        with pytest.raises(
            DataError, match=rf"episode 0, camera '{FRONT}' is torch\..*where pictures are torch\.uint8"
        ):
            writer.add(Recording({"action": numpy.zeros((4, 2))}, {FRONT: wrong}, "go"))
    writer.add(Recording({"action": [[0.0, 1.0]] * 4}, {FRONT: film}, "go"))  # type: ignore[dict-item]
    writer.finish()
    assert LeRobotSource.open(tmp_path).episode(0)["action"].tolist() == [[0.0, 1.0]] * 4


def test_files_that_are_there_are_kept(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".mp4", ".parquet")]
    assert len(files) == 6
    before = {path: path.stat().st_mtime_ns for path in files}
    (tmp_path / "data/chunk-000/episode_000001.parquet").unlink()
    with pytest.raises(DataError, match=r"is a data set of 3 episodes already\. Give another folder.*Writer\.after"):
        Writer(tmp_path, fps=5)
    (tmp_path / "meta/info.json").unlink()  # as an interrupted writer leaves it
    write(tmp_path, range(3))
    changed = {path.name for path in files if path.stat().st_mtime_ns != before[path]}
    assert changed == {"episode_000001.parquet"}


# ---- the toy world ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("toy") / "world"
    write_folder(str(out), SMALL, command="a command")
    return out


def test_the_toy_world_holds_what_the_simulator_did(toy: Path) -> None:
    episodes, source = SMALL.make(0, 4), LeRobotSource.open(toy)
    for i in range(4):
        columns = source.episode(i)
        assert numpy.allclose(columns["observation.state"], episodes.states[i], atol=1e-5)
        assert numpy.array_equal(columns["action"][:-1], episodes.actions[i]) and not columns["action"][-1].any()
        assert columns["next.done"].tolist() == [False] * 8 + [True]
        assert numpy.allclose(columns["next.reward"][:-1], episodes.rewards[i], atol=1e-6)
        assert bool(columns["next.success"].any()) == episodes.ever[i]
        assert bool(columns["next.success"][-1]) == episodes.success[i]
        assert source.caption(i) == source.caption(i, annotation="human.action.task_description")
        assert source.caption(i) == episodes.captions[i]
        video = source.frames(i, FRONT, range(9)).permute(1, 2, 3, 0).float()
        assert (video - torch.from_numpy(episodes.render(i)).float()).abs().mean() < 4


def test_the_toy_world_trains_with_actions_and_text(toy: Path) -> None:
    shape = dict(num_frames=5, video_size=(48, 48), load_t5_embeddings=True, num_tokens=64)
    train, val = (LeRobotActionDataset(str(toy), data_split=split, **shape) for split in ("train", "val"))
    assert (len(train), len(val)) == (3 * 5, 5) and val[0]["__key__"] == "episode_000003"
    item = train[7]
    caption = SMALL.make(0, 4).captions[1]
    assert item["ai_caption"] == caption
    assert torch.allclose(item["t5_text_embeddings"], BytesEncoder(64, 32).encode([caption])[0].float(), atol=1e-2)
    assert torch.equal(item["action"], torch.from_numpy(SMALL.make(0, 4).actions[1][2:6].copy()))
