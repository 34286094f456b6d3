# SPDX-License-Identifier: Apache-2.0
"""Starts out of recordings of any layout, and episodes that begin there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.data.action_conditioned.recorded_episodes import open_episodes
from cosmos_predict2.data.toy.videos import path_of, write_states
from cosmos_predict2.rl.envs.recorded_starts import (
    FILE,
    GRIPPER,
    RecordedStart,
    RecordedStarts,
    gripper_changes,
    starts_of,
    write_starts,
)
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.episodes.episode_starts import RecordedEpisodeStarts, settle_num_tasks
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.toy_world.episodes import make_episodes
from imaginaire.errors import ConfigError, DataError
from scripts import make_reset_states
from tests.data import sources_lerobot
from tests.data.sources_bridge import bridge_tree
from tests.data.sources_libero import libero_tree


def make(*arguments: object) -> int:
    parser = make_reset_states.parser
    return make_reset_states.run(parser.parse_args([str(argument) for argument in arguments]))


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    episodes = make_episodes(3, 0, mix="full_skill", tasks=("carry_puck",), ring_elsewhere=0.0, length=40)
    write_states(path_of(tmp_path / "toy" / "train", 0), episodes, slice(0, 3), 10.0)
    return tmp_path / "toy"


def test_a_gripper_changes_where_it_crosses_the_middle_of_its_range() -> None:
    assert gripper_changes(numpy.array([-1.0, -1, 1, 1, 1, -1])) == [2, 5]
    assert gripper_changes(numpy.array([0.0, 0.2, 0.4, 0.6, 0.9, 1.0])) == [3]
    assert gripper_changes(numpy.full(5, 0.3)) == [] and gripper_changes(numpy.array([1.0])) == []


def recorded(moment: int) -> Any:
    """Twelve frames whose pictures, actions and poses name them, in which the gripper closes at one."""
    return SimpleNamespace(
        name="one",
        task="go",
        path="one.parquet",
        num_frames=12,
        gripper=lambda: (numpy.arange(12) >= moment).astype(float),
        actions=lambda: numpy.arange(11.0)[:, None],
        pictures=lambda frames: numpy.array(frames, dtype=numpy.uint8)[:, None, None, None],
        known=lambda frame: {"pose": numpy.array([float(frame)])},
    )


def test_a_keyframe_is_as_early_as_its_pictures_and_has_what_was_known_then() -> None:
    first, second = starts_of([recorded(moment=8)], GRIPPER, before=4)
    assert (first.pictures_F_H_W_C.flatten().tolist(), first.context["pose"].tolist()) == ([0], [0.0])
    assert second.pictures_F_H_W_C.flatten().tolist() == [0, 1, 2, 3, 4] and second.context["pose"].tolist() == [4.0]
    assert second.actions_A_D is not None and second.actions_A_D.flatten().tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match="1 moments lie within 8 frames of the start"):
        list(starts_of([recorded(moment=7)], GRIPPER, before=4))


def test_first_pictures_and_keyframes_of_a_lerobot_data_set(tmp_path: Path) -> None:
    root = sources_lerobot.write_v2(tmp_path / "robot")
    lengths = sources_lerobot.LENGTHS
    words = ("--camera", "wrist", "--out", tmp_path / "starts", "--keyframes", 0.9, "--before", 0)
    assert make("--dataset", root, *words) == 0
    starts = RecordedStarts(str(tmp_path / "starts"), by_task=False, keyframes=False)
    assert len(starts) == len(lengths)
    found = starts.starts([0] * len(lengths), range(len(lengths)))
    for i in range(len(lengths)):
        assert numpy.array_equal(found.pictures_E_F_H_W_C[i, 0], sources_lerobot.wrist(i)[0])
        assert found.task_description[i] == sources_lerobot.TASKS[i]
        assert numpy.allclose(found.context["state"][i], sources_lerobot.state(i)[0])
    cut = RecordedStarts(str(tmp_path / "starts"), by_task=False, history=5)
    numbers = [k for k, name in enumerate(cut.names.values()) if name.endswith("_0_kir")]
    assert numbers
    for k in numbers:
        episode = int(list(cut.names.values())[k].split("_")[1])
        frame = round(0.9 * (lengths[episode] - 1))
        frames = [0, *range(frame - 3, frame + 1)]
        start = cut.starts([0], [k])
        assert numpy.array_equal(start.pictures_E_F_H_W_C[0], sources_lerobot.wrist(episode)[frames])
        expected = sources_lerobot.action(episode)[[k - 1 for k in frames[1:]]]
        assert numpy.allclose(start.actions_E_A_D[0], expected)


def test_starts_that_are_there_are_not_replaced_in_silence(toy: Path, tmp_path: Path) -> None:
    words = ("--dataset", toy, "--out", tmp_path / "starts")
    assert make(*words) == 0
    with pytest.raises(ConfigError, match="holds starts: give another folder, or --overwrite"):
        make(*words)
    for num, names in ((2, ["episode_000000", "episode_000001"]), (1, ["episode_000000"])):
        assert make(*words, "--overwrite", "--num", num) == 0
        assert list(RecordedStarts(str(tmp_path / "starts")).names.values()) == names


def test_length_and_range_of_recordings_are_those_of_imagined_episodes(toy: Path, tmp_path: Path) -> None:
    make("--dataset", toy, "--out", tmp_path)
    starts, episodes = RecordedStarts(str(tmp_path), by_task=False), open_episodes(toy)
    env = WorldModelEnv(imagination_of(device="cpu"), starts, ToyDetectorReward(), 2, None, clip_actions="recorded")
    actions = numpy.concatenate([episode.actions()[: episode.num_frames - 1] for episode in episodes])
    assert env.metadata["max_steps"] == episodes[0].num_frames - 1
    assert numpy.allclose([env.metadata["action_low"], env.metadata["action_high"]], [actions.min(0), actions.max(0)])
    env.reset(options={"trial_ids": [0, 0], "seeds": [0, 0]})
    far = torch.stack([torch.full((8, 4), 9.0), torch.tensor(actions.max(0)).float().expand(8, 4)])
    one, other = env.chunk_step(far)[0]["full_image"].int()  # rows of a batch differ by their last bits on Intel
    assert (one - other).abs().max() <= 1, "the world model is not asked for what was never recorded"
    write_starts(tmp_path / "old" / FILE, starts_of(episodes))
    with pytest.raises(ConfigError, match=r"max_steps=null .*make_reset_states"):
        WorldModelEnv(env.imagination, RecordedStarts(str(tmp_path / "old")), ToyDetectorReward(), 2, None)


def cut_starts(path: Path, num: int) -> RecordedStarts:
    """Each recording gives its first picture and a keyframe."""
    picture = numpy.zeros((1, 8, 8, 3), numpy.uint8)
    rows = [
        RecordedStart(f"{i}{suffix}", "go", picture.repeat(count, 0), numpy.zeros((count - 1, 2), numpy.float32))
        for i in range(num)
        for suffix, count in (("", 1), ("_0_kir", 5))
    ]
    write_starts(path / FILE, rows)
    return RecordedStarts(str(path), by_task=False)


def test_training_and_validation_share_no_recording(tmp_path: Path) -> None:
    starts = cut_starts(tmp_path, 10)
    train, held_out = RecordedEpisodeStarts(starts), RecordedEpisodeStarts(starts, "held_out")
    names = [{list(starts.names.values())[row["trial_id"]].split("_")[0] for row in data} for data in (train, held_out)]
    assert names == [{*"01235678"}, {"4", "9"}] and (len(train), len(held_out)) == (16, 4)
    assert len(RecordedEpisodeStarts(starts, num=3)) == 3
    simulated = RecordedEpisodeStarts(None, "held_out", num=7)
    settle_num_tasks([SimpleNamespace(dataset=simulated)], [SimpleNamespace(metadata={})], is_remote=False)
    assert [row["trial_id"] for row in simulated] == list(range(7))
    with pytest.raises(DataError, match=r"\(8 starts\): none of its starts is of the part 'held_out'"):
        RecordedEpisodeStarts(cut_starts(tmp_path / "few", 4), "held_out")


def test_recordings_of_bridge_and_libero_are_read(tmp_path: Path) -> None:
    bridge_tree(tmp_path / "bridge", num_frames=16)
    libero_tree(tmp_path / "libero", num_demos=1)
    for name, dim in (("bridge", 7), ("libero", 7)):
        episodes = open_episodes(tmp_path / name)
        make("--dataset", tmp_path / name, "--out", tmp_path / "out" / name, "--keyframes", "gripper", "--before", 1)
        starts = RecordedStarts(str(tmp_path / "out" / name), history=5, by_task=False)
        is_cut = [key.endswith("_kir") for key in starts.names.values()]
        assert is_cut.count(False) == len(episodes) and any(is_cut)
        found = starts.starts([0], [is_cut.index(True)])
        assert found.actions_E_A_D.shape == (1, 4, dim) and found.pictures_E_F_H_W_C.shape[:2] == (1, 5)
        assert len(found.pictures_E_F_H_W_C.unique()) > 1


@pytest.mark.parametrize("history", [1, 5])
def test_imagined_episodes_begin_at_a_keyframe(toy: Path, history: int) -> None:
    out = toy.parent / "starts"
    make("--dataset", toy, "--out", out, "--keyframes", "gripper", "--before", 2)
    starts = RecordedStarts(str(out), history=history, by_task=False)
    numbers = [k for k, name in enumerate(starts.names.values()) if name.endswith("_kir")]
    episode = open_episodes(toy)[int(list(starts.names.values())[numbers[0]].split("_")[1])]
    moment = gripper_changes(episode.gripper())[int(list(starts.names.values())[numbers[0]].split("_")[2])]
    scoring = Scoring(judge="last", reward_on="last")
    env = WorldModelEnv(imagination_of(device="cpu"), starts, ToyDetectorReward(), 2, 8, scoring=scoring)
    observed, _ = env.reset(options={"trial_ids": [numbers[0], 0]})
    assert numpy.array_equal(observed["full_image"][0], episode.pictures([moment - 2])[0])
    info = env.chunk_step(torch.zeros(2, 8, 4))[4]
    assert not info["active"].any()
    if history == 1:  # the tiny model was trained with one picture; from the keyframe the puck is nearly there
        assert info["value"][0] > info["value"][1]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--dataset", "{}/nothing"], "no folder"),
        (["--dataset", "{}/clips"], "form 'video'"),
        (["--dataset", "{}/push", "--keyframes", "gripper"], "give a fraction"),
        (["--dataset", "{}/push", "--keyframes", "0.1"], "within 8 frames"),
        (["--dataset", "{}/bridge", "--camera", "front"], "number their cameras"),
        (["--dataset", "{}/libero", "--keyframes", "gripper", "--gripper_dim", "9"], "--gripper_dim"),
    ],
)
def test_what_cannot_be_cut_is_named(tmp_path: Path, arguments: list[str], word: str) -> None:
    (tmp_path / "clips" / "videos").mkdir(parents=True)
    bridge_tree(tmp_path / "bridge", num_frames=4, episodes={"train": 1})
    libero_tree(tmp_path / "libero", num_demos=1)
    write_states(path_of(tmp_path / "push", 0), make_episodes(1, 0), slice(0, 1), 10.0)
    with pytest.raises(ValueError, match=word):
        make(*[argument.format(tmp_path) for argument in arguments], "--out", tmp_path / "out")
    assert not (tmp_path / "out" / FILE).exists()


def test_a_word_that_is_no_keyframe_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("grip", "1.5", "0"):
        with pytest.raises(SystemExit):
            make("--dataset", "x", "--out", "y", "--keyframes", word)
        assert f"'{word}' is neither 'gripper' nor a fraction" in capsys.readouterr().err
