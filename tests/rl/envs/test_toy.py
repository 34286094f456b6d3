# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import numpy
import pytest
import torch

from cosmos_predict2.data.toy.videos import SPLITS
from cosmos_predict2.rl.envs import suites
from cosmos_predict2.rl.envs.contract import check_environment
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.toy_world.episodes import make_episodes
from cosmos_predict2.toy_world.physics import SETTINGS
from cosmos_predict2.toy_world.rendering import render, render_wrist
from imaginaire.errors import CheckpointError, ConfigError, DataError


def _episodes(num: int, split: str, mix: str = "full_skill"):
    return make_episodes(num, 3, mix=mix, first=SPLITS[split], ring_elsewhere=0.0)


@pytest.mark.parametrize("split", ["train", "val"])
def test_recorded_actions_lead_to_the_recorded_states(split: str) -> None:
    episodes = _episodes(6, split)
    env = ToyEnv(6, split=split, seed=3, reward_on="each", keep_frames=True)
    observed, info = env.reset(options={"trial_ids": range(6)})
    assert numpy.array_equal(info["states"], episodes.states[:, 0])
    assert numpy.array_equal(observed["full_image"], render(episodes.states[:, 0], 48))
    rewards = []
    for start in (0, 12):
        actions = torch.from_numpy(episodes.actions[:, start : start + 12])
        observed, reward, terminated, truncated, info = env.chunk_step(actions)
        rewards.append(reward)
        assert numpy.array_equal(info["frames"], render(episodes.states[:, start + 1 : start + 13], 48))
    assert numpy.array_equal(info["states"], episodes.states[:, -1])
    assert numpy.allclose(torch.cat(rewards, 1), episodes.rewards, atol=1e-6)
    assert numpy.array_equal(info["success"], episodes.success)
    assert torch.equal(terminated[:, -1], info["success"]) and torch.equal(truncated[:, -1], ~info["success"])


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("succeeds", [False, True])
def test_the_last_step_alone_is_paid_or_each_and_a_sparse_reward_is_for_success(succeeds: bool, sparse: bool) -> None:
    """A failed episode is paid for what it left."""
    actions, rewards = torch.from_numpy(_episodes(4, "train").actions) * succeeds, []
    for reward_on in ("last", "each"):
        env = ToyEnv(4, seed=3, sparse=sparse, reward_on=reward_on)
        env.reset(options={"trial_ids": range(4)})
        rewards.append(torch.cat([env.chunk_step(actions[:, k : k + 12])[1] for k in (0, 12)], dim=1))
    last, each = rewards
    assert (
        torch.equal(last[:, -1], each[:, -1])
        and not last[:, :-1].any()
        and each[:, :-1].any() == (succeeds or not sparse)
    )
    if sparse:
        assert (last[:, -1] == float(succeeds)).all() and set(each.unique().tolist()) == {0.0, float(succeeds)}
    else:
        assert (last[:, -1] < 0).all() or succeeds


def test_success_ends_an_episode_where_asked_and_nothing_follows() -> None:
    episodes = _episodes(8, "train")
    assert episodes.ever.all()
    env = ToyEnv(8, seed=3, terminate_on_success=True)
    env.reset(options={"trial_ids": range(8)})
    ended = []
    for k in (0, 12):
        _, _, terminated, truncated, info = env.chunk_step(torch.from_numpy(episodes.actions[:, k : k + 12]))
        ended.append(terminated)
        assert not truncated.any()
    ended = torch.cat(ended, 1)
    assert (ended.sum(1) == 1).all()
    finish = ended.int().argmax(1) + 1
    assert torch.equal(info["finish_step"], finish) and not info["active"].any() and info["success"].all()
    assert (finish < 24).any()
    for row, step in enumerate(finish.tolist()):
        assert numpy.array_equal(info["states"][row], episodes.states[row, step])


def test_trials_of_splits_differ_and_tasks_share_a_call() -> None:
    train, val = (ToyEnv(2, split=split).reset(options={"trial_ids": [0, 1]})[1] for split in ("train", "val"))
    assert not torch.equal(train["states"], val["states"])
    env = ToyEnv(2, tasks=("push_puck", "touch_box"))
    observed, _ = env.reset(options={"task_ids": [1, 2], "trial_ids": [5, 5]})
    assert observed["task_description"] == ["touch the blue box", "push the red puck to the green ring"]


