# SPDX-License-Identifier: Apache-2.0

import numpy
import pytest
import torch

from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from imaginaire.errors import ConfigError


@pytest.fixture(scope="module")
def videos() -> ToyWorldVideos:
    return ToyWorldVideos(num_episodes=64)


def test_the_embedding_is_that_of_the_caption_and_the_mask_counts_its_tokens(videos: ToyWorldVideos) -> None:
    item = videos[5]
    assert torch.equal(item["t5_text_embeddings"], BytesEncoder(64, 64).encode([item["ai_caption"]])[0])
    assert item["t5_text_mask"].sum() == len(item["ai_caption"].encode()) + 1  # and the end token
    assert not item["t5_text_embeddings"][item["t5_text_mask"] == 0].any()


def test_the_start_follows_numpys_generator_and_covers_the_episode(videos: ToyWorldVideos) -> None:
    numpy.random.seed(3)
    first = videos[7]
    numpy.random.seed(3)
    assert torch.equal(videos[7]["video"], first["video"])
    states = videos.episodes.states[7]
    whole = torch.from_numpy(videos.episodes.render(7).transpose(3, 0, 1, 2).copy())
    seen = set()
    for _ in range(300):
        item = videos[7]
        starts = [s for s in range(len(states) - 12) if torch.equal(whole[:, s : s + 13], item["video"])]
        assert starts
        seen.update(starts)
    assert {0, len(states) - 13} <= seen


def test_the_action_leads_from_its_frame_to_the_next() -> None:
    videos = ToyWorldVideos(num_episodes=4, start=5, mix="mixed")
    item = videos[2]
    assert numpy.array_equal(item["action"].numpy(), videos.episodes.actions[2, 5:17])
    assert numpy.array_equal(item["video"].numpy()[:, 0], videos.episodes.render(2, 5, 6)[0].transpose(2, 0, 1))


def test_training_and_validation_share_no_episode_and_each_is_a_function_of_the_seed() -> None:
    train, again, val = (ToyWorldVideos(num_episodes=200, split=split) for split in ("train", "train", "val"))
    assert numpy.array_equal(train.episodes.states, again.episodes.states)
    starts = {tuple(row) for row in train.episodes.states[:, 0]}
    assert len(starts) == 200
    assert not starts & {tuple(row) for row in val.episodes.states[:, 0]}
    other = ToyWorldVideos(num_episodes=200, seed=1)
    assert not starts & {tuple(row) for row in other.episodes.states[:, 0]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(split="test"), "'test'"),
        (dict(mix="experts"), "Did you mean expert"),
        (dict(tasks=("push_pukc",)), "push_puck"),
        (dict(num_frames=40), "num_steps"),
        (dict(start=20), "start"),
        (dict(size=16), "size 16"),
        (dict(num_frames=0), "num_frames=0"),
        (dict(num_episodes=0), "num_episodes=0"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ToyWorldVideos(**{"num_episodes": 2, **arguments})
