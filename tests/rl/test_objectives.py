# SPDX-License-Identifier: Apache-2.0
"""Properties of chains, objectives and advantages that no golden value holds."""

from typing import Any

import pytest
import torch

from cosmos_predict2.diffusion.schedules import karras_sigmas
from cosmos_predict2.diffusion.transitions import FLOW_KINDS, ChurnChain, FlowChain, log_ratio
from cosmos_predict2.rl import objectives
from cosmos_predict2.rl.advantages import group_advantages, has_spread
from cosmos_predict2.rl.clips.rollout import check_chain
from cosmos_predict2.rl.config import RLConfig
from cosmos_predict2.rl.objectives import OBJECTIVES, RatioStep, objective_of
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


@pytest.mark.parametrize("kind", ["sde", "cps", "ddim"])
def test_the_noise_of_a_step_keeps_the_marginal_variance(kind: str) -> None:
    """Means and noise together have the variance of (1 - t) x_0 + t eps, up to the step's size."""
    times = torch.linspace(0.9, 0.0, 201).tolist()
    chain = FlowChain(times, kind, 0.5)
    x0, noise = torch.zeros(1, 1, 1, 300, 300), torch.randn(1, 1, 1, 300, 300)
    step = chain.step(50, times[50] * noise, x0, None)
    drawn = step.draw(torch.randn_like(noise))
    assert float(drawn.std()) == pytest.approx(times[51], rel=0.02)


def test_steps_outside_the_window_draw_nothing() -> None:
    flow, churn = FlowChain(TIMES, window=(1,)), ChurnChain(SIGMAS, window=(1,))
    assert [flow.is_stochastic(k) for k in range(4)] == [False, True, False, False]
    assert [churn.is_stochastic(k) for k in range(4)] == [False, True, False, False]
    x = torch.randn(1, 2, 2, 2, 2)
    ode = FlowChain(TIMES, "ode").step(0, x, 0.5 * x, None)
    assert torch.equal(flow.step(0, x, 0.5 * x, None).mean_B_C_T_H_W, ode.mean_B_C_T_H_W)


def test_the_last_step_of_churn_is_never_stochastic() -> None:
    chain = ChurnChain(SIGMAS)
    assert [chain.is_stochastic(k) for k in range(4)] == [True, True, True, False]
    assert chain.final_level == SIGMAS[-1]


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


def test_matching_moves_towards_good_samples_and_away_from_bad_ones() -> None:
    target, v_old = torch.randn(2, 3, 2, 2, 2), torch.randn(2, 3, 2, 2, 2)
    v = v_old.clone().requires_grad_()
    ratio = objectives.awm_log_ratio(v, v_old, target)
    assert torch.equal(ratio.detach(), torch.zeros(2))
    loss = objectives.clipped(ratio, torch.tensor([1.0, -1.0]), 0.2).loss_B.sum()
    (gradient,) = torch.autograd.grad(loss, v)
    along = (gradient * (target - v_old)).flatten(1).sum(1)
    assert along[0] < 0 < along[1]


def test_invalid_samples_are_left_out_and_not_filled_in() -> None:
    rewards = torch.tensor([[1.0, 3.0, 100.0, 2.0], [1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0]])
    valid = torch.tensor([[True, True, False, True], [True, False, False, False], [True] * 4])
    found = group_advantages(rewards, valid)
    torch.testing.assert_close(found[0, [0, 1, 3]], torch.tensor([-1.0, 1.0, 0.0]) * 1.2247, rtol=1e-3, atol=1e-6)
    assert found[0, 2] == 0
    assert torch.equal(found[1:], torch.zeros(2, 4))
    assert has_spread(rewards, valid).tolist() == [True, False, False]


def test_a_group_without_spread_is_not_amplified_noise() -> None:
    rewards = torch.tensor([[0.5, 0.5 + 1e-6]])
    valid = torch.ones(1, 2, dtype=torch.bool)
    assert group_advantages(rewards, valid).abs().max() > 1e-3
    assert group_advantages(rewards, valid, min_std=1e-4).abs().max() == 0


def test_a_group_that_is_all_alike_has_no_spread_whatever_its_mean_rounds_to() -> None:
    alike = -torch.rand(200, 1, generator=torch.Generator().manual_seed(0)).expand(200, 12)
    assert not group_advantages(alike, torch.ones(200, 12, dtype=torch.bool), epsilon=1e-6, correction=1).any()
    assert not has_spread(alike, torch.rand(200, 12) < 0.8).any()


def test_published_forms_of_rows() -> None:
    rewards, valid = torch.tensor([[0.0, 2.0, 9.0], [5.0, 1.0, 1.0]]), torch.tensor([[True, True, False], [True] * 3])
    assert group_advantages(rewards, valid, norm="sft").tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert group_advantages(rewards, valid, norm="dpo").tolist() == [[-1.0, 1.0, 0.0], [1.0, -1.0, 0.0]]
    filled = group_advantages(rewards, valid, norm="cosmos_rl")
    torch.testing.assert_close(filled[0], torch.tensor([-1.0, 1.0, 0.0]), rtol=1e-3, atol=1e-6)


def test_normalisation_by_all_keeps_groups_comparable() -> None:
    """The deviation is that of all rewards, also of how far groups lie apart."""
    rewards, valid = torch.tensor([[0.0, 1.0], [20.0, 30.0]]), torch.ones(2, 2, dtype=torch.bool)
    found = group_advantages(rewards, valid, norm="global")
    torch.testing.assert_close(
        found, torch.tensor([[-0.5, 0.5], [-5.0, 5.0]]) / rewards.std(correction=0), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize(
    ("name", "told"),
    [("grp", "grpo"), ("math:sqrt", "ratio_objective")],
)
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
    (dict(objective="nft", transition="ode"), None),
    (dict(objective="awm", transition="ode", use_same_seed=True), "use_same_seed"),
]


@pytest.mark.parametrize(("options", "field"), COVERED)
def test_what_an_objective_does_not_cover_is_refused(options: dict[str, Any], field: str | None) -> None:
    found = RLConfig(rewards=dict(one=dict(make="some:reward")), **options).problems()
    assert [name for name, _ in found] == ([] if field is None else [field])


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


def test_the_table_has_both_kinds() -> None:
    assert {name for name, one in OBJECTIVES.items() if one.is_ratio} == {"grpo", "guard", "dppo"}
