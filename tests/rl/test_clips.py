# SPDX-License-Identifier: Apache-2.0
"""Experiences of a small world model, without a trainer: whose clips they are, by which weights, and what is learnt."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.conditioner import NEGATIVE_TEXT_KEY
from cosmos_predict2.data.dataset_prompts import TRUE_FRAMES_KEY
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.rl import objectives
from cosmos_predict2.rl.clips.flow_grpo import FlowGRPOModel
from cosmos_predict2.rl.clips.rollout import chain_path, judge
from cosmos_predict2.rl.config import Predict2RLConfig, RewardConfig, RLConfig
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.learner import Experience
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from imaginaire import random
from imaginaire.config import L
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import DataError
from tests.models.parts import LIMITS, NET, PooledPixels, awaken, make_batch

FIRST, STEPS = 4, dict(sample_steps=3, train_on=[0, 1])
seen: list[tuple[Clips, Mapping[str, Any]]] = []  # by the reward


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    seen.clear()
    yield


def brightness(clips: Clips, context: Mapping[str, Any]) -> Tensor:
    seen.append((clips, context))
    assert clips.video_B_C_F_H_W is not None
    return clips.video_B_C_F_H_W.float().mean(dim=(1, 2, 3, 4))


brightness.needs_pixels = True  # type: ignore[attr-defined]


def model(dropout: float = 0.0, **rl: Any) -> FlowGRPOModel:
    net = L(Video2WorldDiT)(**NET, **LIMITS)
    pipe = Video2WorldPipelineConfig(net=net, tokenizer=L(PooledPixels)(), state_t=3)
    pipe.conditioner.text.dropout_rate = dropout
    options: dict[str, Any] = STEPS | dict(num_rollout=2, rollout_batch=2, noise_level=0.3) | rl
    rewards = {"bright": RewardConfig(make=f"{__name__}:brightness")}
    torch.manual_seed(0)
    rl_config = RLConfig(rewards=rewards, **options)
    found = FlowGRPOModel(Predict2RLConfig(pipe_config=pipe, precision="float32", rl=rl_config))
    awaken(found.net)
    found.parallelize(ParallelDims())
    return found


def batch(size: int = 3, first: int = FIRST) -> dict[str, Any]:
    """Clips, texts and frame rates that differ; the ``first`` place in the stream."""
    found = make_batch(8, positions=[5 * k % 13 for k in range(8)])
    found["fps"], found["ai_caption"] = torch.arange(8) + 5.0, [f"clip {i}" for i in range(8)]
    found[NEGATIVE_TEXT_KEY] = -2 * found["t5_text_embeddings"]
    return {key: value[first - FIRST : first - FIRST + size] for key, value in found.items()}


def clips_of(found: Experience) -> Tensor:
    return found.record.samples.final.unflatten(0, (-1, 2))


@pytest.mark.parametrize("options", [dict(guidance=1.5), dict(objective="nft", transition="ode")])
def test_a_clip_does_not_depend_on_its_company(options: dict[str, Any]) -> None:
    """One or two of its latent frames are given, which follows from its place in the stream, as its noise does."""
    options = dict(min_num_conditional_frames=1, max_num_conditional_frames=2) | options
    one = model(rollout_batch=2, **options)
    whole = clips_of(one.collect(batch(4)))
    rows = [i for clips, _ in seen for i in [int(prompt[-1]) for prompt in clips.prompts]]
    numbers = torch.cat([context["num_conditional_frames"] for _, context in seen])
    other = model(**options)
    alone = torch.cat([clips_of(other.collect(batch(1, FIRST + i))) for i in range(4)])
    torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-4)
    others = clips_of(model(rollout_batch=8, **options).collect(batch(4)))
    torch.testing.assert_close(whole, others, rtol=1e-4, atol=1e-4)
    assert (whole[:, 0] - whole[:, 1]).abs().amax(dim=(1, 2, 3, 4)).min() > 1e-3
    assert rows == [0, 0, 1, 1, 2, 2, 3, 3] and set(numbers.tolist()) == {1, 2}


def test_rewards_see_each_clip_with_what_it_was_conditioned_on() -> None:
    """Its caption, its frame rate and its true clip, whose first latent frames were given."""
    one = model(min_num_conditional_frames=1, max_num_conditional_frames=2, rollout_batch=4)
    found = one.collect(batch(4))
    given, true = batch(4), one.world.encode(batch(4)["video"])
    finals = iter(found.record.samples.final)
    for clips, context in seen:
        assert clips.latents_B_C_T_H_W is not None and len(set(clips.prompts)) == 1
        for i, prompt in enumerate(clips.prompts):
            row = given["ai_caption"].index(prompt)
            num = int(context["num_conditional_frames"][i])
            assert clips.fps == float(given["fps"][row])
            torch.testing.assert_close(context["true_latents"][i], true[row])
            assert torch.equal(context["true_video"][i], given["video"][row])
            assert torch.equal(clips.latents_B_C_T_H_W[i], next(finals))
            torch.testing.assert_close(clips.latents_B_C_T_H_W[i][:, :num], true[row][:, :num])
    assert found.facts["bright_valid_rate"] == 1 and found.teaches_G.all()


def test_guidance_is_away_from_the_negative_text_or_from_none() -> None:
    one, given = model(guidance=2.0), batch()
    found = one.collect(given).record
    for rows in (slice(0, 2), slice(3, 6)):
        condition, unconditional = found.conditions_of(rows)
        assert unconditional is not None
        torch.testing.assert_close(unconditional.crossattn_emb_B_S_E, -2 * condition.crossattn_emb_B_S_E)
    guided = clips_of(one.collect(given))
    del given[NEGATIVE_TEXT_KEY]
    plain = one.collect(given)
    assert not plain.record.conditions_of(slice(0, 2))[1].crossattn_emb_B_S_E.any()
    assert (clips_of(plain) - guided).abs().max() > 1e-3
    assert model().collect(given).record.conditions_of(slice(0, 2))[1] is None


def test_the_data_term_withholds_text_as_training_does_and_the_rollout_does_not() -> None:
    record = model(dropout=1.0).collect(batch()).record
    assert not record.data_condition.crossattn_emb_B_S_E.any()
    shown = record.conditions_of(slice(0, 1))[0].crossattn_emb_B_S_E[0]
    torch.testing.assert_close(shown, batch()["t5_text_embeddings"][0])


def test_groups_of_further_batches_take_the_places_of_those_without_spread() -> None:
    """Ratios of 1 show that each clip kept its condition, noise and step; its true clip has its conditioning frames."""
    one, rollouts = model(max_rollouts=4, data_beta=1.0, use_rl_sigma_and_noise=False), itertools.count()

    def scored(tickets: Any) -> Any:
        advantage = torch.zeros(2, 2)
        advantage[next(rollouts) % 2] = torch.tensor([1.0, -1.0])  # of each rollout another group
        return advantage, advantage.any(dim=1), {}

    one._score = scored  # type: ignore[method-assign]
    found = one.experience(batch(2), iter([batch(2, FIRST + k) for k in (2, 4)]))
    assert found.num_rollouts == next(rollouts) == 2 and found.teaches_G.all()
    conditions = set()
    for part in one.minibatches(found, {})[1]:
        output, _ = one.training_step(part, 0)
        assert (float(output["log_prob_ratio"]), float(output["ratio_std"])) == pytest.approx((1.0, 0.0), abs=1e-6)
        given = part.condition.gt_frames_B_C_T_H_W
        assert given is not None and part.data is not None and part.advantage_B.tolist() == [1.0, -1.0]
        torch.testing.assert_close(part.data.x0_B_C_T_H_W[:, :, 0], given[:, :, 0])
        conditions.add(float(given[0].sum()))
    assert len(conditions) == 2


def test_the_text_of_a_group_is_not_copied_for_its_members() -> None:
    """Embeddings of Reason1 are 100 MB a clip: all micro-batches of a group see the same memory, the data term too."""
    one, given = model(num_rollout=4, data_beta=1.0), batch(1)
    given["t5_text_embeddings"] = given["t5_text_embeddings"].clone()
    found = one.collect(given)
    parts = [each for part in one.minibatches(found, {})[1] for each in (part, part.data)]
    texts = [part.condition.crossattn_emb_B_S_E for part in parts]
    assert len(texts) == 8 and {len(text) for text in texts} == {2}
    assert {text.untyped_storage().nbytes() for text in texts} == {texts[0][0].nbytes}
    assert len({text.untyped_storage().data_ptr() for text in texts}) == 1


def gradient(one: FlowGRPOModel, given: dict[str, Any]) -> Tensor:
    one.net.zero_grad()
    found = one.collect(given)
    count, parts = one.minibatches(found, given)
    for part in parts:
        (one.training_step(part, 0)[1] / count).backward()
    return torch.cat([weight.grad.flatten() for weight in one.net.parameters() if weight.grad is not None])


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(transition="churn", data_beta=0.5, use_rl_sigma_and_noise=False),
        dict(transition="cps", kl_beta=0.5, noise_on_trained_steps_only=True, guidance=1.0),
        dict(data_beta=1.0, data_on_first_only=True),
        dict(objective="nft", transition="ode", num_timesteps=2, kl_beta=0.5),
        dict(objective="awm", transition="ode", num_timesteps=2, loss_scale=3.0),
    ],
)
def test_the_gradient_is_the_same_however_many_clips_pass_the_network_together(options: dict[str, Any]) -> None:
    """And that of three times the loss is three times as large, where it is scaled."""
    found = [gradient(model(rollout_batch=size, **options), batch(2)) for size in (1, 4)]
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-5 + 1e-3 * float(found[0].abs().max()))
    if scale := options.get("loss_scale"):
        plain = gradient(model(rollout_batch=4, **options | dict(loss_scale=1.0)), batch(2))
        torch.testing.assert_close(found[1], scale * plain)


def test_drawn_steps_and_levels_are_those_of_the_experience() -> None:
    """Each once and in order; the last step of a chain that draws nothing is not among them."""
    for transition, last in (("sde", 5), ("dance", 5), ("cps", 4)):
        one, found = model(transition=transition, sample_steps=6, train_on=[3, -1, -1]), set()
        for first in range(FIRST, FIRST + 5):
            steps = list(one.collect(batch(1, first)).record.samples.kept)
            assert steps == sorted(set(steps)) and len(steps) == 3 and 3 in steps and max(steps) <= last
            found.add(tuple(steps))
        assert len(found) > 1
    one = model(sample_steps=9, train_on=[-1])
    record = one.collect(batch(1)).record
    further = [one.collect(batch(1, first), record).record for first in range(FIRST + 1, FIRST + 6)]
    assert all(list(each.samples.kept) == list(record.samples.kept) for each in further), "of one experience"
    whole = model(transition="dance", sample_steps=3, train_on=[-1, -1, -1])
    assert list(whole.collect(batch(1)).record.samples.kept) == [0, 1, 2]
    nft = model(objective="nft", transition="ode", sample_steps=6, num_timesteps=2)
    levels = {tuple(nft.collect(batch(1, first)).record.samples.forwards) for first in range(FIRST, FIRST + 5)}
    assert all(len(some) == 2 for some in levels) and len(levels) > 1


def test_a_rollout_keeps_its_levels_and_the_window_in_which_it_drew() -> None:
    """Noise levels of the steps, whatever the chain is written in; nothing of steps where levels are trained."""
    for options in (dict(), dict(transition="churn", s_churn=0.0), dict(objective="nft", transition="ode")):
        samples = model(**options).collect(batch(1)).record.samples
        assert samples.levels == pytest.approx([80.0, 9.7232, 0.46998], rel=1e-3) and samples.window is None
        assert bool(samples.kept) == ("objective" not in options)
    assert model(noise_on_trained_steps_only=True).collect(batch(1)).record.samples.window == (0, 1)


def test_true_clips_are_known_to_rewards_as_bytes_where_there_are_any() -> None:
    given = batch(2)
    given["video"] = given["video"].float() / 127.5 - 1
    model().collect(given)
    assert seen[-1][1]["true_video"].dtype == torch.uint8
    model(min_num_conditional_frames=0, max_num_conditional_frames=0).collect(
        {**given, TRUE_FRAMES_KEY: torch.zeros(2)}
    )
    assert not {"true_video", "true_latents"} & set(seen[-1][1])
    with pytest.raises(DataError, match="max_num_conditional_frames=0"):
        model().collect({**given, TRUE_FRAMES_KEY: torch.tensor([1, 2, 0])})


@pytest.mark.parametrize("is_same", [False, True])
def test_fresh_noise_is_of_its_own_at_each_level_and_for_each_member_unless_it_is_shared(is_same: bool) -> None:
    one = model(objective="nft", transition="ode", use_same_forward_noise=is_same)
    samples = one.collect(batch(2)).record.samples
    noises = [noise for forward in samples.forwards.values() for noise in forward.epsilon_B_C_T_H_W]
    assert len({float(noise.sum()) for noise in noises}) == 3 * (2 if is_same else 4)
    for noise in (forward.epsilon_B_C_T_H_W for forward in samples.forwards.values()):  # of two groups of two
        assert torch.equal(noise[::2], noise[1::2]) == is_same and not torch.equal(noise[0], noise[2])
    for k, forward in samples.forwards.items():
        assert torch.equal(forward.x0_B_C_T_H_W, samples.final)
        sigma = samples.levels[k]
        torch.testing.assert_close(forward.t_B, torch.full((4,), min(sigma / (1 + sigma), 0.999)))


def test_the_data_terms_noise_and_its_level_are_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each of two members at each of two steps, beside the order of the steps."""
    one, drawn, generator = model(data_beta=1.0, use_rl_sigma_and_noise=False), [], random.generator
    found = one.collect(batch(1))
    monkeypatch.setattr(random, "generator", lambda *what: drawn.append(what) or generator(*what))
    assert all(part.data is not None for part in one.minibatches(found, {})[1])
    assert len(set(drawn)) == len(drawn) == 2 * 2 * 2 + 1


