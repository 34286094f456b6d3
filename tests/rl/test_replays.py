# SPDX-License-Identifier: Apache-2.0
"""Recorded actions that are imagined, on the tiny weights that ship."""

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from cosmos_predict2.actions.transforms import UNKNOWN
from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.rl.envs.replays import held, replayed, require_actions_of, whole_chunks
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv
from cosmos_predict2.rl.episodes.policy_evaluation import film, held_out_starts
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.world_model.imagination import Imagination
from imaginaire.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def imagination() -> Imagination:
    return imagination_of(device="cpu")


def test_replays_are_what_a_policy_learns_from(imagination: Imagination) -> None:
    """Bit for bit the pictures of an environment with the same starts, seeds and actions, two of three at a time."""
    starts = held_out_starts(3, 1, seed=0)
    actions = torch.rand(2, 3, 12, 4, generator=torch.Generator().manual_seed(0)) * 3 - 1.5  # not clipped
    env = WorldModelEnv(imagination, ToyStarts(), ToyDetectorReward(), 2, 24, clip_actions=False)
    expected, _ = film(env, starts, actions)
    first = ToyStarts().starts(starts.task_ids, starts.trial_ids).pictures_E_F_H_W_C[:, 0]
    whole = actions.transpose(0, 1).flatten(1, 2)
    video = replayed(imagination, first, whole, seeds=starts.seeds, batch_size=2)
    assert torch.equal(video.permute(0, 4, 1, 2, 3), expected)
    assert not torch.equal(replayed(imagination, first, whole, seeds=[0, 1, 2], batch_size=2), video)


def test_a_short_last_chunk_repeats_its_last_action_and_more_evaluations_are_made(imagination: Imagination) -> None:
    first = ToyStarts().starts([0], [0]).pictures_E_F_H_W_C[:, 0]
    actions = torch.rand(1, 14, 4, generator=torch.Generator().manual_seed(0))
    video = replayed(imagination, first, actions, seeds=[5], num_steps=2)
    assert video.shape == (1, 15, *first.shape[1:]) and torch.equal(video[:, 0], first)
    still = torch.cat([actions, actions[:, -1:].expand(-1, 10, -1)], dim=1)
    options = dict(num_steps=2, final_evaluation=False)
    clip = imagination.rollout(
        first.permute(0, 3, 1, 2)[:, :, None],
        imagination.transformed(still.numpy()),
        [5],
        type(ONE_EVALUATION)(**options, is_repeatable=True),
    )
    assert torch.equal(video[:, 1:], clip.permute(0, 2, 3, 4, 1)[:, 1:15])
    with pytest.raises(DataError, match="1 first pictures, 1 sequences of 14 actions and 2 seeds"):
        replayed(imagination, first, actions, seeds=[1, 2])


def test_episodes_of_as_many_chunks_are_imagined_together_and_repeat_their_last_action() -> None:
    parts = [*whole_chunks([3, 12, 13, 24, 5, 12], 12, lambda count: 24 // count)]
    assert parts == [(12, [0, 1]), (12, [4, 5]), (24, [2]), (24, [3])]
    assert held(torch.arange(6.0).reshape(2, 3), 4).tolist() == [[0, 1, 2], [3, 4, 5], [3, 4, 5], [3, 4, 5]]


def test_recordings_are_not_imagined_by_a_world_model_that_begins_with_five_pictures(imagination: Imagination) -> None:
    """It is said before any of them is read."""
    known = {"width": lambda parts: imagination.transform.dim, "action_contract": lambda parts: UNKNOWN}
    source: Any = SimpleNamespace(info=SimpleNamespace(root="my_data"), action_parts=lambda keys: None, **known)
    require_actions_of(source, imagination)
    config = attrs.evolve(imagination.config, min_num_conditional_frames=2)
    other: Any = SimpleNamespace(config=config, transform=imagination.transform)
    with pytest.raises(ConfigError, match="5 at least"):
        require_actions_of(source, other)
