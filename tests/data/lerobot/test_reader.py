# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.lerobot: the same recordings read from every version of the format."""

import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import pyarrow.parquet
import pytest
import torch

from cosmos_predict2.data.lerobot import tables
from cosmos_predict2.data.lerobot.info import Part, choose_episodes, held_out
from cosmos_predict2.data.lerobot.reader import LeRobotSource, number_names
from cosmos_predict2.data.lerobot.tables import TableReader
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


@pytest.mark.parametrize(
    ("front_fps", "shown"), [(2 * made.FPS, range(9)), (made.FPS // 2, [0, 0, 2, 2, 4, 4, 6, 6, 8])]
)
def test_a_video_of_another_rate_is_read_by_time(front_fps: int, shown: Sequence[int], tmp_path: Path) -> None:
    source = LeRobotSource.open(made.write_v2(tmp_path / "set", front_fps=front_fps))
    assert greys(source, 2, list(range(9))) == pytest.approx([grey(2, k) for k in shown], abs=4)
    source.require_lengths(FRONT, [2])


def test_a_video_of_another_rate_than_is_stated_is_an_error(tmp_path: Path) -> None:
    root = made.write_v2(tmp_path / "set", front_fps=2 * made.FPS)
    info = root / "meta/info.json"
    stated = json.loads(info.read_text())
    stated["features"][FRONT]["info"]["video.fps"] = made.FPS
    info.write_text(json.dumps(stated))
    with pytest.raises(DataError, match=rf"episode_000000\.mp4 has {2 * made.FPS} frames .* {made.FPS} for"):
        LeRobotSource.open(root).frames(0, FRONT, [0])
    written = export(root, tmp_path / "out", camera=FRONT, workers=1)
    assert not written.results and all("frames per second, but" in fault for fault in written.faults)


def test_an_open_data_set_travels_to_a_worker(data_sets: dict[str, Path]) -> None:
    source = LeRobotSource.open(data_sets["v3.0"])
    source.episode(0)
    copy = pickle.loads(pickle.dumps(source))
    assert numpy.array_equal(copy.episode(1)["action"], made.action(1))


def test_columns_that_were_read_are_kept_up_to_a_limit(data_sets: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    write_table(path, {name: numpy.arange(1000) for name in "abcd"})
    kept = TableReader(most_bytes=20_000)  # two columns of 8000 bytes
    for name in "abcdabcd":
        kept.read(path, [name], 0, 10)
    assert kept._num_bytes == 16_000 and len(kept._kept) == 2
    path.write_bytes(b"")
    with pytest.raises(DataError, match="not a Parquet file"):
        kept.read(path, ["d"], 0, 10)


def test_what_a_recorder_left_unfinished_is_named_with_its_cure(tmp_path: Path) -> None:
    """lerobot writes the ends of its tables in finalize(), its videos in batches, and its converter cuts 12.5 to 12."""
    root = made.write_v3(tmp_path / "set")
    rate = json.loads((root / "meta/info.json").read_text())["fps"]
    change_json(root / "meta/info.json", fps=rate - 1)
    with pytest.raises(DataError, match=rf"fps in meta/info.json is not .* write {rate} there"):
        LeRobotSource.open(root).frames(0, FRONT, [0])
    for path in sorted((root / "meta/episodes").rglob("*.parquet")):
        table = pyarrow.parquet.read_table(path)
        pyarrow.parquet.write_table(
            table.drop_columns([n for n in table.column_names if n.startswith("videos/")]), path
        )
    with pytest.raises(DataError, match=r"no column 'videos/.*never encoded: record again"):
        LeRobotSource.open(root)
    for path in (root / "meta/episodes").rglob("*.parquet"):
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"not a Parquet file.*[^.]\. Fetch it again.*dataset\.finalize\(\)"):
        LeRobotSource.open(root)
    for path in (root / "meta/episodes").rglob("*.parquet"):
        path.unlink()
    with pytest.raises(DataError, match=r"holds no index.*dataset\.finalize\(\)"):
        LeRobotSource.open(root)


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
    own = LeRobotSource.open(v2, ["grip", "move"])
    assert own.action_parts() == parts and own.action_parts(["move"]) == source.action_parts(["move"])
    with pytest.raises(ConfigError, match="'gripp'"):
        source.action_parts("gripp")


def test_numbers_of_a_wide_part_keep_their_names(v2: Path) -> None:
    """info.json has them; modality.json names a part of one number, and places in a part that has no names."""
    source, state = LeRobotSource.open(v2), Part("observation.state")
    assert number_names(source.info, state) == ["x", "y", "z", "grip"]
    assert source.action_contract(source.action_parts(["grip", "move"])).names == ("grip", "dx", "dy")
    _modality({"move": {"start": 0, "end": 2}, "grip": {"start": 2, "end": 3}})(v2)  # info.json has no names of it
    source = LeRobotSource.open(v2)
    assert source.action_contract(source.action_parts()).names == ("move[0]", "move[1]", "grip")


def test_the_only_column_of_actions_and_the_only_camera_need_no_name(v2: Path) -> None:
    features = json.loads((v2 / "meta/info.json").read_text())["features"]
    change_json(v2 / "meta/info.json", features={**features, "actions": features["action"]})
    known = "observation.state, action, annotation.human.validity, actions"  # no counters, and no success
    with pytest.raises(ConfigError, match=rf"action_keys: {known}\. .* record all numbers of an action as one column"):
        LeRobotSource.open(v2).action_parts()
    features["actions"] = features.pop("action")
    features["image"] = features.pop(WRIST)
    del features[FRONT]
    change_json(v2 / "meta/info.json", features=features)
    table = made.table(1)
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
    _modality(gr1_modality()["action"], 35)(v2)
    rows = numpy.arange(LENGTHS[0] * 35, dtype=numpy.float32).reshape(LENGTHS[0], 35)
    write_table(v2 / "data/chunk-000/episode_000000.parquet", {**made.table(0), "action": rows})
    source = LeRobotSource.open(v2)
    parts = source.action_parts(embodiment="gr1")
    assert source.width(parts) == 29
    assert source.parts(0, parts)[0].tolist() == [*range(13), *range(19, 35)]  # all but the leg


def test_annotations_are_texts_by_number(v2: Path) -> None:
    source = LeRobotSource.open(v2)
    assert source.caption(0, annotation="human.validity") == "open the drawer"  # text 1
    assert source.caption(1, annotation="human.action.task_description") == "open the drawer"
    with pytest.raises(ConfigError, match="'human'"):
        source.caption(0, annotation="human")


def test_an_episode_of_several_tasks_has_the_one_of_the_frame(
    v2: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning names the clips of whole episodes, which have the text of their first frame."""
    assert LeRobotSource.open(v2).episodes.several_tasks() is None
    rows = [json.loads(line) for line in (v2 / "meta/episodes.jsonl").read_text().splitlines()]
    rows[0]["tasks"] = ["push the puck", "open the drawer"]
    (v2 / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    table = made.table(0) | {"task_index": numpy.array([0, 0, 0, 1, 1, 1, 1])}
    write_table(v2 / "data/chunk-000/episode_000000.parquet", table)
    source = LeRobotSource.open(v2)
    assert [source.caption(0, frame) for frame in (0, 2, 3)] == ["push the puck", "push the puck", "open the drawer"]
    note = "1 of 3 episodes have several tasks, the first of them episode 0: 'push the puck', 'open the drawer'"
    assert source.episodes.several_tasks() == note
    args = prepare_lerobot_data.parser.parse_args(
        ["--source", str(v2), "--out", str(tmp_path / "clips"), "--camera", "front"]
    )
    caplog.set_level("INFO")
    assert prepare_lerobot_data.run(args) == 0
    assert caplog.text.count(note) == 1 and "the task of its first frame" in caplog.text
    assert f"next: python -m scripts.get_t5_embeddings --data {args.out} --text_encoder t5 (for a tiny" in caplog.text


# ---- what may be wrong -----------------------------------------------------------------------------------------------

INDEX, JSONL = "meta/episodes/chunk-000/file-000.parquet", "meta/episodes.jsonl"
TABLE, VIDEO = "data/chunk-000/episode_000001.parquet", f"videos/chunk-000/{FRONT}/episode_000001.mp4"
Damage = Callable[[Path], object]
Use = Callable[[LeRobotSource], object]


def _write(name: str, content: str) -> Damage:
    return lambda root: (root / name).write_text(content)


def _info(**changes: object) -> Damage:
    return lambda root: change_json(root / "meta/info.json", **changes)


def _modality(action: dict, width: int = 3) -> Damage:
    def write(root: Path) -> None:
        features = made.FEATURES | {"action": {"dtype": "float32", "shape": [width], "names": None}}
        change_json(root / "meta/info.json", features=features)
        made.write_json(root / "meta/modality.json", {"action": action})

    return write


def _table(**columns: object) -> Damage:
    return lambda root: write_table(root / TABLE, {**made.table(1), **columns})


def _without(*columns: str) -> Damage:
    return lambda root: write_table(root / TABLE, {k: v for k, v in made.table(1).items() if k not in columns})


def _shorter_clip(root: Path) -> None:
    with tables.opened(root / INDEX) as file:
        index = file.read().to_pydict()
    index[f"videos/{FRONT}/to_timestamp"][1] -= 0.2
    write_table(root / INDEX, index)


def _first_table_lost(root: Path) -> None:
    write_table(root / "data/chunk-000/file-000.parquet", made.table(1))


def _nothing(_: object) -> None: ...


def _gr1(source: LeRobotSource) -> object:
    return source.action_parts(embodiment="gr1")


def _front(source: LeRobotSource) -> object:
    return source.frames(1, FRONT, [0])


def _rows(source: LeRobotSource) -> object:
    return source.episode(1)


def _move(source: LeRobotSource) -> object:
    return source.parts(1, source.action_parts("move"))


WIDE_WAIST = gr1_modality()["action"] | {"waist": {"start": 32, "end": 36}}


@pytest.mark.parametrize(
    ("version", "damage", "use", "key"),
    [
        *(("v2.1", _info(codebase_version=version), _nothing, "codebase_version") for version in ("v1.6", "", None)),
        ("v2.1", _info(fps=0), _nothing, "fps"),
        ("v2.1", _info(features=[]), _nothing, "features"),
        ("v2.1", _info(data_path=None), _nothing, "data_path"),
        ("v2.1", _info(data_path="data/{episode_chunks}.parquet"), _rows, "episode_chunks"),
        ("v2.1", _write(JSONL, '{"episode_index": 0}\n'), _nothing, r"episodes\.jsonl"),
        ("v2.1", _write(JSONL, "{"), _nothing, r"episodes\.jsonl"),
        ("v2.1", _write(JSONL, ""), _nothing, r"episodes\.jsonl"),
        ("v2.1", lambda root: (root / JSONL).unlink(), _nothing, r"episodes\.jsonl"),
        ("v3.0", _write(INDEX, "PAR1 and nothing more"), _nothing, r"file-000\.parquet"),
        ("v3.0", lambda root: shutil.rmtree(root / "meta/episodes"), _nothing, "meta/episodes"),
        ("v2.1", lambda root: (root / VIDEO).unlink(), _front, r"episode_000001\.mp4"),
        ("v2.1", lambda root: (root / TABLE).unlink(), _rows, r"episode_000001\.parquet"),
        ("v3.0", lambda root: (root / f"videos/{FRONT}/chunk-000/file-000.mp4").unlink(), _front, r"file-000\.mp4"),
        ("v3.0", _shorter_clip, _front, r"file-000\.mp4"),
        ("v2.1", lambda root: write_table(root / TABLE, made.table(0)), _rows, r"7 rows.* 5"),
        ("v2.1", _table(episode_index=numpy.full(5, 2)), _rows, "episode 2"),
        ("v3.0", _first_table_lost, lambda source: source.episode(0), "rows"),
        ("v2.1", _table(action=[[1.0, 2.0, 3.0]] * 4 + [[1.0, 2.0]]), _rows, "'action'"),
        ("v2.1", _table(action=[[1.0, 2.0, 3.0]] * 4 + [None]), _rows, "'action'"),
        ("v2.1", _table(action=[[1.0, 2.0, None]] * 5), _rows, "'action'"),
        ("v2.1", _table(action=["a"] * 5), _rows, "'action'"),
        ("v2.1", _without("action"), _rows, "'action'"),
        ("v2.1", _without(WRIST), lambda source: source.frames(1, WRIST, [0]), WRIST),
        ("v2.1", _nothing, _gr1, "'left_arm'"),
        ("v2.1", _modality(WIDE_WAIST, 36), _gr1, "'waist'"),
        (
            "v2.1",
            _modality(WIDE_WAIST, 35),
            _nothing,
            r"modality\.json: action\.waist goes from 32 to 36, but .* has 35",
        ),
        ("v2.1", lambda root: (root / "meta/modality.json").unlink(), _gr1, r"modality\.json"),
        ("v2.1", _modality({"move": {"start": 0, "end": 4}}, 4), _move, "'action'"),
        ("v2.1", _modality({"move": {"start": True, "end": 2}}), _nothing, r"action\.move"),
        ("v2.1", _modality({"move": {"start": 2}}), _nothing, r"action\.move"),
    ],
)
def test_what_is_wrong_is_named(
    version: str, damage: Damage, use: Use, key: str, tmp_path: Path, data_sets: dict[str, Path]
) -> None:
    root = Path(shutil.copytree(data_sets[version], tmp_path / "set"))
    damage(root)
    with pytest.raises(DataError, match=key):
        use(LeRobotSource.open(root))


def test_a_folder_that_is_no_data_set_names_one_below_it(v2: Path) -> None:
    for root, key in ((v2.parent, "v2"), (v2 / "absent", "absent")):
        with pytest.raises(DataError, match=key):
            LeRobotSource.open(root)
    with pytest.raises(ConfigError, match="gr1"):
        LeRobotSource.open(v2).action_parts(embodiment="gr2")


def test_missing_files_are_listed(v2: Path) -> None:
    video, rows = v2 / VIDEO, v2 / "data/chunk-000/episode_000002.parquet"
    video.unlink()
    rows.unlink()
    source = LeRobotSource.open(v2)
    assert source.missing_files(FRONT) == [rows, video] and source.missing_files(WRIST, [0, 1]) == []


def test_a_damaged_picture_is_reported_and_a_path_is_followed(v2: Path) -> None:
    table = made.table(1)
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
    with pytest.raises(DataError, match=r"absent\.png"):
        source.frames(1, WRIST, [4])


ONE = {"train": "0:20"}


def chosen(split: str, splits: dict[str, str] = ONE, count: int = 20, val_fraction: float = 0.1) -> list[int]:
    return choose_episodes(splits, count, split, val_fraction).tolist()


@pytest.mark.parametrize("count", [2, 3, 10, 97])
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
def test_train_and_val_part_all_episodes(count: int, fraction: float) -> None:
    train, val = chosen("train", ONE, count, fraction), chosen("val", ONE, count, fraction)
    assert sorted(train + val) == chosen("full", ONE, count, fraction) == list(range(count))
    assert len(val) == max(1, round(fraction * count)) and train
    assert val == chosen("test", ONE, count, fraction)


def test_what_is_held_out_is_spread_over_all_episodes() -> None:
    places = numpy.flatnonzero(held_out(100, 0.1))
    assert len(places) == 10 and (numpy.diff(places) == 10).all()
    assert not held_out(100, 0).any() and not held_out(1, 0.5).any()


def test_splits_of_the_data_set_count_where_it_has_several() -> None:
    splits = {"train": "0:15", "test": "15:20"}
    assert chosen("train", splits) == list(range(15))
    assert chosen("test", splits) == chosen("val", splits) == list(range(15, 20))
    assert chosen("full", splits) == list(range(20))
    with pytest.raises(ConfigError, match="'val'"):
        chosen("val", {"train": "0:15", "all": "0:20"})


def test_wrong_splits_are_named() -> None:
    with pytest.raises(ConfigError, match="'trian'"):
        chosen("trian")
    with pytest.raises(ConfigError, match="val_fraction=1"):
        chosen("train", val_fraction=1)
    with pytest.raises(DataError, match="'0-15'"):
        chosen("train", {"train": "0-15", "test": "15:20"})
