# SPDX-License-Identifier: Apache-2.0
"""The published environment: how it draws starts, ends, resets and saves."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.compat.rlinf.environment import RLinfWorldModelEnv
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire.errors import CheckpointError, ConfigError, DataError
from tests.rl.envs.test_world_model import Listed


class FewStarts(ToyStarts):
    def __len__(self) -> int:
        return 7


@pytest.fixture(scope="module")
def imagination() -> Imagination:
    return imagination_of(device="cpu")


def make(imagination: Imagination, reward: Any = None, num_envs: int = 4, **options: Any) -> RLinfWorldModelEnv:
    options = {"group_size": 2, "chunk": 4, "max_episode_steps": 8, "num_steps": 1, "batch_size": 3, **options}
    return RLinfWorldModelEnv(imagination, FewStarts(), reward or ToyDetectorReward(), num_envs, **options)


def test_members_of_a_group_begin_alike_and_ranks_differ(imagination: Imagination) -> None:
    env = make(imagination, seed=5)
    ids = env.reset_state_ids
    assert torch.equal(ids[::2], ids[1::2])
    observed, _ = env.reset()
    assert torch.equal(observed["main_images"][::2], observed["main_images"][1::2])
    assert env.is_start is False and observed["wrist_images"] is None and observed["states"].shape == (4, 16)
    drawn = [make(imagination, seed=5, seed_offset=k, num_envs=16).reset_state_ids for k in (0, 1, 0)]
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    env.update_reset_state_ids()
    assert not torch.equal(env.reset_state_ids, ids)


def test_any_other_reset_draws_different_starts_for_all(imagination: Imagination) -> None:
    env = make(imagination, use_fixed_reset_state_ids=False)
    pictures = env.reset()[0]["main_images"]
    assert len({row.numpy().tobytes() for row in pictures}) == 4
    again = make(imagination, num_envs=8)
    again.reset()
    with pytest.raises(DataError, match="8 different starts are drawn of 7"):
        again.reset()
    chosen = env.reset(episode_indices=[1, 1, 2, 2])[0]["main_images"]
    assert torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[1], chosen[2])


def test_a_success_is_flagged_at_the_end_of_each_chunk_that_shows_it(imagination: Imagination) -> None:
    judged = [[1.0, 0, 0, 0], [0.0, 0, 0, 0]], [[0.0, 1, 1, 1], [0.0, 0, 0, 0]]
    env = make(imagination, Listed(*judged), num_envs=2, reward_coef=5.0)
    env.reset()
    _, rewards, terminations, truncations, info = env.chunk_step(torch.zeros(2, 4, 4))
    assert rewards.tolist() == [[5, -5, 0, 0], [0, 0, 0, 0]] and terminations.tolist() == [[0, 0, 0, 1], [0] * 4]
    assert not truncations.any() and info["episode"]["success_once"].tolist() == [True, False]
    _, rewards, terminations, truncations, info = env.chunk_step(torch.zeros(2, 4, 4))
    assert rewards[0].tolist() == [0, 5, 0, 0] and terminations[0, 3] and truncations[:, 3].all()
    assert info["episode"]["return"].tolist() == [5, 0] and info["episode"]["episode_len"].tolist() == [8, 8]
    assert info["episode"]["reward"].tolist() == [0.625, 0]
    env = make(imagination, Listed(judged[1]), num_envs=2, reward_coef=5.0, use_rel_reward=False)
    env.reset()
    assert env.chunk_step(torch.zeros(2, 4, 4))[1].tolist() == judged[1], "as published, without the coefficient"
    with pytest.raises(NotImplementedError, match="chunk_step"):
        env.step(None)


def test_auto_reset_begins_all_anew_and_keeps_what_was(imagination: Imagination) -> None:
    env = make(imagination, Listed([[0.0] * 4, [1.0] * 4]), num_envs=2, auto_reset=True)
    env.reset()
    observed, _, terminations, _, info = env.chunk_step(torch.ones(2, 4, 4))
    assert terminations[1, 3] and env.elapsed_steps == 0
    assert info["_final_info"].tolist() == [False, True]
    assert info["final_info"]["episode"]["success_once"].tolist() == [False, True]
    assert not torch.equal(info["final_observation"]["main_images"], observed["main_images"])


def test_its_state_goes_on_exactly_and_offloading_changes_nothing(imagination: Imagination, tmp_path: Path) -> None:
    env, other = make(imagination), make(imagination, seed=9)
    env.reset()
    env.chunk_step(torch.ones(4, 4, 4))
    other.load_state(env.get_state())
    env.offload()
    results = [one.chunk_step(torch.full((4, 4, 4), -0.5)) for one in (env, other)]
    assert torch.equal(results[0][0]["main_images"], results[1][0]["main_images"])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1:4], results[1][1:4], strict=True))
    for name, value in results[0][4]["episode"].items():
        assert torch.equal(value, results[1][4]["episode"][name])
    draws = []
    for one in (env, other):
        one.update_reset_state_ids()
        draws.append((one.reset_state_ids.tolist(), one.reset()[0]["main_images"].numpy().tobytes()))
    assert draws[0] == draws[1]
    with pytest.raises(CheckpointError, match="damaged"):
        env.load_state(b"nothing")


def test_the_noise_of_an_environment_depends_on_its_micro_batch(imagination: Imagination) -> None:
    pictures = []
    for batch_size in (4, 2):
        env = make(imagination, batch_size=batch_size)
        env.reset(episode_indices=[3, 3, 3, 3])
        pictures.append(env.chunk_step(torch.ones(4, 4, 4))[0]["main_images"])
    assert not torch.equal(pictures[0][2], pictures[1][2])
    assert not torch.equal(pictures[1][0], pictures[1][2]), "the first of two micro-batches"


def test_groups_that_do_not_fill_the_environments_are_refused(imagination: Imagination) -> None:
    with pytest.raises(ConfigError, match="group_size=3"):
        make(imagination, group_size=3)
