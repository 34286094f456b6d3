# SPDX-License-Identifier: Apache-2.0
"""Properties of chains, objectives and advantages that no golden value holds."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmos_predict2.diffusion.rectified_flow import karras_sigmas
from cosmos_predict2.diffusion.transitions import FLOW_KINDS, ChurnChain, FlowChain, log_ratio
from cosmos_predict2.rl import objectives
from cosmos_predict2.rl.clips.rollout import check_chain
from cosmos_predict2.rl.config import RLConfig, check_steps, reward_configs
from cosmos_predict2.rl.objectives import (
    NORMS,
    OBJECTIVES,
    FreshNoise,
    RatioStep,
    group_advantages,
    groups_within,
    has_spread,
    objective_of,
)
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.objectives import EDM
from imaginaire.errors import ConfigError

TIMES = (0.98, 0.8, 0.5, 0.2, 0.0)
SIGMAS = karras_sigmas(4, 0.01, 80).tolist()


@pytest.mark.parametrize("kind", FLOW_KINDS)
def test_a_known_clean_video_is_a_fixed_line_of_every_flow_chain(kind: str) -> None:
    """With the true estimate each mean lies on the way to it: at the last step it is reached."""
    chain = FlowChain(TIMES, kind, 0.5)
    x0, noise = torch.randn(2, 4, 3, 2, 2), torch.randn(2, 4, 3, 2, 2)
    last = chain.num_steps - 1
    y = (1 - TIMES[last]) * x0 + TIMES[last] * noise
    step = chain.step(last, y, x0, None)
    if kind in ("ode", "cps", "ddim"):  # the others have noise of their own at the last step
        torch.testing.assert_close(step.mean_B_C_T_H_W, x0, rtol=1e-5, atol=1e-5)
        assert not chain.is_stochastic(last)
    else:
        assert step.std > 0


def test_steps_outside_the_window_draw_nothing() -> None:
    flow, churn = FlowChain(TIMES, window=(1,)), ChurnChain(SIGMAS, window=(1,))
    assert [flow.is_stochastic(k) for k in range(4)] == [False, True, False, False]
    assert [churn.is_stochastic(k) for k in range(4)] == [False, True, False, False]
    x = torch.randn(1, 2, 2, 2, 2)
    ode = FlowChain(TIMES, "ode").step(0, x, 0.5 * x, None)
    assert torch.equal(flow.step(0, x, 0.5 * x, None).mean_B_C_T_H_W, ode.mean_B_C_T_H_W)


def test_the_log_ratio_is_the_difference_of_log_probabilities() -> None:
    chain = FlowChain(TIMES)
    y, x0, other = (torch.randn(3, 4, 2, 3, 3, dtype=torch.float64) for _ in range(3))
    old, new = chain.step(1, y, x0, None), chain.step(1, y, x0 + 0.01 * other, None)
    x_next = old.draw(torch.randn_like(y))
    ratio = log_ratio(x_next, new.mean_B_C_T_H_W, old.mean_B_C_T_H_W, old.std)
    torch.testing.assert_close(ratio, new.log_prob(x_next) - old.log_prob(x_next))
    assert torch.equal(log_ratio(x_next, old.mean_B_C_T_H_W, old.mean_B_C_T_H_W, old.std), torch.zeros(3).double())


def test_dppo_leaves_out_only_far_updates_that_lead_away() -> None:
    log_ratio_B = torch.tensor([0.1, 0.1, -0.1, -0.1, 0.1])
    advantage_B = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    drift_B = torch.tensor([1.0, 1.0, 1.0, 1.0, 1e-9])
    found = objectives.dppo(RatioStep(log_ratio_B, advantage_B, drift_B, 0.5, 1e-3))
    assert (found.loss_B != 0).tolist() == [False, True, True, False, True]


def test_the_deviation_is_that_of_the_valid_samples() -> None:
    rewards, valid = torch.tensor([[1.0, 3.0, 100.0, 2.0]]), torch.tensor([[True, True, False, True]])
    expected = torch.tensor([[-1.2247, 1.2247, 0.0, 0.0]])
    torch.testing.assert_close(group_advantages(rewards, valid), expected, rtol=1e-3, atol=1e-6)


def test_guard_clips_its_own_ratio_at_both_limits() -> None:
    """At equal log-probabilities the ratio is exp(std * drift / (2 std^2)): half above 1 here."""
    drift_B = torch.full((2,), 2 * 0.5 * math.log(1.5))
    for high, ratio in ((None, 1.1), (0.3, 1.3)):
        step = RatioStep(torch.zeros(2), torch.tensor([1.0, -1.0]), drift_B, 0.5, 0.1, dt=0.25, limit_high=high)
        found = objectives.guard(step)
        torch.testing.assert_close(found.loss_B, torch.tensor([-ratio, 1.5]) / 0.25)
        assert found.is_above_B.all() and not found.is_below_B.any()


def test_what_counts_as_clipped_is_beyond_the_limit_of_its_side() -> None:
    found = objectives.clipped(torch.tensor([1.25, 1.35, 0.85, 0.75]).log(), torch.ones(4), 0.2, 0.3)
    assert found.is_above_B.tolist() == [False, True, False, False]
    assert found.is_below_B.tolist() == [False, False, False, True]


def fresh_noise(v: torch.Tensor, **options: Any) -> FreshNoise:
    generator = torch.Generator().manual_seed(1)
    x0, epsilon, v_old = (torch.randn(v.shape, dtype=v.dtype, generator=generator) for _ in range(3))
    numbers: dict[str, Any] = dict(limit=0.2, beta=1.0, largest_advantage=5.0, of_clip=lambda mean_B: mean_B) | options
    t_B, advantage_B = torch.tensor([0.3, 0.6]).to(v), torch.tensor([2.0, -1.0]).to(v)
    return FreshNoise(x0, epsilon, t_B, v if v.requires_grad else v_old, v_old, advantage_B, **numbers)


def test_a_velocity_that_is_nearer_to_the_true_one_is_likelier_to_matching() -> None:
    """So it moves towards good samples and away from bad ones."""
    fresh = fresh_noise(torch.zeros(2, 3, 2, 2, 2))
    true = fresh.epsilon_B_C_T_H_W - fresh.x0_B_C_T_H_W
    v = fresh.v_old_B_C_T_H_W.clone().requires_grad_()
    found = objectives.awm(replace(fresh, v_B_C_T_H_W=v))
    assert torch.equal(found.ratio_B.detach(), torch.ones(2))
    (gradient,) = torch.autograd.grad(found.loss_B.sum(), v)
    along_good, along_bad = (gradient * (true - fresh.v_old_B_C_T_H_W)).flatten(1).sum(1)
    assert along_good < 0 < along_bad
    for share, is_likelier in ((0.1, True), (-0.1, False)):
        nearer = fresh.v_old_B_C_T_H_W + share * (true - fresh.v_old_B_C_T_H_W)
        ratio_B = OBJECTIVES["awm"].function(replace(fresh, v_B_C_T_H_W=nearer)).ratio_B
        assert ((ratio_B > 1) == is_likelier).all()


def test_how_far_nft_looks_ahead_does_not_change_where_it_goes() -> None:
    """Its gradient at the sampling policy is the same for every beta: the loss is divided by it."""
    gradients = []
    for beta in (0.5, 1.0, 2.0):
        fresh = fresh_noise(torch.zeros(2, 3, 2, 2, 2, dtype=torch.float64), beta=beta)
        v = fresh.v_old_B_C_T_H_W.clone().requires_grad_()
        loss = OBJECTIVES["nft"].function(replace(fresh, v_B_C_T_H_W=v)).loss_B.sum()
        gradients.append(torch.autograd.grad(loss, v)[0])
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[1:], gradients[:1] * 2)


@pytest.mark.parametrize("name", ["nft", "awm"])
def test_forward_objectives_are_of_whole_clips_where_a_rank_has_some_frames(name: str) -> None:
    """Two ranks with a frame each: their losses are that of both frames, and so is the sum of their gradients."""
    whole = fresh_noise(torch.randn(2, 3, 2, 2, 2, dtype=torch.float64).requires_grad_(), limit=9.0)
    expected = OBJECTIVES[name].function(whole).loss_B
    (gradient,) = torch.autograd.grad(expected.sum(), whole.v_B_C_T_H_W)
    parts = []
    for k in range(2):  # means over the frames of both, which the other rank's hold for this one as constants
        frames = {field: value[:, :, k : k + 1] for field, value in vars_of(whole).items()}
        others = {field: value[:, :, 1 - k : 2 - k].detach() for field, value in vars_of(whole).items()}
        parts.append((replace(whole, **frames), replace(whole, **others)))
    for k, (mine, other) in enumerate(parts):
        means: list[torch.Tensor] = []
        OBJECTIVES[name].function(replace(other, of_clip=lambda mean_B, means=means: means.append(mean_B) or mean_B))
        of_other = iter(means)
        of_both = replace(mine, of_clip=lambda mean_B, of_other=of_other: (mean_B + next(of_other).detach()) / 2)
        found = OBJECTIVES[name].function(of_both).loss_B
        torch.testing.assert_close(found, expected)
        (own,) = torch.autograd.grad(found.sum(), whole.v_B_C_T_H_W, retain_graph=True)
        torch.testing.assert_close(own[:, :, k], gradient[:, :, k])


def vars_of(fresh: FreshNoise) -> dict[str, torch.Tensor]:
    names = ("x0", "epsilon", "v", "v_old")
    return {f"{name}_B_C_T_H_W": getattr(fresh, f"{name}_B_C_T_H_W") for name in names}


def groups() -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and validity [6, 5]: of two groups all valid ones are alike, one has a single one and one has none."""
    generator = torch.Generator().manual_seed(0)
    rewards, valid = torch.randn(6, 5, generator=generator), torch.rand(6, 5, generator=generator) < 0.7
    rewards[0], rewards[1] = 0.1, -0.7
    valid[0], valid[1], valid[2], valid[3] = torch.arange(5) > 0, torch.arange(5) < 3, torch.arange(5) == 1, False
    return rewards, valid