@pytest.mark.parametrize("is_same", [True, False])
def test_each_step_of_each_member_draws_noise_of_its_own(is_same: bool) -> None:
    """Members of a group start at one noise by ``use_same_seed``."""
    one = model(use_same_seed=is_same)
    record = one.collect(batch(1)).record
    samples = record.samples
    path = chain_path(one.world, one.rl, *record.conditions_of(slice(0, 2)), samples.noise)
    drawn = [samples.noise[0]]
    for step in samples.kept.values():
        drawn += [*((step.x_next_B_C_T_H_W - step.mean_B_C_T_H_W) / judge(path, step).std)]
    assert torch.equal(*samples.noise) == is_same and len(drawn) == 1 + 2 * 2
    assert all((a - b).abs().max() > 0.1 for a, b in itertools.combinations(drawn, 2))


def shifted(one: FlowGRPOModel, by: float) -> None:
    with torch.no_grad():
        for weight in one.net.parameters():
            weight += by


def test_the_sampling_policy_follows_by_the_decay_of_its_update_and_is_saved() -> None:
    one = model(objective="nft", transition="ode", weight_copy_decay_type=1)
    name, weight = next(iter(one.net.named_parameters()))
    begun = weight.detach().clone()
    shifted(one, 1.0)
    with one.sampling_policy():
        torch.testing.assert_close(weight.detach(), begun)
    one.on_before_zero_grad(None, None, 99)
    decay = objectives.old_policy_decay(1, 100)
    expected = decay * begun + (1 - decay) * (begun + 1.0)
    torch.testing.assert_close(one.saved_weights()[f"net_old.{name}"], expected)
    with one.sampling_policy():
        torch.testing.assert_close(weight.detach(), expected)
    torch.testing.assert_close(weight.detach(), begun + 1.0)


