# SPDX-License-Identifier: Apache-2.0
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_predict2.rl.episodes.config import PolicyLossConfig, VLARLConfig
from cosmos_predict2.rl.episodes.decisions import policy_loss
from cosmos_predict2.rl.interfaces import DrawnStep, LogProb
from cosmos_predict2.rl.objectives import (
    Clipped,
    RatioStep,
    aggregate,
    at_level,
    clipped,
    groups_within,
    kl_estimate,
    ratio_objective,
    rows_of_actions,
)
from imaginaire.errors import ConfigError
from tests.rl.vla_runs import collected, experience


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_groups_are_kept_within_the_bounds() -> None:
    scores = torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0.5, 0.5, 0.5, 0.5]])
    everyone = torch.ones_like(scores, dtype=torch.bool)
    for options, kept in (
        (dict(lower=0.1, upper=0.9), [1, 2, 4]),
        (dict(), [0, 1, 2, 3, 4]),
        (dict(lower=0.25, upper=0.5), [1, 2, 4]),
    ):
        assert groups_within(scores, everyone, **options).nonzero().flatten().tolist() == kept


def test_a_row_counts_with_any_of_its_actions() -> None:
    valid = torch.tensor([[1] * 12, [1] * 4 + [0] * 8, [0] * 12], dtype=torch.bool)
    assert rows_of_actions(valid, 4).int().tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]


def test_levels_sum_what_was_executed() -> None:
    log_prob, rows = drawn(2, 4, 3), torch.tensor([[True] * 4, [True, True, False, False]])
    of_actions, _ = at_level(log_prob, rows, "action")
    torch.testing.assert_close(of_actions, log_prob.sum(2, keepdim=True))
    of_chunk, mask = at_level(log_prob, rows, "chunk")
    assert mask.all() and mask.shape == (2, 1, 1)
    torch.testing.assert_close(of_chunk.flatten(), torch.stack([log_prob[0].sum(), log_prob[1, :2].sum()]))
    for level, published in (("element", "token_level"), ("action", "action_level"), ("chunk", "chunk_level")):
        assert torch.equal(at_level(log_prob, rows, level)[0], at_level(log_prob, rows, published)[0])
    of_all, _ = at_level(log_prob, rows, "chunk_level", sums_unexecuted=True)
    torch.testing.assert_close(of_all.flatten(), log_prob.sum((1, 2)))


def options_of(**loss: Any) -> VLARLConfig:
    """Options of the loss, and of what clips have, too."""
    shared = {name: loss.pop(name) for name in list(loss) if hasattr(VLARLConfig(), name)}
    return VLARLConfig(loss=PolicyLossConfig(**loss), **shared)


def loss_of(ratio: float, advantage: float, **options: object) -> float:
    """The loss of one decision with one element."""
    new = torch.full((1, 1, 1), ratio, dtype=torch.float64).log()
    config = options_of(**options)
    valid = torch.ones(1, 1, dtype=torch.bool)
    return float(policy_loss(LogProb(new), torch.zeros_like(new), torch.tensor([advantage]), valid, config).loss)