def judged(rewards: torch.Tensor, valid: torch.Tensor, norm: str) -> list[torch.Tensor]:
    bounds = [groups_within(rewards, valid, **one) for one in ({}, dict(lower=-0.5, upper=0.5))]
    return [group_advantages(rewards, valid, norm=norm), has_spread(rewards, valid), *bounds]


@pytest.mark.parametrize("norm", NORMS)
def test_what_was_not_valid_may_be_any_number(norm: str) -> None:
    rewards, valid = groups()
    for other in (-1e6, 0.0, 1e6, torch.inf, torch.nan):
        changed = judged(torch.where(valid, rewards, other), valid, norm)
        for one, expected in zip(changed, judged(rewards, valid, norm), strict=True):
            assert torch.equal(one, expected)
    assert not group_advantages(rewards, valid, norm=norm)[:4].any()
    assert groups_within(rewards, valid).tolist() == [True, True, True, False, True, True]
    assert has_spread(rewards, valid).tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize("norm", [norm for norm in NORMS if norm != "dpo"])  # which takes the first of equals
def test_the_order_of_groups_and_of_their_members_does_not_matter(norm: str) -> None:
    rewards, valid = groups()
    rows, members = torch.tensor([3, 5, 0, 1, 4, 2]), torch.tensor([4, 0, 3, 1, 2])
    mixed = group_advantages(rewards[rows][:, members], valid[rows][:, members], norm=norm)
    torch.testing.assert_close(mixed, group_advantages(rewards, valid, norm=norm)[rows][:, members])