@pytest.mark.parametrize(
    ("options", "is_kept"), [(dict(), False), (dict(kl_beta=0.1), True), (dict(on_policy=False), True)]
)
def test_a_reference_is_kept_and_saved_where_it_is_needed(options: dict[str, Any], is_kept: bool) -> None:
    """Clips of a run off policy are the reference's, which stay what they are while weights are trained."""
    one = model(**options)
    assert any(name.startswith("net_ref.") for name in one.saved_weights()) == is_kept
    before = clips_of(one.collect(batch(1)))
    shifted(one, 0.05)
    assert torch.equal(before, clips_of(one.collect(batch(1)))) == (options == dict(on_policy=False))


@pytest.mark.parametrize("transition", ["churn", "sde"])
def test_the_reference_judges_the_chain_that_was_rolled_out(transition: str) -> None:
    """The window decides at which levels churned states are: the reference of equal weights is at distance 0."""
    drawn = dict(transition=transition, noise_on_trained_steps_only=True, sample_steps=4, train_on=[0, 2])
    one = model(kl_beta=0.1, rollout_batch=1, **drawn)
    for is_near in (True, False):
        for step in one.collect(batch(1)).record.samples.kept.values():
            assert torch.equal(step.reference_mean_B_C_T_H_W, step.mean_B_C_T_H_W) == is_near
        shifted(one, 0.05)


