# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.lerobot: the same recordings read from every version of the format."""

import json
import pickle
import shutil
from pathlib import Path

import numpy
import pytest
import torch

from cosmos_predict2.data.lerobot import tables
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.lerobot.tables import Tables
from cosmos_predict2.data.lerobot.writer import write_table
from cosmos_predict2.tools.prepare.lerobot_export import export
from imaginaire.errors import ConfigError, DataError
from scripts import prepare_lerobot_data
from tests.data import sources_lerobot as made
from tests.data.lerobot.conftest import BY_LEROBOT, MAKERS
from tests.data.sources_lerobot import FRONT, LENGTHS, WRIST, change_json, grey

ALL = [*MAKERS, *BY_LEROBOT]


@pytest.fixture(params=ALL)
def source(request: pytest.FixtureRequest, data_sets: dict[str, Path]) -> LeRobotSource:
    return LeRobotSource.open(data_sets[request.param])


@pytest.fixture
def v2(tmp_path: Path, data_sets: dict[str, Path]) -> Path:
    return Path(shutil.copytree(data_sets["v2.1"], tmp_path / "v2"))


@pytest.fixture
def v3(tmp_path: Path, data_sets: dict[str, Path]) -> Path:
    return Path(shutil.copytree(data_sets["v3.0"], tmp_path / "v3"))


def greys(source: LeRobotSource, i: int, frames: list[int]) -> list[float]:
    return source.frames(i, FRONT, frames).float().mean((0, 2, 3)).tolist()


def test_every_version_gives_the_same_numbers_and_tasks(source: LeRobotSource) -> None:
    assert source.info.fps == made.FPS and source.info.cameras == [FRONT, WRIST]
    assert source.episodes.lengths.tolist() == list(LENGTHS)
    for i in range(len(LENGTHS)):
        episode = source.episode(i)
        assert numpy.array_equal(episode["action"], made.action(i))
        assert numpy.array_equal(episode["observation.state"], made.state(i))
        assert numpy.allclose(episode["timestamp"], numpy.arange(LENGTHS[i]) / made.FPS)
        assert episode["action"].dtype == numpy.float32
        assert source.caption(i) == made.TASKS[i]
        assert source.name(i) == f"episode_{i:06d}"


def test_every_version_gives_the_same_pictures_up_to_the_ends_of_episodes(source: LeRobotSource) -> None:
    for i, length in enumerate(LENGTHS):
        found = greys(source, i, list(range(length)))
        assert found == pytest.approx([grey(i, k) for k in range(length)], abs=4)  # frames are 10 apart
        wrist = source.frames(i, WRIST, range(length))
        assert numpy.array_equal(wrist.permute(1, 2, 3, 0).numpy(), made.wrist(i))


def test_frames_come_in_the_order_that_is_asked_for(source: LeRobotSource) -> None:
    order = [4, 0, 0, 3]
    assert greys(source, 1, order) == pytest.approx([grey(1, k) for k in order], abs=4)
    assert torch.equal(source.frames(2, WRIST, order), source.frames(2, WRIST, range(9))[:, order])


@pytest.mark.parametrize("frames", [[5], [-1], [], [0, 99]])
def test_frames_beyond_an_episode_are_refused_though_the_file_goes_on(source: LeRobotSource, frames: list) -> None:
    for camera in (FRONT, WRIST):
        with pytest.raises(DataError, match="episode 1 has 5 frames"):
            source.frames(1, camera, frames)


def test_a_video_of_another_rate_is_read_by_time(tmp_path: Path) -> None:
    source = LeRobotSource.open(made.write_v2(tmp_path / "set", front_fps=2 * made.FPS))
    assert greys(source, 2, [0, 3, 8]) == pytest.approx([grey(2, k) for k in (0, 3, 8)], abs=4)