def test_dppo_leaves_out_decisions_that_lead_further_away() -> None:
    """The divergence of a decision is estimated from its draw: ratio - 1 - log ratio, 0.17 at 1.7 and 0.06 at 1.4; the
    other way round it would be 0.12 at 1.7."""
    ratio = torch.tensor([1.7, 1.4, 1.7], dtype=torch.float64)
    new = ratio.log()[:, None, None].requires_grad_()
    advantage, valid = torch.tensor([1.0, 1.0, -1.0]), torch.ones(3, 1, dtype=torch.bool)
    rl = options_of(clip_ratio=0.15, objective="dppo")
    loss = policy_loss(LogProb(new), torch.zeros_like(new), advantage, valid, rl).loss
    (gradient,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(gradient.flatten() * 3, torch.tensor([0.0, -1.4, 1.7], dtype=torch.float64))


@pytest.mark.parametrize("level", ["element", "action", "chunk"])
def test_guard_weighs_decisions_by_the_noise_and_the_length_of_their_steps(level: str) -> None:
    """exp(std (log ratio + drift / (2 std^2))), clipped, over the length, as `objectives.guard` has it of clips."""
    new, old, advantage, valid = case()
    stds, lengths = torch.linspace(0.1, 0.6, 6).double(), torch.linspace(0.1, 0.2, 6).double()
    step, old_mean = DrawnStep(drawn(6, 4, 2, seed=3), stds, lengths), drawn(6, 4, 2)
    rl = options_of(objective="guard", ratio_level=level, clip_ratio=0.05, clip_ratio_high=0.1)
    found = policy_loss(LogProb(new, step=step), old, advantage, valid, rl, old_mean_B_K_N=old_mean)
    rows = rows_of_actions(valid, 4)
    (log_ratio, counts), (drift, _) = (at_level(x, rows, level) for x in (new - old, (step.mean_B_K_N - old_mean) ** 2))
    std, dt = stds[:, None, None], lengths[:, None, None]
    ratio = (std * log_ratio + drift / (2 * std)).exp()
    loss = torch.maximum(*(-advantage[:, None, None] * x for x in (ratio, ratio.clamp(0.95, 1.1)))) / dt
    torch.testing.assert_close(found.loss, loss[counts.expand_as(loss)].mean())
    with pytest.raises(ConfigError, match=r"objective=guard.*noise_method=flow_sde"):
        policy_loss(LogProb(new), old, advantage, valid, rl)


@ratio_objective
def double(step: RatioStep) -> Clipped:
    return clipped(step.log_ratio_B, 2 * step.advantage_B, step.limit)


def test_a_policy_learns_by_an_objective_of_ones_own() -> None:
    """It may teach by decisions without an advantage: all are computed."""
    losses = []
    for objective in ("grpo", f"{__name__}:double"):
        one, played = collected(objective=objective)
        (part,) = experience(one, played, torch.tensor([[2.0, 0.0, 0.0, 0.0], [0.0] * 4, [0.0] * 4]))
        losses.append(one.training_step(part, 0)[1].item())
        assert len(part.advantage_B) == (2 if objective == "grpo" else 24)
    assert losses[1] == pytest.approx(2 * losses[0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.25, 1, -1.25), (1.5, 1, -1.28), (0.5, 1, -0.5), (0.5, -1, 0.8), (1.5, -2, 3.0), (5.0, -2, 10.0)],
)
def test_the_clip_is_asymmetric(ratio: float, advantage: float, expected: float) -> None:
    """The dual clip bounds what a bad draw costs by that many times its advantage."""
    assert loss_of(ratio, advantage) == pytest.approx(expected)
    assert loss_of(ratio, advantage, dual_clip=3.0) == pytest.approx(min(expected, 3 * abs(advantage)))