@pytest.mark.parametrize(
    ("options", "predicts"),
    [
        (dict(), False),
        (dict(updates=2), True),
        (dict(minibatches=2), True),
        (dict(weight_copy_decay_type=1), True),
    ],
)
def test_a_sampling_policy_of_other_weights_predicts_also_before_the_first_update(
    options: dict[str, int], predicts: bool
) -> None:
    forwards = model(objective="nft", transition="ode", **options).collect(batch(1)).record.samples.forwards
    assert all((forward.v_old_B_C_T_H_W is not None) == predicts for forward in forwards.values())


def test_what_was_sampled_is_compared_by_the_weights_that_sampled() -> None:
    """In several updates old velocities are those of the sampling policy, references those of the reference."""
    options = dict(objective="nft", transition="ode", updates=2, kl_beta=0.1)
    one = model(weight_copy_decay_type=1, **options)
    begun = one.collect(batch(1)).record.samples.forwards
    shifted(one, 0.05)
    moved = one.collect(batch(1)).record.samples.forwards
    for k in begun:
        for name in ("v_old_B_C_T_H_W", "v_reference_B_C_T_H_W"):
            torch.testing.assert_close(getattr(moved[k], name), getattr(begun[k], name))
        assert torch.equal(begun[k].v_old_B_C_T_H_W, begun[k].v_reference_B_C_T_H_W)