def test_a_covered_table_is_seen_from_the_wrist_too() -> None:
    """The suite of the setting has a task of its own, and nothing of the state but the gripper is shown."""
    assert set(suites.TOYS.values()) == set(SETTINGS), "each setting is a suite"
    place = suites.find("toy_covered")
    env = place.env(4, SimpleNamespace(action_dim=4))
    observed, info = env.reset(options={"trial_ids": range(4)})
    states = info["states"].numpy()
    assert place.tasks == ["reach_ring"] and observed["task_description"] == ["reach the green ring"] * 4
    assert numpy.array_equal(observed["full_image"], render(states, 48, env.setting.cover))
    assert numpy.array_equal(observed["wrist_image"][:, 0], render_wrist(states, 48))
    assert torch.equal(observed["state"][:, :2].double(), info["states"][:, :2].float().double())
    assert not torch.equal(observed["wrist_image"][0], observed["wrist_image"][1])
    way = (info["goal"] - info["states"][:, :2])[:, None] / 24 / env.setting.speed
    actions = torch.nn.functional.pad(way, (0, 2)).expand(4, 12, 4)
    assert not env.chunk_step(actions)[-1]["success"].any() and env.chunk_step(actions)[-1]["success"].all()
    assert (env._judged(numpy.arange(4))[0] < 0.1).all()
    assert ToyEnv(2).reset()[0]["wrist_image"].shape == (2, 0, 48, 48, 3)
    env = suites.find("toy_covered").env(3, SimpleNamespace(action_dim=4))
    env.views = ("front", "wrist")
    check_environment(env)
    with pytest.raises(ConfigError, match=r"below the cover of the setting 'covered': give a reward .*--reward"):
        ToyDetectorReward("covered")


def test_each_task_has_tables_of_its_own() -> None:
    tasks = ("push_puck", "choose_box")
    both = ToyEnv(2, tasks=tasks).reset(options={"task_ids": [0, 1], "trial_ids": [5, 5]})[1]["states"]
    for i, task in enumerate(tasks):
        assert torch.equal(ToyEnv(1, tasks=(task,)).reset(options={"trial_ids": [5]})[1]["states"][0], both[i])
    assert not torch.equal(both[0], both[1])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"setting": "easy"}, "setting"),
        ({"action_dim": 5}, "action_dim"),
        ({"reward_on": "frst"}, "reward_on"),
        ({"num_envs": 0}, "num_envs"),
        ({"num_steps": 0}, "max_steps"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ToyEnv(**{"num_envs": 2, **arguments})


def test_wrong_calls_are_named() -> None:
    env = ToyEnv(2)
    with pytest.raises(DataError, match="never reset"):
        env.chunk_step(torch.zeros(2, 12, 4))
    env.reset()
    for actions, keywords, word in [
        (torch.zeros(2, 12, 7), {}, "shape"),
        (torch.full((2, 12, 4), torch.nan), {}, "finite"),
        (torch.zeros(2, 12, 4), {"execute": 13}, "execute=13"),
        (torch.zeros(1, 12, 4), {"env_ids": [2]}, "env_ids"),
        (torch.zeros(2, 12, 4), {"env_ids": [1, 1]}, "env_ids"),
    ]:
        with pytest.raises(DataError, match=word):
            env.chunk_step(actions, **keywords)
    with pytest.raises(ConfigError, match="trial_ids"):
        env.reset(options={"trials": [0, 1]})
    with pytest.raises(DataError, match="seeds has 1"):
        env.reset(options={"seeds": [0]})


def test_a_state_of_another_environment_is_refused() -> None:
    env = ToyEnv(2)
    env.reset()
    for other, word in [(ToyEnv(3), "num_envs"), (ToyEnv(2, setting="hard"), "setting")]:
        with pytest.raises(CheckpointError, match=word):
            other.load_state(env.get_state())
    with pytest.raises(CheckpointError, match="damaged"):
        env.load_state(env.get_state()[:100])


def test_pictures_behind_what_was_executed_repeat_the_last_one_and_nothing_moves() -> None:
    env = ToyEnv(2, keep_frames=True)
    env.reset(options={"trial_ids": [1, 2]})
    actions = torch.zeros(2, 12, 4)
    actions[..., 0] = 1.0
    observed, *_, info = env.chunk_step(actions, execute=5)
    assert torch.equal(info["frames"][:, 4], observed["full_image"])
    assert torch.equal(info["frames"][:, 5:], observed["full_image"][:, None].expand(-1, 7, -1, -1, -1))
    assert not torch.equal(info["frames"][:, 0], info["frames"][:, 4]) and not info["moved"][:, 5:].any()


def test_the_ring_is_shown_elsewhere_in_the_share_that_is_asked_for() -> None:
    shares = []
    for share in (0.0, 0.25, 1.0):
        env = ToyEnv(40, keep_frames=True, ring_elsewhere=share)
        env.reset(options={"trial_ids": range(40), "seeds": range(40)})
        observed, *_, info = env.chunk_step(torch.zeros(40, 12, 4), execute=1)
        shares.append((info["frames"][:, 0] != observed["full_image"]).flatten(1).any(dim=1).float().mean().item())
    assert shares[0] == 0 and 0.1 < shares[1] < 0.4 and shares[2] > 0.9