def case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New and old log-probabilities [6, 4, 2], advantages and executed actions of two decisions in 3 environments."""
    new, old = drawn(6, 4, 2, seed=seed), drawn(6, 4, 2, seed=seed + 1)
    valid = torch.ones(6, 12, dtype=torch.bool)
    valid[3, 5:] = False
    valid[4] = False
    return 0.2 * new, 0.2 * old, torch.tensor([1.0, -1.0, 0.5]).repeat(2).double(), valid


@pytest.mark.parametrize("level", ["element", "action", "chunk"])
def test_what_was_not_executed_has_no_gradient(level: str) -> None:
    new, old, advantage, valid = case()
    new.requires_grad_()
    policy_loss(LogProb(new), old, advantage, valid, options_of(ratio_level=level, kl_beta=0.1),
                reference_B_K_N=old + 0.1).loss.backward()  # fmt: skip
    has_gradient = new.grad.ne(0).any(dim=2)
    assert not has_gradient[4].any() and has_gradient[3].tolist() == [True, True, False, False]
    assert new.grad.isfinite().all()


def test_an_action_that_is_not_executed_may_hold_anything() -> None:
    new, old, advantage, valid = case()
    clean = policy_loss(LogProb(new), old, advantage, valid, options_of()).loss
    new[4] = float("inf")
    old[3, 2:] = -float("inf")
    new = new.requires_grad_()
    dirty = policy_loss(LogProb(new), old, advantage, valid, options_of()).loss
    dirty.backward()
    assert torch.equal(clean, dirty) and new.grad.isfinite().all()


@pytest.mark.parametrize("sums_unexecuted", [False, True])
def test_a_chunks_ratio_may_count_what_was_not_executed_as_published(sums_unexecuted: bool) -> None:
    new, old, advantage, valid = case()
    config = options_of(ratio_level="chunk", sums_unexecuted=sums_unexecuted, kl_beta=0.1, kl_kind="k1")
    watched = policy_loss(LogProb(new), old, advantage, valid, config, reference_B_K_N=new - 0.1).watched
    rows = torch.ones(6, 4, dtype=torch.bool) if sums_unexecuted else rows_of_actions(valid, 4)
    ratio = ((new - old) * rows[..., None]).sum(dim=(1, 2)).exp()[[0, 1, 2, 3, 5]]  # of the fifth nothing was executed
    for name, value in dict(min=ratio.min(), max=ratio.max(), mean=ratio.mean()).items():
        torch.testing.assert_close(watched[f"ratio_{name}"], value)
    of_reference = 0.1 * 2 * rows.sum(dim=1)[[0, 1, 2, 3, 5]]
    torch.testing.assert_close(watched["kl_to_reference"], of_reference.to(new).mean())


def test_what_is_watched_is_of_what_was_executed() -> None:
    """Ratios 1.5, 0.5, 4 and 4, of which the last was not executed; advantages are 1, -1, -1 and -1."""
    ratio, advantage = torch.tensor([1.5, 0.5, 4.0, 4.0]).double(), torch.tensor([1.0, -1.0, -1.0, -1.0])
    new, entropy = ratio.log()[:, None, None], torch.tensor([1.0, 2.0, 6.0, 900.0])[:, None, None]
    valid = torch.tensor([True, True, True, False])[:, None]
    config = options_of(dual_clip=3.0, entropy_bonus=0.5)
    found = policy_loss(LogProb(new, entropy), torch.zeros_like(new), advantage, valid, config)
    watched = {name: float(value) for name, value in found.watched.items()}
    assert watched == pytest.approx(
        dict(
            policy_loss=(-1.28 + 0.8 + 3.0) / 3,
            clip_fraction=2 / 3,  # the good one above, the bad one below
            approx_kl=-math.log(1.5 * 0.5 * 4) / 3,
            ratio_mean=2.0,
            ratio_min=0.5,
            ratio_max=4.0,
            dual_clip_fraction=1 / 3,
            entropy=3.0,
        )
    )
    assert float(found.loss) == pytest.approx(watched["policy_loss"] - 0.5 * 3.0)


def test_a_decision_that_is_far_off_has_a_finite_ratio() -> None:
    far, valid = torch.tensor([500.0, -500.0]).double()[:, None, None], torch.ones(2, 1, dtype=torch.bool)
    config = options_of(largest_log_ratio=2.0)
    watched = policy_loss(LogProb(far), torch.zeros_like(far), torch.ones(2), valid, config).watched
    assert (float(watched["ratio_max"]), float(watched["ratio_min"])) == pytest.approx((math.exp(2), math.exp(-2)))


def test_on_fresh_weights_the_gradient_is_that_of_reinforce() -> None:
    _, old, advantage, valid = case()
    new = old.clone().requires_grad_()
    found = policy_loss(LogProb(new), old, advantage, valid, options_of())
    found.loss.backward()
    rows = rows_of_actions(valid, 4)
    expected = -(advantage[:, None] * rows / rows.any(dim=1).sum())[..., None].expand_as(old)
    torch.testing.assert_close(new.grad, expected)
    assert found.watched["ratio_min"] == found.watched["ratio_max"] == found.watched["ratio_mean"] == 1
    assert found.watched["clip_fraction"] == found.watched["approx_kl"] == 0


def test_aggregations() -> None:
    value, mask = drawn(6, 4, 2), rows_of_actions(case()[3], 4)[..., None]
    counted = value * mask
    count, rows = 2 * mask.sum(), mask.sum()
    torch.testing.assert_close(aggregate(value, mask, "element-mean"), counted.sum() / count)
    torch.testing.assert_close(aggregate(value, mask, "token-mean"), counted.sum() / rows)
    whole = torch.full((6,), int(count))  # of all six, as of one slice
    torch.testing.assert_close(aggregate(value, mask, "slice-mean", whole, 3), counted.sum() / count / 3)
    of_episode = (2 * mask.sum(dim=(1, 2))).unflatten(0, (2, 3)).sum(0).repeat(2)
    own = counted.sum((1, 2)).unflatten(0, (2, 3)).sum(0) / of_episode[:3]
    torch.testing.assert_close(aggregate(value, mask, "episode-mean", of_episode, 3), own.mean())
    parts = [aggregate(value[i::2], mask[i::2], "episode-mean", of_episode[i::2], 3) for i in range(2)]
    torch.testing.assert_close(sum(parts), own.mean())
    steps = aggregate(value, mask, "token-mean-of-steps", of_episode, value.numel() / 8)
    torch.testing.assert_close(steps, (counted * 8 / of_episode[:, None, None]).mean())
    nothing = torch.zeros_like(mask)
    assert aggregate(value, nothing, "element-mean") == 0 == aggregate(value, nothing, "token-mean")


def test_entropy_and_distance_to_the_reference_are_added() -> None:
    new, old, advantage, valid = case()
    entropy = torch.full_like(new, 1.5)
    plain = policy_loss(LogProb(new, entropy), old, advantage, valid, options_of(ratio_level="action"))
    config = options_of(ratio_level="action", entropy_bonus=0.1, kl_beta=0.5, kl_kind="k2")
    found = policy_loss(LogProb(new, entropy), old, advantage, valid, config, reference_B_K_N=new + 0.1)
    torch.testing.assert_close(found.loss, plain.loss - 0.15 + 0.5 * 0.5 * 0.2**2)
    for kind in ("k1", "k2", "k3"):
        assert kl_estimate(torch.zeros(2), kind).abs().max() == 0
    torch.testing.assert_close(kl_estimate(torch.tensor(0.5), "k3"), torch.tensor(0.5).exp() - 1.5)
    far = torch.tensor([-100.0, 2.0, 100.0])  # as published: at most 10, and finite
    torch.testing.assert_close(kl_estimate(far, "k3"), torch.tensor([10.0, math.exp(2) - 3, 10.0]))
    far.requires_grad_()
    (gradient,) = torch.autograd.grad(kl_estimate(far, "k3").sum(), far)
    torch.testing.assert_close(gradient, torch.tensor([0.0, math.exp(2) - 1, 0.0]))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (dict(ratio_level="word"), "ratio_level='word'"),
        (dict(clip_ratio_high=0.0), "clip_ratio_high=0.0"),
        (dict(dual_clip=1.0), "dual_clip=1.0"),
        (dict(aggregation="sum"), "aggregation='sum'"),
        (dict(aggregation="token-mean-of-steps"), "max_episode_steps=null"),
        (dict(entropy_bonus=0.1), "entropy_bonus=0.1"),
        (dict(kl_beta=0.1), "kl_beta=0.1"),
        (dict(aggregation="episode-mean"), "aggregation=episode-mean needs episode_sum_B"),
    ],
)
def test_what_does_not_fit_is_named(options: dict, named: str) -> None:
    new, old, advantage, valid = case()
    with pytest.raises(ConfigError, match=named):
        policy_loss(LogProb(new), old, advantage, valid, options_of(**options))
