# SPDX-License-Identifier: Apache-2.0
"""cosmos_predict2.data.lerobot.writer, and the toy world in this layout."""

import json
from pathlib import Path

import numpy
import pytest
import torch

from cosmos_predict2.data.action_conditioned.dataset_lerobot import LeRobotActionDataset
from cosmos_predict2.data.lerobot.reader import LeRobotSource
from cosmos_predict2.data.lerobot.writer import Recording, Writer
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.tools.prepare.toy_folder import CAMERA, ToyFolder, write_folder
from tests.data.sources_lerobot import FPS, FRONT, LENGTHS, TASKS, action, front, grey, state

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


def test_files_that_are_there_are_kept(tmp_path: Path) -> None:
    write(tmp_path, range(3))
    files = [path for path in tmp_path.rglob("*") if path.suffix in (".mp4", ".parquet")]
    assert len(files) == 6
    before = {path: path.stat().st_mtime_ns for path in files}
    (tmp_path / "data/chunk-000/episode_000001.parquet").unlink()
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
        video = source.frames(i, CAMERA, range(9)).permute(1, 2, 3, 0).float()
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