@pytest.mark.parametrize("norm", ["group", "global", "cosmos_rl", "sft", "dpo"])
def test_the_unit_of_a_reward_and_its_zero_do_not_matter(norm: str) -> None:
    rewards, valid = groups()
    found = group_advantages(100 * rewards - 30, valid, norm=norm)
    torch.testing.assert_close(found, group_advantages(rewards, valid, norm=norm), rtol=1e-3, atol=1e-5)
    assert found[4:].abs().max() > 0.5


def test_the_deviation_of_a_group_must_be_above_the_smallest() -> None:
    """Else it is amplified noise."""
    rewards, valid = torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.5, 0.5 + 1e-6]]), torch.ones(3, 2, dtype=torch.bool)
    assert group_advantages(rewards, valid, min_std=0.5).any(dim=1).tolist() == [False, True, False]
    assert has_spread(rewards, valid, 0.5).tolist() == [False, True, False]
    assert group_advantages(rewards, valid)[2].abs().max() > 1e-3


def test_a_group_that_is_all_alike_has_no_spread_whatever_its_mean_rounds_to() -> None:
    alike = -torch.rand(200, 1, generator=torch.Generator().manual_seed(0)).expand(200, 12)
    assert not group_advantages(alike, torch.ones(200, 12, dtype=torch.bool), epsilon=1e-6, correction=1).any()
    valid = torch.rand(200, 12, generator=torch.Generator().manual_seed(1)) < 0.8
    assert not has_spread(torch.where(valid, alike, -9.0), valid).any()


