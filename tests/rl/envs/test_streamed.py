# SPDX-License-Identifier: Apache-2.0
"""The streamed environment: chunks in pieces are the chunks at once, and what fits no stream is imagined as before."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.nn.state_head import StateHead
from cosmos_predict2.rl.envs.first_frames import GivenStarts
from cosmos_predict2.rl.envs.replays import ZeroReward
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.streamed import StreamedEnv
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.objectives import Student
from cosmos_predict2.world_model.world_model import WorldModel
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.errors import ConfigError
from tests.rl.envs.test_world_model import actions, begin


@pytest.fixture(scope="module")
def imagination() -> Imagination:
    world = imagination_of(device="cpu").world
    config = copy.copy(world.config)
    config.objective = L(Student)(causal=True)
    return Imagination(WorldModel(config, world.net, world.tokenizer))


def make(imagination: Imagination, kind: type[WorldModelEnv] = StreamedEnv, **options: Any) -> Any:
    return kind(imagination, ToyStarts(), ToyDetectorReward(), 2, 24, keep_frames=True, hand_over="float", **options)


def film(env: Any, pieces: list[int]) -> Tensor:
    begin(env)
    rows, shown, at = torch.cat([actions(env, seed) for seed in (0, 1)], dim=1), [], 0
    for count in pieces:
        shown.append(env.chunk_step(rows[:, at : at + count])[4]["frames"])
        at += count
    return torch.cat(shown, dim=1).float()


@pytest.mark.parametrize("keeps", [True, False])
def test_two_chunks_in_pieces_are_the_chunks_at_once(imagination: Imagination, keeps: bool) -> None:
    whole = film(make(imagination, WorldModelEnv), [12, 12])
    for pieces in ([4, 4, 4, 4, 4, 4], [4, 8, 12], [12, 8, 4]):
        assert (film(make(imagination, keeps=keeps), pieces) - whole).abs().max() <= 1  # bytes, rounded


def test_what_fits_no_chunk_begins_at_the_present_picture(imagination: Imagination) -> None:
    for pieces in ([8, 8, 8], [4, 3, 4], [3, 5]):
        assert torch.isfinite(film(make(imagination), pieces)).all()
    plain, streamed = (film(make(imagination, kind), [3, 5, 2]) for kind in (WorldModelEnv, StreamedEnv))
    assert torch.equal(plain, streamed)


def test_a_loaded_state_goes_on_as_the_saved_one(imagination: Imagination) -> None:
    env, other = make(imagination), make(imagination)
    film(env, [4])
    other.load_state(env.get_state())
    rows = actions(env, 5, 4)
    assert torch.equal(env.chunk_step(rows)[4]["frames"], other.chunk_step(rows)[4]["frames"])


def test_the_robots_state_follows_a_stream(imagination: Imagination, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head = StateHead(4, 16, [[-2.0, 2.0], [0.0, 9.0]]).eval().requires_grad_(False)
    monkeypatch.setattr(imagination.world.net, "state_head", head)
    pictures, states = torch.randint(0, 255, (2, 48, 48, 3), dtype=torch.uint8), torch.tensor([[1.0, 2.0], [-1.0, 4.0]])
    found = []
    for kind, pieces in ((WorldModelEnv, [12]), (StreamedEnv, [4, 8]), (StreamedEnv, [12])):
        starts = GivenStarts(pictures, states_E_S=states)
        env: Any = kind(imagination, starts, ZeroReward(), 2, 24, hand_over="float")
        begin(env)
        at = 0
        for count in pieces:
            observation = env.chunk_step(actions(env)[:, at : at + count])[0]
            at += count
        found.append(observation["state"])
    assert not torch.allclose(found[0], states)
    assert all(torch.allclose(one, found[0], atol=1e-4) for one in found[1:])


def test_whole_chunks_alone_are_no_stream() -> None:
    with pytest.raises(ConfigError, match="makes whole chunks"):
        make(imagination_of(device="cpu"))
