# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.action_conditioned.dataset_lerobot: clips with actions from every version of the format."""

import json
import logging
import shutil
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch

from cosmos_predict2.actions.statistics import other_range
from cosmos_predict2.actions.transforms import controller, relative_pose
from cosmos_predict2.data.action_conditioned.dataset_lerobot import IdleRule, LeRobotActionDataset
from cosmos_predict2.data.lerobot.writer import write_table
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.encode import embed_captions
from imaginaire.data.facts import facts_of
from imaginaire.errors import ConfigError, DataError
from tests.data import sources_lerobot as made
from tests.data.lerobot_files import write_film
from tests.data.sources_lerobot import FRONT, LENGTHS, grey
from tests.findings import problems

SHAPE = dict(num_frames=4, video_size=(32, 48), data_split="full")
FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "lerobot_v3"
pytest.importorskip("pyarrow", reason="needs pyarrow: pip install -e '.[data]'")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_v2(tmp_path_factory.mktemp("lerobot") / "set", modality=True)


@pytest.fixture
def root(tmp_path: Path, original: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "set"))


def dataset(root: Path, **arguments: object) -> LeRobotActionDataset:
    return LeRobotActionDataset(str(root), **{"camera": "front", **SHAPE, **arguments})  # type: ignore[arg-type]


def test_every_window_of_every_episode_is_an_item(original: Path) -> None:
    for data in (dataset(original), dataset(FIXTURE), dataset(original, camera="wrist")):
        assert len(data) == sum(length - 3 for length in LENGTHS)
        places = [(i, start) for i, length in enumerate(LENGTHS) for start in range(length - 3)]
        for item, (i, start) in zip(data, places, strict=True):
            assert torch.equal(item["action"], torch.from_numpy(made.action(i)[start : start + 3]))
            assert item["__key__"] == f"episode_{i:06d}" and item["ai_caption"] == made.TASKS[i]
            assert item["fps"] == 4.0
            assert item["t5_text_mask"].all() and not item["t5_text_embeddings"].any()
            if data.source.camera == FRONT:
                greys = item["video"].float().mean((0, 2, 3)).tolist()
                assert greys == pytest.approx([grey(i, k) for k in range(start, start + 4)], abs=5)


@pytest.mark.parametrize(("combine", "rows"), [("first", [0, 2]), ("last", [1, 3])])
def test_a_stride_takes_frames_and_one_row_of_actions(combine: str, rows: list, original: Path) -> None:
    for stride in (dict(stride=2), dict(frame_rate=5)):
        data = dataset(original, num_frames=3, combine_actions=combine, action_transform=controller(3, 1.0), **stride)
        assert len(data) == sum(length - 4 for length in LENGTHS)
        assert numpy.array_equal(data[0]["action"].numpy(), made.action(0)[rows])
        assert facts_of(dict(_target_=LeRobotActionDataset, root=str(original), fps=4.0, **stride)).rate == made.FPS / 2
        assert data[0]["video"].float().mean((0, 2, 3)).tolist() == pytest.approx([20, 40, 60], abs=5)


def test_moves_add_up_and_the_gripper_keeps_the_last(original: Path) -> None:
    data = dataset(original, num_frames=3, stride=2, combine_actions="sum", action_transform=controller(3, 1.0))
    rows = made.action(0).astype(numpy.float64)
    expected = numpy.stack([rows[0:2].sum(0), rows[2:4].sum(0)])
    expected[:, 2] = rows[[1, 3], 2]
    assert numpy.allclose(data[0]["action"].numpy(), expected, atol=1e-6)


def test_a_stride_combines_actions_by_modality_json(root: Path) -> None:
    place = root / "meta/modality.json"
    modality = json.loads(place.read_text())
    for absolutes in ([True, True], [False, False], [False, True], [True, None]):
        for part, absolute in zip(modality["action"].values(), absolutes, strict=True):
            part["absolute"] = absolute
        place.write_text(json.dumps(modality))
        found = "".join(problems(LeRobotActionDataset, root=str(root), camera="front", stride=3, **SHAPE))
        assert ("combine_actions (--combine_actions)" in found) == (None in absolutes)
        if None not in absolutes:
            data, rows = dataset(root, num_frames=3, stride=3, action_transform=controller(3, 1.0)), made.action(0)
            moves, targets = [rows[0:3].sum(0), rows[3:6].sum(0)], rows[[2, 5]]
            is_move = numpy.array([not absolute for absolute in absolutes])[[0, 0, 1]]
            assert numpy.allclose(data[0]["action"].numpy(), numpy.where(is_move, moves, targets), atol=1e-6)