def test_a_video_of_another_rate_than_is_stated_is_an_error(tmp_path: Path) -> None:
    root = made.write_v2(tmp_path / "set", front_fps=2 * made.FPS)
    info = root / "meta/info.json"
    stated = json.loads(info.read_text())
    stated["features"][FRONT]["info"]["video.fps"] = made.FPS
    info.write_text(json.dumps(stated))
    with pytest.raises(DataError, match=rf"episode_000000\.mp4 has {2 * made.FPS} frames .* says {made.FPS} for"):
        LeRobotSource.open(root).frames(0, FRONT, [0])
    written = export(root, tmp_path / "out", camera=FRONT, workers=1)
    assert not written.outcome.results and all("frames per second, but" in fault for fault in written.outcome.faults)


def test_an_open_data_set_travels_to_a_worker(data_sets: dict[str, Path]) -> None:
    source = LeRobotSource.open(data_sets["v3.0"])
    source.episode(0)
    copy = pickle.loads(pickle.dumps(source))
    assert numpy.array_equal(copy.episode(1)["action"], made.action(1))


def test_columns_that_were_read_are_kept_up_to_a_limit(data_sets: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    write_table(path, {name: numpy.arange(1000) for name in "abcd"})
    kept = Tables(most_bytes=20_000)  # two columns of 8000 bytes
    for name in "abcdabcd":
        kept.read(path, [name], 0, 10)
    assert kept._num_bytes == 16_000 and len(kept._kept) == 2
    path.write_bytes(b"")
    with pytest.raises(DataError, match="not a Parquet file"):
        kept.read(path, ["d"], 0, 10)


# ---- names of cameras, actions and texts -----------------------------------------------------------------------------


def test_a_camera_is_found_by_its_key_its_last_word_or_its_name(v2: Path) -> None:
    source = LeRobotSource.open(v2)
    assert source.camera(FRONT) == source.camera("front") == source.camera("ego_view") == FRONT
    with pytest.raises(ConfigError, match=r"there is no camera 'frnt'\. Did you mean front|Known"):
        source.camera("frnt")
    with pytest.raises(ConfigError, match=f"which camera\\? Set it to one of {FRONT}, {WRIST}"):
        source.camera()


def test_modality_names_parts_of_the_action(v2: Path) -> None:
    source = LeRobotSource.open(v2)
    parts = source.action_parts(["grip", "move"])
    assert source.width(parts) == 3
    assert numpy.array_equal(source.parts(1, parts), made.action(1)[:, [2, 0, 1]])
    assert numpy.array_equal(source.parts(1, source.action_parts()), made.action(1))
    assert source.width(source.action_parts(["action", "move"])) == 5
    with pytest.raises(ConfigError, match=r"no action 'gripp'\. Did you mean grip"):
        source.action_parts("gripp")


def test_actions_under_other_names_must_be_named(v2: Path) -> None:
    info = json.loads((v2 / "meta/info.json").read_text())
    features = info["features"]
    change_json(v2 / "meta/info.json", features={**features, "actions": features["action"]})
    with pytest.raises(ConfigError, match=r"which columns are the action\? Set action_keys: observation.state, action"):
        LeRobotSource.open(v2).action_parts()
    del features["action"]
    change_json(v2 / "meta/info.json", features=features)
    with pytest.raises(ConfigError, match="which columns are the action"):
        LeRobotSource.open(v2).action_parts()


def test_the_only_column_of_actions_and_the_only_camera_need_no_name(v2: Path) -> None:
    features = json.loads((v2 / "meta/info.json").read_text())["features"]
    features["actions"] = features.pop("action")
    features["image"] = features.pop(WRIST)
    del features[FRONT]
    change_json(v2 / "meta/info.json", features=features)
    table = made.table(v2, 1)
    table["actions"], table["image"] = table.pop("action"), table.pop(WRIST)
    write_table(v2 / "data/chunk-000/episode_000001.parquet", table)
    source = LeRobotSource.open(v2)
    assert numpy.array_equal(source.parts(1, source.action_parts()), made.action(1))
    assert numpy.array_equal(source.frames(1, source.camera(), [2])[:, 0].permute(1, 2, 0).numpy(), made.wrist(1)[2])


GR1 = {"left_arm": 7, "left_hand": 6, "left_leg": 6, "right_arm": 7, "right_hand": 6, "waist": 3}


def gr1_modality() -> dict:
    ends = numpy.cumsum([0, *GR1.values()]).tolist()
    return {"action": {name: {"start": a, "end": b} for name, a, b in zip(GR1, ends, ends[1:])}}


def test_gr1_is_29_numbers_in_its_own_order(v2: Path) -> None:
    made.write_json(v2 / "meta/modality.json", gr1_modality())
    rows = numpy.arange(LENGTHS[0] * 35, dtype=numpy.float32).reshape(LENGTHS[0], 35)
    write_table(v2 / "data/chunk-000/episode_000000.parquet", {**made.table(v2, 0), "action": rows})
    source = LeRobotSource.open(v2)
    parts = source.action_parts(embodiment="gr1")
    assert source.width(parts) == 29
    assert source.parts(0, parts)[0].tolist() == [*range(13), *range(19, 35)]  # all but the leg


def test_a_robot_that_is_not_gr1_is_told(v2: Path) -> None:
    with pytest.raises(DataError, match=r"modality\.json has no action 'left_arm'"):
        LeRobotSource.open(v2).action_parts(embodiment="gr1")
    wrong = gr1_modality()
    wrong["action"]["waist"]["end"] += 1
    made.write_json(v2 / "meta/modality.json", wrong)
    with pytest.raises(DataError, match="'waist' has 4 numbers, but that of 'gr1' 3"):
        LeRobotSource.open(v2).action_parts(embodiment="gr1")
    (v2 / "meta/modality.json").unlink()
    with pytest.raises(DataError, match=r"modality\.json, which says where"):
        LeRobotSource.open(v2).action_parts(embodiment="gr1")
    with pytest.raises(ConfigError, match=r"no embodiment 'gr2'\. Did you mean gr1"):
        LeRobotSource.open(v2).action_parts(embodiment="gr2")


def test_a_part_beyond_its_column_is_told(v2: Path) -> None:
    made.write_json(v2 / "meta/modality.json", {"action": {"move": {"start": 0, "end": 4}}})
    source = LeRobotSource.open(v2)
    with pytest.raises(DataError, match=r"'action' has the shape \[5, 3\] for 5 frames, but numbers 0 to 4"):
        source.parts(1, source.action_parts("move"))
    made.write_json(v2 / "meta/modality.json", {"action": {"move": {"start": 2}}})
    with pytest.raises(DataError, match=r"action\.move goes from 2 to None"):
        LeRobotSource.open(v2)


def test_annotations_are_texts_by_number(v2: Path) -> None:
    source = LeRobotSource.open(v2)
    assert source.caption(0, annotation="human.validity") == "open the drawer"  # text 1
    assert source.caption(1, annotation="human.action.task_description") == "open the drawer"
    with pytest.raises(ConfigError, match="no annotation 'human'"):
        source.caption(0, annotation="human")


def test_an_episode_of_several_tasks_tells_the_one_of_the_frame(
    v2: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a clip of the whole episode, with the text of its first frame, is told."""
    assert LeRobotSource.open(v2).episodes.several_tasks() is None
    rows = [json.loads(line) for line in (v2 / "meta/episodes.jsonl").read_text().splitlines()]
    rows[0]["tasks"] = ["push the puck", "open the drawer"]
    (v2 / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = made.table(v2, 0) | {"task_index": numpy.array([0, 0, 0, 1, 1, 1, 1])}
    write_table(v2 / "data/chunk-000/episode_000000.parquet", table)
    source = LeRobotSource.open(v2)
    assert [source.caption(0, frame) for frame in (0, 2, 3)] == ["push the puck", "push the puck", "open the drawer"]
    said = "1 of 3 episodes have several tasks, the first of them episode 0: 'push the puck', 'open the drawer'"
    assert source.episodes.several_tasks() == said
    for arguments, more in (
        ([], ""),
        (["--out", str(tmp_path / "clips"), "--camera", "front", "--dry-run"], "the task of its first frame"),
    ):
        caplog.clear()
        args = prepare_lerobot_data._parser().parse_args(["--source", str(v2), *arguments])
        prepare_lerobot_data.run(args, "")
        assert caplog.text.count(said) == 1 and more in caplog.text
    args.dry_run = False
    caplog.set_level("INFO")
    assert prepare_lerobot_data.run(args, "") == 0
    train = f"next: python -m scripts.get_t5_embeddings --data {args.out} --text_encoder "
    assert f"{train}t5 (for a tiny model: " in caplog.text and " --text_encoder bytes --num_tokens 512" in caplog.text


# ---- what may be wrong -----------------------------------------------------------------------------------------------


def test_a_folder_that_is_none_says_where_one_is(v2: Path) -> None:
    with pytest.raises(DataError, match=r"has no meta/info\.json\. LeRobot data sets below it, .*v2\."):
        LeRobotSource.open(v2.parent)
    with pytest.raises(DataError, match="The folder does not exist"):
        LeRobotSource.open(v2 / "absent")


@pytest.mark.parametrize("version", ["v1.6", "v4.0", "", None])
def test_another_version_is_refused(version: str | None, v2: Path) -> None:
    change_json(v2 / "meta/info.json", codebase_version=version)
    with pytest.raises(DataError, match=r"codebase_version is .*v2\.0, v2\.1, v3\.0 can be read"):
        LeRobotSource.open(v2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fps": 0}, "fps is 0"),
        ({"features": []}, "'features' is not a table"),
        ({"data_path": None}, "'data_path' is missing"),
    ],
)
def test_a_broken_info_names_what_is_wrong(changes: dict, message: str, v2: Path) -> None:
    change_json(v2 / "meta/info.json", **changes)
    with pytest.raises(DataError, match=message):
        LeRobotSource.open(v2)


def test_broken_files_of_the_index_are_named(v2: Path, v3: Path) -> None:
    (v2 / "meta/episodes.jsonl").write_text('{"episode_index": 0}\n')
    with pytest.raises(DataError, match=r"episodes\.jsonl: an episode lacks"):
        LeRobotSource.open(v2)
    (v2 / "meta/episodes.jsonl").write_text("{")
    with pytest.raises(DataError, match=r"episodes\.jsonl is not JSON lines"):
        LeRobotSource.open(v2)
    (v2 / "meta/episodes.jsonl").write_text("")
    with pytest.raises(DataError, match="lists no episodes"):
        LeRobotSource.open(v2)
    (v2 / "meta/episodes.jsonl").unlink()
    with pytest.raises(DataError, match=r"episodes\.jsonl cannot be read"):
        LeRobotSource.open(v2)
    (v3 / "meta/episodes/chunk-000/file-000.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(DataError, match=r"file-000\.parquet is not a Parquet file"):
        LeRobotSource.open(v3)
    shutil.rmtree(v3 / "meta/episodes")
    with pytest.raises(DataError, match="holds no index"):
        LeRobotSource.open(v3)


def test_missing_files_are_named(v2: Path, v3: Path) -> None:
    video = v2 / f"videos/chunk-000/{FRONT}/episode_000001.mp4"
    video.unlink()
    rows = v2 / "data/chunk-000/episode_000002.parquet"
    rows.unlink()
    source = LeRobotSource.open(v2)
    assert source.missing_files(FRONT) == [rows, video] and source.missing_files(WRIST, [0, 1]) == []
    with pytest.raises(DataError, match=r"episode_000001\.mp4 does not exist"):
        source.frames(1, FRONT, [0])
    with pytest.raises(DataError, match=r"episode_000002\.parquet does not exist"):
        source.episode(2)
    (v3 / f"videos/{FRONT}/chunk-000/file-001.mp4").unlink()
    with pytest.raises(DataError, match=r"file-001\.mp4 does not exist"):
        LeRobotSource.open(v3).frames(2, FRONT, [0])


def test_a_table_that_disagrees_with_the_index_is_told(v2: Path, v3: Path) -> None:
    shutil.copy(v2 / "data/chunk-000/episode_000000.parquet", v2 / "data/chunk-000/episode_000001.parquet")
    with pytest.raises(DataError, match="has 7 rows, but the index says 5 frames"):
        LeRobotSource.open(v2).episode(1)
    write_table(v2 / "data/chunk-000/episode_000001.parquet", made.table(v2, 1) | {"episode_index": numpy.full(5, 2)})
    with pytest.raises(DataError, match="episode 2 where the index says 1"):
        LeRobotSource.open(v2).episode(1)
    write_table(v3 / "data/chunk-000/file-000.parquet", made.table(v3, 1))  # the first episode is gone
    source = LeRobotSource.open(v3)
    with pytest.raises(DataError, match=r"episode 1 where the index says 0|has 5 rows"):
        source.episode(0)


def test_videos_shorter_than_the_index_says_are_told(v3: Path) -> None:
    path = v3 / "meta/episodes/chunk-000/file-000.parquet"
    with tables.opened(path) as file:
        index = file.read().to_pydict()
    index[f"videos/{FRONT}/to_timestamp"][1] -= 0.2
    write_table(path, index)
    source = LeRobotSource.open(v3)
    assert greys(source, 0, [0]) == pytest.approx([grey(0, 0)], abs=4)
    with pytest.raises(DataError, match=r"episode 1 has 5 frames, but 3\.00 frames' time of video in file-000\.mp4"):
        source.frames(1, FRONT, [0])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1.0, 2.0, 3.0]] * 4 + [[1.0, 2.0]], "rows of 2 to 3 numbers"),
        ([[1.0, 2.0, 3.0]] * 4 + [None], "rows without a value"),
        ([[1.0, 2.0, None]] * 5, "rows without a value"),
        (["a"] * 5, "holds string, not numbers"),
    ],
)
def test_columns_that_are_no_numbers_are_told(values: list, message: str, v2: Path) -> None:
    write_table(v2 / "data/chunk-000/episode_000001.parquet", {**made.table(v2, 1), "action": values})
    with pytest.raises(DataError, match=message):
        LeRobotSource.open(v2).episode(1)


def test_an_absent_column_is_told_with_those_that_there_are(v2: Path) -> None:
    table = made.table(v2, 1)
    del table["action"], table[WRIST]
    write_table(v2 / "data/chunk-000/episode_000001.parquet", table)
    source = LeRobotSource.open(v2)
    with pytest.raises(DataError, match=r"has no column 'action'; it has observation\.state"):
        source.episode(1)
    with pytest.raises(DataError, match=f"has no column '{WRIST}'"):
        source.frames(1, WRIST, [0])


def test_a_damaged_picture_is_told_and_a_path_is_followed(v2: Path) -> None:
    table = made.table(v2, 1)
    table[WRIST][2]["bytes"] = b"no picture"
    picture = table[WRIST][3]
    (v2 / "there.png").write_bytes(picture["bytes"])
    picture |= {"bytes": None, "path": "there.png"}
    table[WRIST][4] = {"bytes": None, "path": "absent.png"}
    write_table(v2 / "data/chunk-000/episode_000001.parquet", table)
    source = LeRobotSource.open(v2)
    assert numpy.array_equal(source.frames(1, WRIST, [3])[:, 0].permute(1, 2, 0).numpy(), made.wrist(1)[3])
    with pytest.raises(DataError, match="row 2 is not a picture"):
        source.frames(1, WRIST, [0, 2])
    with pytest.raises(DataError, match=r"absent\.png does not exist"):
        source.frames(1, WRIST, [4])


def test_a_path_that_cannot_be_filled_in_is_told(v2: Path) -> None:
    change_json(v2 / "meta/info.json", data_path="data/{episode_chunks}.parquet")
    with pytest.raises(DataError, match=r"'data/\{episode_chunks\}\.parquet' cannot be filled in"):
        LeRobotSource.open(v2).episode(0)
