# SPDX-License-Identifier: Apache-2.0

import numpy
import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.policies.toy import ToyPolicy
from cosmos_predict2.toy_world import make_episodes, render
from cosmos_predict2.toy_world.physics import COLOURS, GOAL, GRIPPER, object_position
from imaginaire.errors import ConfigError
from tests.rl.policies.seen import generators


@pytest.fixture(scope="module")
def states() -> numpy.ndarray:
    episodes = make_episodes(24, seed=5, mix="expert")
    return numpy.concatenate([episodes.states[:, 0], episodes.states[:, 12]])


@pytest.fixture(scope="module")
def pictures(states: numpy.ndarray) -> Tensor:
    return torch.from_numpy(render(states, 48))


def policy(**options: object) -> ToyPolicy:
    torch.manual_seed(0)
    return ToyPolicy(**options)


def test_features_are_the_places_of_things(states: numpy.ndarray, pictures: Tensor) -> None:
    features = policy().features(pictures).numpy()
    for i, (where, tolerance) in enumerate([(GRIPPER, 0.6), (object_position(0), 0.2), (GOAL, 3.0)]):
        place = 24 + 24 * features[:, 2 * i : 2 * i + 2]
        assert abs(place - states[:, where]).max() < tolerance
    numpy.testing.assert_allclose(features[:, 6:8], 2 * (features[:, 2:4] - features[:, 0:2]), atol=1e-5)
    numpy.testing.assert_allclose(features[:, 8:10], 2 * (features[:, 4:6] - features[:, 2:4]), atol=1e-5)


def test_a_thing_that_is_not_seen_counts_as_in_the_middle(pictures: Tensor) -> None:
    noise = torch.randint(0, 256, (2, 48, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert policy().features(noise).isfinite().all() and policy().features(noise).abs().max() < 4
    table = torch.tensor(COLOURS["table"], dtype=torch.uint8).expand(1, 48, 64, 3)
    assert policy().features(table).abs().max() == 0


def test_actions_hold_each_knot_and_leave_the_rest_at_0(pictures: Tensor) -> None:
    for action_dim, entries in ((4, [0, 1]), (7, [0, 1])):
        decision = policy(action_dim=action_dim, noise=2.0).act(
            {"full_image": pictures}, mode="sample", generators=generators(len(pictures))
        )
        actions, knots = decision.actions_E_A_D, decision.record["knots"]
        assert actions.shape == (len(pictures), 12, action_dim) and knots.shape == (len(pictures), 4, 2)
        assert torch.equal(actions[:, ::3, entries], knots.clamp(-1, 1)) and knots.abs().max() > 1
        assert torch.equal(actions.unflatten(1, (4, 3)), actions[:, ::3, None].expand(-1, -1, 3, -1))
        assert actions[..., 2:].abs().max() == 0


def test_log_prob_is_that_of_the_normal_distribution_before_clipping(pictures: Tensor) -> None:
    one = policy(noise=1.5)
    record = one.act({"full_image": pictures}, mode="sample", generators=generators(len(pictures))).record
    found = one.log_prob(record)
    normal = torch.distributions.Normal(one.means(record["features"]), 1.5)
    torch.testing.assert_close(found.log_prob_B_K_N, normal.log_prob(record["knots"]))
    torch.testing.assert_close(found.entropy_B_K_N, normal.entropy())
    assert set(one.state_dict()) == {name for name, _ in one.named_parameters()}


def test_knots_that_do_not_divide_a_chunk_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"policy\.chunk=12.*policy\.num_knots=5"):
        ToyPolicy(num_knots=5)
    with pytest.raises(ConfigError, match=r"policy\.noise=0"):
        ToyPolicy(noise=0)


def test_the_temperature_is_how_far_a_sample_is_from_the_likeliest_actions(pictures: Tensor) -> None:
    one, observation = policy(), {"full_image": pictures[:4]}
    likeliest = one.act(observation, mode="greedy", generators=generators(4)).record["knots"]
    off = [
        one.act(observation, mode="sample", generators=generators(4), temperature=t).record["knots"] - likeliest
        for t in (0.0, 1.0, 2.0)
    ]
    assert not off[0].any() and off[1].all()
    torch.testing.assert_close(off[2], 2 * off[1])