def test_parts_of_the_action_by_name(original: Path) -> None:
    data = dataset(original, action_keys=["grip"], action_transform={"kind": "controller", "scale": [2.0]})
    assert numpy.allclose(data[0]["action"].numpy(), 2 * made.action(0)[:3, 2:])
    assert data.action_transform.dim == 1


def test_text_comes_from_embeddings_of_the_episodes(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DataError, match="t5_xxl/"):
        dataset(root, load_t5_embeddings=True)
    texts = {f"episode_{i:06d}": task for i, task in enumerate(made.TASKS)}
    embed_captions(root / "t5_xxl", texts, BytesEncoder(32, 16))
    shutil.copytree(root / "t5_xxl", root.parent / "elsewhere")
    for folder in (None, str(root.parent / "elsewhere")):
        item = dataset(root, load_t5_embeddings=True, embedding_dir=folder, num_tokens=32)[5]
        expected = BytesEncoder(32, 16).encode([made.TASKS[1]])[0].float()
        assert torch.allclose(item["t5_text_embeddings"], expected, atol=1e-2)
        assert item["t5_text_mask"].sum() == (expected != 0).any(-1).sum()
        assert item["video_name"]["t5_embedding_path"].endswith("t5_xxl/episode_000001.pickle" if not folder else "e")
    assert "several tasks" not in caplog.text
    index = root / "meta/episodes.jsonl"
    index.write_text(index.read_text().replace(f'["{made.TASKS[0]}"]', '["one", "two"]', 1))
    dataset(root, load_t5_embeddings=True)
    assert "episode 0: 'one', 'two'. An embedding is of a whole episode" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (dict(camera=None), "camera"),
        (dict(camera="back"), "back"),
        (dict(data_split="trian"), "data_split"),
        (dict(embodiment="g1"), "embodiment"),
        (dict(action_keys="move", embodiment="gr1"), "action_keys"),
        (dict(action_transform=controller(7)), "action_transform.scale"),
        (dict(action_transform=relative_pose()), "action_transform.kind"),
        (dict(stride=2), "combine_actions"),
        (dict(combine_actions="sums"), "combine_actions"),
        (dict(combine_actions=["sum", "lost"]), "combine_actions"),
        (dict(frame_rate=4), "frame_rate"),
        (dict(frame_rate=5, stride=2), "frame_rate"),
        (dict(num_frames=1), "num_frames"),
        (dict(num_frames=10), "num_frames"),
        (dict(video_size=(30, 48)), "video_size"),
        (dict(start_interval=0), "start_interval"),
        (dict(decoder="pyaw"), "pyaw"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, key: str, original: Path) -> None:
    with pytest.raises(DataError if arguments == dict(num_frames=10) else ConfigError, match=key):
        dataset(original, **arguments)


def test_the_check_reports_without_reading_episodes(original: Path, tmp_path: Path) -> None:
    assert not problems(LeRobotActionDataset, root=str(original), camera="front", **SHAPE)
    assert "which camera?" in "".join(problems(LeRobotActionDataset, root=str(original), **SHAPE))
    found = "; ".join(problems(LeRobotActionDataset, root=str(tmp_path), video_size=(30, 48), stride=0))
    assert "meta/info.json" in found and "multiples of 16" in found and "stride=0" in found
    assert "in between" in "".join(problems(LeRobotActionDataset, root=str(original), stride=2))
    transform = dict(kind="controller", statistics=str(tmp_path / "none.json"))
    assert "none.json" in "".join(problems(LeRobotActionDataset, root=str(original), action_transform=transform))


def test_missing_files_stop_the_run_or_are_left_out_with_a_count(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / f"videos/chunk-000/{FRONT}/episode_000001.mp4").unlink()
    with pytest.raises(DataError, match=r"episode_000001\.mp4"):
        dataset(root)
    with caplog.at_level(logging.WARNING):
        data = dataset(root, skip_bad_samples=True)
    assert "1 of 3 episodes are excluded" in caplog.text
    assert data.recordings.tolist() == [0, 2]


def test_a_video_shorter_than_its_table_is_refused_before_training(root: Path) -> None:
    write_film(root / f"videos/chunk-000/{FRONT}/episode_000002.mp4", made.front(2)[:-2], made.FPS)
    with pytest.raises(DataError, match=r"episode_000002\.mp4"):
        dataset(root)
    assert len(dataset(root, skip_bad_samples=True)) > 0


def with_actions(root: Path, episode: int, rows: numpy.ndarray) -> None:
    path = root / f"data/chunk-000/episode_{episode:06d}.parquet"
    write_table(path, {**made.table(episode), "action": rows.astype(numpy.float32)})


