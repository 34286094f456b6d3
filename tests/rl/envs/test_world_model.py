# SPDX-License-Identifier: Apache-2.0
"""The world model as an environment, on the tiny weights that ship."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cosmos_predict2.configs.rl.imagination import imagination_of
from cosmos_predict2.rl.envs.scoring import Scoring
from cosmos_predict2.rl.envs.starts import ToyStarts
from cosmos_predict2.rl.envs.toy import ToyEnv
from cosmos_predict2.rl.envs.world_model import ONE_EVALUATION, WorldModelEnv, require_inputs
from cosmos_predict2.rl.interfaces import Clips, Judgement, PolicyDefaults
from cosmos_predict2.rl.rewards.frames import ToyDetectorReward, WeightedReward
from cosmos_predict2.rl.rewards.verifiable import Smoothness
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.options import SamplingOptions
from imaginaire.errors import ConfigError, DataError
from tests.rl.vla_runs import Brightness

LAST = dict(judge="last", reward_on="last")


@pytest.fixture(scope="module")
def imagination() -> Imagination:
    return imagination_of(device="cpu")


def make(
    imagination: Imagination, num_envs: int = 3, *, scoring: dict | None = None, reward: Any = None, **options: Any
):
    options = {"max_steps": 24, **options}
    reward = reward or ToyDetectorReward()
    return WorldModelEnv(imagination, ToyStarts(), reward, num_envs, scoring=Scoring(**scoring or {}), **options)


def test_a_policy_that_reads_the_state_is_refused_or_shown_the_zeros_that_were_chosen(
    imagination: Imagination, caplog: pytest.LogCaptureFixture
) -> None:
    reads, blind = PolicyDefaults(), PolicyDefaults()
    reads.reads_state = True
    with pytest.raises(ConfigError, match=r"reads the robot's state.*use_proprio=False.*state_size=N"):
        require_inputs(make(imagination), reads)
    require_inputs(make(imagination), blind)
    require_inputs(ToyEnv(1), reads)
    assert not caplog.text
    require_inputs(make(imagination, state_size=8), reads)
    assert "shown 8 zeros" in caplog.text


def begin(env: Any, **others: Any) -> Any:
    numbers = range(env.num_envs)
    return env.reset(options={"trial_ids": numbers, "seeds": numbers, **others})


def actions(env: Any, seed: int = 0, num_actions: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(env.num_envs, num_actions, 4, generator=generator) * 2 - 1
    drawn[..., 2:] = 0
    return drawn


class Listed:
    """Judges by a list: value and success of the pictures of each call."""

    def __init__(self, *values: list[list[float]]) -> None:
        self.values = [torch.tensor(value) for value in values]
        self.context: Mapping[str, Any] = {}

    def judge(self, frames: Tensor, context: Mapping[str, Any]) -> Judgement:
        value, self.context = self.values.pop(0), context
        assert value.shape == frames.shape[:2]
        return Judgement(value, value > 0.5)


def test_chunks_are_those_of_a_rollout_with_the_same_seeds(imagination: Imagination) -> None:
    env = make(imagination, keep_frames=True)
    observed, _ = begin(env)
    first, second = actions(env, 1), actions(env, 2)
    expected = imagination.rollout(
        observed["full_image"].permute(0, 3, 1, 2)[:, :, None], torch.cat([first, second], 1), range(3), ONE_EVALUATION
    )
    videos = []
    for chunk in (first, second):
        observed, _, _, _, info = env.chunk_step(chunk)
        videos.append(info["frames"])
        assert torch.equal(observed["full_image"], info["frames"][:, -1])
    assert torch.equal(torch.cat(videos, 1), expected[:, :, 1:].permute(0, 2, 3, 4, 1))


def test_one_evaluation_of_the_network_is_enough(imagination: Imagination) -> None:
    env = make(imagination, scoring=LAST)
    begin(env)
    net = imagination.world.net
    with mock.patch.object(net, "forward", wraps=net.forward) as forward:
        env.chunk_step(actions(env))
        assert forward.call_count == 1
        env.sampling = SamplingOptions(num_steps=1)
        env.chunk_step(actions(env))
        assert forward.call_count == 3


def same_but_for_sums(a: Tensor, b: Tensor) -> None:
    """Another batch, or another row of one, may sum in another order: pictures then differ by a level."""
    assert (a.int() - b.int()).abs().max() <= 1


def test_only_the_last_pictures_are_decoded_where_they_are_enough_and_are_the_same(imagination: Imagination) -> None:
    whole, last = make(imagination), make(imagination, scoring=LAST)
    network = imagination.world.tokenizer.net
    for env, groups in ((whole, 3), (last, 1)):
        begin(env)
        with mock.patch.object(network.group, "decode", wraps=network.group.decode) as decode:
            result = env.chunk_step(actions(env), execute=11)
        assert sum(call.args[0].shape[0] for call in decode.call_args_list) == groups * 3
        pictures = result[0]["full_image"]
        env.pictures, env.value = pictures, result[4]["value"]
    same_but_for_sums(whole.pictures, last.pictures)
    assert torch.allclose(whole.value, last.value, atol=2e-3)


def test_results_do_not_depend_on_the_batch(imagination: Imagination) -> None:
    whole, parts = make(imagination, scoring=LAST), make(imagination, scoring=LAST, batch_size=2)
    begin(whole), begin(parts)
    steps = actions(whole)
    expected, found = whole.chunk_step(steps), parts.chunk_step(steps)
    same_but_for_sums(expected[0]["full_image"], found[0]["full_image"])
    assert torch.allclose(expected[4]["value"], found[4]["value"], atol=2e-3)


def test_an_imagined_push_ends_where_the_simulators_does(imagination: Imagination) -> None:
    simulated = ToyEnv(16, terminate_on_success=False)
    env = make(imagination, 16, scoring=LAST)
    options = {"trial_ids": range(16)}
    _, info = simulated.reset(options=options)
    begin(env)
    for _ in range(2):
        states = info["states"]
        motion = torch.zeros(16, 12, 4)
        way = states[:, 4:6] - states[:, 0:2]
        motion[:, :, :2] = (way / way.norm(dim=1, keepdim=True))[:, None].float()
        _, true_reward, _, _, info = simulated.chunk_step(motion)
        _, reward, _, truncated, imagined = env.chunk_step(motion)
    assert (imagined["success"] == info["success"]).float().mean() >= 0.8
    assert (reward[:, -1] - true_reward[:, -1]).abs().median() < 0.2
    assert not reward[:, :-1].any() and (truncated[:, -1] | imagined["success"]).all()


def test_episodes_that_are_over_leave_the_batch(imagination: Imagination) -> None:
    listed = Listed([[0.0] * 4, [1, 0, 0, 0], [0.0] * 4], [[0.0] * 4] * 2)
    env = make(imagination, 3, scoring={"terminate_on_success": True}, reward=listed)
    begin(env)
    steps = actions(env, num_actions=4)
    _, reward, terminated, _, info = env.chunk_step(steps)
    assert terminated.tolist() == [[False] * 4, [False] * 3 + [True], [False] * 4]
    assert info["finish_step"].tolist() == [-1, 4, -1] and info["success"].tolist() == [False, True, False]
    with mock.patch.object(imagination, "generate_actions", wraps=imagination.generate_actions) as generate:
        _, reward, _, _, info = env.chunk_step(steps)
    assert len(generate.call_args.args[2]) == 2
    assert not reward[1].any() and not info["executed"][1].any() and info["success"].tolist() == [False, True, False]


def test_differences_and_confirmations_go_on_over_the_chunks_of_an_episode(imagination: Imagination) -> None:
    listed = Listed([[1.0, 1, 0, 1]], [[1.0, 0, 1, 1]], [[1.0, 1, 1, 1]])
    env = make(imagination, 1, scoring=dict(use_rel_reward=True, reward_coef=5.0, confirm=5), reward=listed)
    begin(env)
    chunks = [env.chunk_step(actions(env, num_actions=4)) for _ in range(3)]
    assert [reward.tolist() for _, reward, *_ in chunks] == [[[5, 0, -5, 5]], [[0, -5, 5, 0]], [[0, 0, 0, 0]]]
    assert [bool(info["success"]) for *_, info in chunks] == [False, False, True]


def test_another_episode_begins_without_the_values_of_the_one_before(imagination: Imagination) -> None:
    """Neither its last reward, from which differences are taken, nor its successes in a row go on."""
    scoring = dict(use_rel_reward=True, confirm=3, terminate_on_success=True)
    env = make(imagination, 1, scoring=scoring, reward=Listed([[0.0, 0, 1, 1]], [[1.0, 0, 0, 0]]))
    for expected in ([0, 0, 1, 0], [1, -1, 0, 0]):
        begin(env)
        _, reward, _, _, info = env.chunk_step(actions(env, num_actions=4))
        assert reward.tolist() == [expected] and info["success"].tolist() == [False]


def test_of_two_noises_the_worse_one_counts(imagination: Imagination) -> None:
    listed = Listed([[1.0], [0.2], [0.8], [0.6], [0.9], [0.3]])
    env = make(imagination, scoring=LAST, reward=listed, num_noises=2, max_steps=12)
    alone = make(imagination, scoring=LAST, max_steps=12)
    begin(env), begin(alone)
    observed, reward, _, _, info = env.chunk_step(actions(env))
    assert torch.allclose(reward[:, -1], torch.tensor([0.6, 0.2, 0.3]))
    assert info["success"].tolist() == [True, False, False] and info["disagrees"].tolist() == [False, True, True]
    goals = env.starts.starts([0] * 3, range(3)).context["goal"]  # the pictures are those of noise after noise
    assert not torch.equal(goals[0], goals[1]) and torch.equal(listed.context["goal"], torch.cat([goals, goals]))
    expected = alone.chunk_step(actions(env))[0]["full_image"]
    assert (observed["full_image"].int() - expected.int()).abs().max() <= 1
    assert not torch.equal(env._frames[0], env._frames[1])


def test_offloading_by_phases_moves_everything_and_changes_nothing(imagination: Imagination) -> None:
    reward = Brightness()
    env = make(imagination, 2, reward=reward, offload="phase")
    begin(env)
    with mock.patch.object(imagination.world, "move", wraps=imagination.world.move) as move:
        env.offload(), env.offload()
        assert move.call_count == 1 and reward.place == "cpu"
        env.chunk_step(actions(env))
        assert move.call_count == 2 and reward.place == imagination.world.device
        env.onload()
        assert move.call_count == 2
        kept = make(imagination, 2)
        kept.offload()
        assert move.call_count == 2


def test_a_handed_over_float_is_not_rounded(imagination: Imagination) -> None:
    env = make(imagination, 1, hand_over="float", scoring=LAST)
    begin(env)
    env.chunk_step(actions(env))
    levels = (env._frames + 1) * 127.5
    assert env._frames.is_floating_point() and not torch.allclose(levels, levels.round(), atol=1e-3)


def test_a_puck_that_is_not_seen_counts_as_farthest() -> None:
    starts = ToyStarts().starts([0, 0], [0, 1])
    frames = starts.pictures_E_F_H_W_C.expand(-1, 2, -1, -1, -1).clone()
    frames[:, 1] = 200
    judged = ToyDetectorReward().judge(frames, starts.context)
    distance = (starts.context["states"][:, 4:6] - starts.context["goal"]).norm(dim=1).clamp(max=12)
    assert torch.allclose(judged.value_E_F[:, 0].double(), -distance / 12, atol=0.03)
    assert (judged.value_E_F[:, 1] == -1).all() and not judged.success_E_F[:, 1].any()
    assert ToyDetectorReward().judge(frames[:, :1], {"goal": starts.context["states"][:, 4:6]}).success_E_F.all()


def test_rewards_of_pictures_and_of_clips_count_together_by_their_weights(imagination: Imagination) -> None:
    """The clip's value is that of each of its pictures; the task is done where the judge of pictures says so."""
    still = Smoothness()
    both = WeightedReward(dict(near=ToyDetectorReward(), still=still), weights=dict(still=0.5))
    frames = torch.randint(0, 256, (2, 4, 48, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    context = {"goal": torch.full((2, 2), 24.0)}
    near, found = ToyDetectorReward().judge(frames, context), both.judge(frames, context)
    of_clip = still(
        Clips(None, frames.permute(0, 4, 1, 2, 3), ["", ""], 10.0), {"num_conditional_frames": torch.zeros(2)}
    )
    torch.testing.assert_close(found.value_E_F, near.value_E_F + 0.5 * of_clip[:, None])
    assert torch.equal(found.success_E_F, near.success_E_F)
    bright = Brightness(2.0)  # to which nothing is a success, and which has no say
    judged = WeightedReward(dict(still=still, near=ToyDetectorReward(), bright=bright)).judge(frames, context)
    assert torch.equal(judged.success_E_F, near.success_E_F) and near.success_E_F.any()
    env = make(imagination, reward=both, scoring=dict(reward_on="each"))
    begin(env)
    assert env.chunk_step(actions(env))[1].isfinite().all()


@pytest.mark.parametrize(
    ("rewards", "weights", "named"),
    [
        (dict(still=Smoothness()), None, "judge"),
        (dict(near=ToyDetectorReward()), dict(nearer=1.0), "nearer"),
        (dict(near=ToyDetectorReward(), far=object()), None, "'far' neither"),
    ],
)
def test_what_does_not_make_one_reward_is_refused(rewards: Any, weights: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        WeightedReward(rewards, weights)


def test_starts_without_what_others_have_are_refused(imagination: Imagination) -> None:
    env = make(imagination)
    begin(env)
    given = env.starts.starts([0], [0])
    without = replace(given, context={"goal": given.context["goal"]})
    with mock.patch.object(env.starts, "starts", return_value=without), pytest.raises(DataError, match=r"\(states is"):
        env.reset(options=dict(env_ids=[0], task_ids=[0], trial_ids=[0], seeds=[0]))


def test_what_cannot_be_meant_is_named(imagination: Imagination) -> None:
    for options, word in [
        ({"padding": "hld"}, "padding"),
        ({"text": "tasks"}, "text"),
        ({"hand_over": "latent"}, "hand_over"),
        ({"offload": "always"}, "offload"),
        ({"num_noises": 0}, "num_noises"),
        ({"num_noises": 3}, "num_noises"),
        ({"keep_first": True}, "keep_first"),
        ({"max_steps": 0}, "max_steps"),
    ]:
        with pytest.raises(ConfigError, match=word):
            make(imagination, **options)
    with pytest.raises(ConfigError, match="use_rel_reward"):
        Scoring(use_rel_reward=True, reward_on="last")
    env = make(imagination, 1)
    begin(env)
    with pytest.raises(DataError, match="imagines 12 at once"):
        env.chunk_step(torch.zeros(1, 13, 4))
    env.reward = Listed([[float("nan")] * 12])
    with pytest.raises(DataError, match="not finite"):
        env.chunk_step(actions(env))


def test_one_noise_level_is_one_evaluation_of_the_sampler() -> None:
    from cosmos_predict2.diffusion.solvers import sample

    x = sample(lambda x, sigma: x / (1 + sigma[:, None]), torch.full((1, 2), 8.0), torch.tensor([3.0]))
    assert torch.equal(x, torch.full((1, 2), 2.0))
