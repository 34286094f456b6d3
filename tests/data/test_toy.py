# SPDX-License-Identifier: Apache-2.0

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

from cosmos_predict2.data.dataset_latents import check_tokenizer
from cosmos_predict2.data.toy.latents import ToyWorldLatents
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.tokenizers.tiny import TinyTokenizer
from imaginaire.errors import ConfigError


@pytest.fixture(scope="module")
def videos() -> ToyWorldVideos:
    return ToyWorldVideos(num_episodes=64)


def test_the_embedding_is_that_of_the_caption_and_the_mask_counts_its_tokens(videos: ToyWorldVideos) -> None:
    item = videos[5]
    assert torch.equal(item["t5_text_embeddings"], BytesEncoder(64, 64).encode([item["ai_caption"]])[0])
    assert item["t5_text_mask"].sum() == len(item["ai_caption"].encode()) + 1  # and the end token
    assert not item["t5_text_embeddings"][item["t5_text_mask"] == 0].any()


def test_the_start_covers_the_episode(videos: ToyWorldVideos) -> None:
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


WORLD = dict(num_episodes=40, mix="mixed", captions=False, num_tokens=1)


def test_latents_are_those_of_the_clips() -> None:
    tokenizer = TinyTokenizer()
    latents, videos = ToyWorldLatents(tokenizer, **WORLD), ToyWorldVideos(**WORLD, start=0)  # type: ignore[arg-type]
    check_tokenizer(tokenizer, default_collate([latents[0], latents[1]]))
    seen = set()
    for index in (0, 7, 39):
        for seed in range(8):
            numpy.random.seed(seed)
            item = latents[index]
            start = _start(item["action"], videos.episodes.actions[index])
            seen.add(start)
            frames = torch.from_numpy(videos.episodes.render(index, start, start + 13)).permute(3, 0, 1, 2)
            expected = tokenizer.encode(frames[None].float() / 127.5 - 1)[0]
            assert torch.allclose(item["latents"], expected, atol=5e-3)  # kept in half precision
            assert not item["t5_text_embeddings"].any() and item["t5_text_embeddings"].shape == (1, 64)
    assert seen == {0, 4, 8, 12}
    assert videos[0].keys() - {"video"} == item.keys() - {"latents", "latent_probe"}


def _start(action: Tensor, whole: numpy.ndarray) -> int:
    """Place of these actions in an episode."""
    (start,) = [s for s in range(0, 13, 4) if numpy.array_equal(whole[s : s + 12], action.numpy())]
    return start


def test_frames_that_are_handed_over_come_from_the_decoder() -> None:
    tokenizer = TinyTokenizer()
    plain = ToyWorldLatents(tokenizer, **WORLD)  # type: ignore[arg-type]
    handed = ToyWorldLatents(tokenizer, handed_over=1.0, **WORLD)  # type: ignore[arg-type]
    for seed in range(8):
        pair = []
        for data in (plain, handed):
            numpy.random.seed(seed)
            pair.append(data[3])
        own, other = pair
        assert torch.equal(own["latents"][:, 1:], other["latents"][:, 1:])
        start = _start(own["action"], plain.videos.episodes.actions[3])
        far = float((own["latents"][:, 0] - other["latents"][:, 0]).abs().max())
        assert (far == 0) == (start == 0), "the first window of an episode begins with a true picture"
        if start:
            frame = tokenizer.decode(other["latents"][None, :, :1])[0, :, 0]
            truth = torch.from_numpy(plain.videos.episodes.render(3, start, start + 1)[0]).permute(2, 0, 1) / 127.5 - 1
            assert float((frame - truth).square().mean()) < 0.01


def test_windows_without_a_push_are_left_out_where_there_are_others() -> None:
    data = ToyWorldLatents(TinyTokenizer(), least_travel=2.0, **WORLD)  # type: ignore[arg-type]
    travel = data.videos.episodes.travel(12)
    some = [i for i in range(40) if 0 < (travel[i, ::4] >= 2).sum() < 4]
    none = [i for i in range(40) if not (travel[i, ::4] >= 2).any()]
    assert some and none
    for index in (some[0], none[0]):
        starts = set()
        for seed in range(20):
            numpy.random.seed(seed)
            starts.add(_start(data[index]["action"], data.videos.episodes.actions[index]))
        assert starts == {s for s in (0, 4, 8, 12) if index == none[0] or travel[index, s] >= 2}


@pytest.mark.parametrize(
    ("changes", "message"), [(dict(handed_over=2.0), "handed_over"), (dict(num_frames=12), "1 \\+ 4k")]
)
def test_arguments_that_cannot_be_meant(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ToyWorldLatents(TinyTokenizer(), **{**WORLD, **changes})  # type: ignore[arg-type]