def test_actions_that_are_not_finite_are_reported(root: Path) -> None:
    rows = made.action(1)
    rows[2, 1] = numpy.nan
    with_actions(root, 1, rows)
    data = dataset(root, action_transform=controller(3, 1.0))
    assert torch.isfinite(data[0]["action"]).all()
    with pytest.raises(DataError, match=r"episode_000001\.parquet"):
        data[4]
    with pytest.raises(DataError, match=r"episode_000001\.parquet"):
        dataset(root)  # whose statistics look at all of them
    assert dataset(root, skip_bad_samples=True).action_transform == controller(3, 1.0)


def test_actions_of_any_scale_come_out_in_the_order_of_one(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for factor in (16.0, 20.0, 1e-3):
        for i in range(len(LENGTHS)):
            with_actions(root, i, factor * made.action(i))
        caplog.clear()
        with caplog.at_level(logging.INFO):
            data = dataset(root)
            of_splits = [dataset(root, data_split=split).action_transform for split in ("train", "val")]
        assert caplog.text.count("actions are normalised") == 2, "the data of validation do not log it again"
        assert "actions are normalised by their own statistics: 98 % of 18 rows of 3 episodes lie in" in caplog.text
        actions = torch.stack([item["action"] for item in data])
        assert actions.abs().amax((0, 1)).min() > 0.5 and actions.abs().max() < 1.5
        if factor == 16:  # powers of two change no digit
            assert torch.equal(data[0]["action"], torch.from_numpy(made.action(0)[:3]))
        transform = data.action_transform
        assert transform.proposed and transform.stats is not None and '"proposed"' in data[0]["action_transform"]
        assert [one.to_json() for one in of_splits] == [transform.to_json()] * 2, "one data set has one transform"
        assert not dataset(root, action_transform=controller(3)).action_transform.proposed


def test_actions_that_never_change_are_a_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    moving = dataset(root)
    assert "never change" not in caplog.text
    for i in range(len(LENGTHS)):
        with_actions(root, i, 0 * made.action(i))
    for given in (None, controller(3)):
        caplog.clear()
        still = dataset(root, action_transform=given)
        assert "the actions never change" in caplog.text
    columns = still.action_statistics().action
    assert "never change" in (other_range(columns, moving.action_transform, is_whole=True) or "")


def test_statistics_are_of_the_actions_along_the_frames(original: Path) -> None:
    assert dataset(original).action_statistics().num_transitions == sum(length - 1 for length in LENGTHS)
    summed = dataset(original, num_frames=3, stride=2, combine_actions="sum").action_statistics()
    assert summed.num_transitions == sum((length - 1) // 2 for length in LENGTHS)


def slowly(commands: numpy.ndarray, below: float, idle_run: int, moving_run: int, cut: int) -> list[bool]:
    """The rule in plain loops."""
    count = len(commands)
    idle = [k > 0 and all(abs(a - b) < below for a, b in zip(commands[k], commands[k - 1])) for k in range(count)]
    keep, starts = [True] * count, [False] * count
    for first, end in runs(idle):
        if idle[first] and end - first >= idle_run:
            keep[first:end] = [False] * (end - first)
    for first, end in runs(keep):
        if keep[first] and end - first >= moving_run:
            for k in range(first, end - cut):
                starts[k] = True
    return starts


def runs(flags: list[bool]) -> list[tuple[int, int]]:
    edges = [0, *(k for k in range(1, len(flags)) if flags[k] != flags[k - 1]), len(flags)]
    return list(pairwise(edges))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("values", [(7, 16, 10), (3, 4, 6), (1, 1, 0)])
def test_the_rule_is_that_of_plain_loops(seed: int, values: tuple[int, int, int]) -> None:
    draws = numpy.random.default_rng(seed)
    moves = numpy.repeat(draws.random(60) < 0.6, draws.integers(1, 14, 60))
    commands = numpy.cumsum(moves[:, None] * draws.normal(0, 1, (len(moves), 7)), axis=0)
    rule = IdleRule(idle_run=values[0], moving_run=values[1], cut=values[2])
    assert rule.starts(commands).tolist() == slowly(commands, 1e-3, *values)


def test_a_pause_is_kept_and_a_rest_is_not() -> None:
    commands = numpy.arange(60.0)[:, None].repeat(2, axis=1)
    commands[30:37] = commands[30]  # six frames like the one before
    assert IdleRule().starts(commands).sum() == 50
    commands[30:38] = commands[30]  # seven
    assert numpy.flatnonzero(IdleRule().starts(commands)).tolist() == [*range(21), *range(38, 50)]
    assert not IdleRule().starts(numpy.ones((40, 2))).any() and len(IdleRule().starts(numpy.ones((1, 2)))) == 1