def test_normalisation_by_all_keeps_groups_comparable() -> None:
    """The deviation is that of all rewards, also of how far groups lie apart."""
    rewards, valid = torch.tensor([[0.0, 1.0], [20.0, 30.0]]), torch.ones(2, 2, dtype=torch.bool)
    found = group_advantages(rewards, valid, norm="global")
    torch.testing.assert_close(
        found, torch.tensor([[-0.5, 0.5], [-5.0, 5.0]]) / rewards.std(correction=0), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize(("name", "told"), [("grp", "grpo"), ("math:sqrt", "ratio_objective")])
def test_what_is_no_objective_is_named(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        objective_of(name)


COVERED: list[tuple[dict[str, Any], str | None]] = [
    (dict(objective="guard"), None),
    (dict(objective="guard", transition="dance"), None),
    (dict(objective="guard", transition="cps"), "transition"),
    (dict(objective="guard", transition="churn"), "transition"),
    (dict(objective="guard", ratio_normalisation="cosmos_rl"), "ratio_normalisation"),
    (dict(objective="dppo", ratio_normalisation="cosmos_rl"), "ratio_normalisation"),
    (dict(clip_ratio_high=0.1, dual_clip=3.0), None),
    (dict(objective="dppo", dual_clip=3.0), "dual_clip"),
    (dict(objective="nft", transition="ode", clip_ratio_high=0.1), "clip_ratio_high"),
    (dict(lower_bound=1.0, upper_bound=0.5), "lower_bound"),
    (dict(lower_bound=0.5, upper_bound=0.5), None),
    (dict(train_on=[0, 9]), None),
    (dict(train_on=[10]), "train_on"),
    (dict(train_on=[-2]), "train_on"),
    (dict(train_on=[3, 3]), "train_on"),
    *((dict(transition=kind, train_on=[9]), "train_on") for kind in ("cps", "ddim", "churn")),
    (dict(transition="dance", train_on=[9]), None),
    (dict(objective="nft", transition="ode", num_timesteps=10), None),
    (dict(objective="nft", transition="ode", num_timesteps=11), "num_timesteps"),
    (dict(transition="ode"), "transition"),
    (dict(train_on=[]), "train_on"),
    (dict(rewards=None), "rewards"),
    (dict(num_rollout=1), "num_rollout"),
    (dict(num_rollout=6, ranks_per_group=4), "ranks_per_group"),
    (dict(min_num_conditional_frames=2), "max_num_conditional_frames"),
    (dict(objective="nft", transition="ode", on_policy=False), "on_policy"),
    (dict(objective="nft", transition="ode"), None),
    (dict(objective="awm", transition="ode", use_same_seed=True), "use_same_seed"),
]


@pytest.mark.parametrize(("options", "field"), COVERED)
def test_what_an_objective_does_not_cover_is_refused(options: dict[str, Any], field: str | None) -> None:
    found = RLConfig(**{"rewards": dict(one=dict(make="some:reward")), **options}).problems()
    assert [name for name, _ in found] == ([] if field is None else [field])


@pytest.mark.parametrize(
    ("options", "teaches"),
    [
        (dict(), False),
        (dict(objective="dppo"), False),
        (dict(kl_beta=0.1), True),
        (dict(data_beta=0.1), True),
        (dict(exp_reward=True), True),
        (dict(objective="nft"), True),
        (dict(objective="awm"), True),
    ],
)
def test_what_else_than_an_advantage_teaches(options: dict[str, Any], teaches: bool) -> None:
    assert RLConfig(**options).teaches_without_advantage is teaches


def test_what_is_trained_of_each_sample_are_steps_or_levels() -> None:
    assert RLConfig(train_on=[0, 4, -1]).num_trained == 3
    assert RLConfig(objective="nft", num_timesteps=4).num_trained == 4
    assert RLConfig(objective="nft").num_trained == 10
    weights = dict(some=1.0, less=-0.5, none=0.0)
    made = {name: dict(make="some:reward", weight=weight) for name, weight in weights.items()}
    assert set(reward_configs(RLConfig(rewards=made | {"off": None}))) == {"some", "less"}


def test_an_argument_of_a_reward_beside_its_make_is_refused_with_its_place() -> None:
    cure = r"rewards\.some\.scale: .*those of its make: model\.config\.rl\.rewards\.some"
    with pytest.raises(ConfigError, match=cure):
        reward_configs(RLConfig(rewards={"some": dict(make="some:reward", scale=3)}))


@pytest.mark.parametrize(
    ("rl", "run", "key"),
    [
        (dict(), dict(), None),
        (dict(), dict(grad_accum_iter=6), "trainer.grad_accum_iter"),
        (dict(minibatches=2), dict(grad_accum_iter=6), None),
        (dict(minibatches=2, updates=3), dict(grad_accum_iter=6), "trainer.max_iter"),
        (dict(minibatches=3), dict(), "rl.minibatches"),
        (dict(rollout_batch=3), dict(), "rl.rollout_batch"),
        (dict(ranks_per_group=2), dict(grad_accum_iter=6), None),
        (dict(ranks_per_group=2), dict(grad_accum_iter=6, world_size=6), "rl.ranks_per_group"),
    ],
)
def test_updates_and_the_run_have_whole_experiences(rl: dict[str, int], run: dict[str, int], key: str | None) -> None:
    """Two conditions with four members each, in batches of two, at three steps; two processes share a clip."""
    given = SimpleNamespace(
        model_parallel=SimpleNamespace(context_parallel_size=2),
        dataloader_train=dict(batch_size=2),
        trainer=SimpleNamespace(grad_accum_iter=run.get("grad_accum_iter", 12), max_iter=16),
    )
    context: Any = SimpleNamespace(config=given, world_size=run.get("world_size", 8))
    options = dict(num_rollout=4, rollout_batch=2, train_on=[0, 2, -1]) | rl
    found = [finding.key.removeprefix("model.config.") for finding in check_steps(RLConfig(**options), context)]
    assert found == ([] if key is None else [key])


def test_members_start_apart_where_nothing_else_makes_them_differ() -> None:
    assert RLConfig().starts_alike and RLConfig(use_same_seed=True).starts_alike
    assert not RLConfig(objective="nft", transition="ode").starts_alike


def test_steps_without_noise_are_not_trained() -> None:
    objective, churn = EDM(Video2WorldPipelineConfig()), RLConfig(transition="churn", s_t_max=10.0)
    with pytest.raises(ConfigError, match=r"train_on: steps \[0, 1, 2\] of churn"):
        check_chain(objective, churn)
    churn.train_on = [6]
    check_chain(objective, churn)
    churn.train_on = [-1]
    with pytest.raises(ConfigError, match="train_on"):
        check_chain(objective, churn)


@pytest.mark.parametrize(
    ("limits", "advantage", "loss"),
    [({}, 1.0, -1.1), (dict(limit_high=0.5), 1.0, -1.5), (dict(dual_clip=2.0), -1.0, 2.0)],
)
def test_awm_clips_as_objectives_of_ratios_do(limits: dict[str, Any], advantage: float, loss: float) -> None:
    """A ratio of three with a limit of .1: the velocity is the target, so that the log-ratio is the old square."""
    zero, v_old = torch.zeros(1, 1, 1, 1, 1), torch.full((1, 1, 1, 1, 1), math.log(3) ** 0.5)
    given = (zero, zero, torch.tensor([0.5]), zero, v_old, torch.tensor([advantage]))
    fresh = FreshNoise(*given, limit=0.1, beta=1.0, largest_advantage=5.0, of_clip=lambda means: means, **limits)
    assert float(objective_of("awm").function(fresh).loss_B) == pytest.approx(loss, rel=1e-5)  # type: ignore[arg-type]
