# SPDX-License-Identifier: Apache-2.0
"""Rewards to advantages, and advantages to losses: the objectives of reinforcement learning, as pure functions.

Groups are rows, [N, G]. Invalid samples are excluded from means and deviations, and have advantage 0.

A ratio objective ("grpo", "guard", "dppo") takes the log-ratio of new to old probability: of a stochastic step of a
world model's sampler, or of a policy's decision. A forward-process objective ("nft", "awm") takes predictions at
generated clips, or executed actions, with fresh noise, whatever sampler made them. Advantages are clamped by the
caller.

# my_objectives.py:  model.config.rl.objective=my_objectives:better_or_worse
@ratio_objective
def better_or_worse(step: RatioStep) -> Clipped:
    return clipped(step.log_ratio_B, step.advantage_B.sign(), step.limit)

Letters: B clips, or decisions, of which K rows stand for their actions and N are a row's elements; K' and N' are what
the level of a ratio leaves of them. Of decisions, what is called _B below is [B, K', N'].
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from imaginaire.buildable import resolve, shipped
from imaginaire.config.schema import Section, above, at_least, one_of
from imaginaire.errors import ConfigError

EPSILON = 1e-4  # beside the standard deviation
NORMS = ("group", "global", "none", "cosmos_rl", "sft", "dpo")


@attrs.define(kw_only=True, slots=False)
class GroupAdvantageConfig(Section):
    """Advantages from the rewards of a group, (r - mean) / (std + epsilon)."""

    norm: str = attrs.field(default="group", validator=one_of(*NORMS))
    adv_clip_max: Any = attrs.field(default=None, validator=above(0))  # null: no limit
    min_std: float = attrs.field(default=0.0, validator=at_least(0))  # groups with no more spread teach nothing
    epsilon: float = attrs.field(default=EPSILON, validator=above(0))
    correction: int = attrs.field(default=0, validator=at_least(0, at_most=1))  # the deviation divides by n less this

    def of(self, rewards_N_G: Tensor, is_valid_N_G: Tensor) -> Tensor:
        """`group_advantages` by these options, without the limit."""
        numbers = dict(min_std=self.min_std, epsilon=self.epsilon, correction=self.correction)
        return group_advantages(rewards_N_G, is_valid_N_G, norm=self.norm, **numbers)  # type: ignore[arg-type]

    def limited(self, advantage: Tensor) -> Tensor:
        return advantage if self.adv_clip_max is None else advantage.clamp(-self.adv_clip_max, self.adv_clip_max)


OF_RECORDINGS: Mapping[str, Any] = dict(epsilon=0.05, correction=1)  # where a reward values what is imagined


@attrs.define(kw_only=True, slots=False)
class AdvantageConfig(GroupAdvantageConfig):
    """The same of several rewards."""

    adv_clip_max: float = attrs.field(default=5.0, validator=above(0))
    min_std: float = attrs.field(default=1e-6, validator=at_least(0))
    each_reward: bool = True  # normalise each reward, then weight; else weight, then normalise


def group_advantages(
    rewards_N_G: Tensor,
    is_valid_N_G: Tensor,
    *,
    norm: str = "group",
    min_std: float = 0.0,
    epsilon: float = EPSILON,
    correction: int = 0,
) -> Tensor:
    """(r - mean) / (std + epsilon) within each row; ``correction`` 1 divides by n - 1 in the deviation.

    ``norm`` "group" divides by the deviation of the row, "global" by that of all valid samples, "none" by 1. A row with
    fewer than two valid samples, with samples that are all equal (whatever their mean rounds to), or whose deviation is
    not above ``min_std``, gives zeros instead of amplified noise.
    Published forms: "cosmos_rl" (`filled_in`), "sft" (1 for each best) and "dpo" (1 for the first best, -1 for the
    first worst).
    """
    valid = is_valid_N_G.to(rewards_N_G.dtype)
    rewards = torch.where(is_valid_N_G, rewards_N_G, 0.0)
    count_N_1 = valid.sum(dim=1, keepdim=True)
    centred = (rewards - rewards.sum(dim=1, keepdim=True) / count_N_1.clamp(min=1)) * valid
    std_N_1 = (centred.square().sum(dim=1, keepdim=True) / (count_N_1 - correction).clamp(min=1)).sqrt()
    ranked_N_G = rewards_N_G.masked_fill(~is_valid_N_G, -torch.inf)
    highest_N_1 = ranked_N_G.amax(dim=1, keepdim=True)
    differs_N_1 = (is_valid_N_G & (rewards_N_G < highest_N_1)).any(dim=1, keepdim=True)
    counts = differs_N_1 & (std_N_1 > min_std)
    if norm == "group":
        centred = centred / (std_N_1 + epsilon)
    elif norm == "global":
        of_all = rewards[is_valid_N_G]
        centred = centred / (of_all.std(correction=correction) + epsilon) if len(of_all) else centred
    elif norm == "cosmos_rl":
        centred = torch.stack([filled_in(*row)[1] for row in zip(rewards_N_G, is_valid_N_G, strict=True)])
    elif norm == "sft":
        centred = (is_valid_N_G & (rewards_N_G == highest_N_1)).to(rewards.dtype)
    elif norm == "dpo":
        worst_N_1 = rewards_N_G.masked_fill(~is_valid_N_G, torch.inf).argmin(dim=1, keepdim=True)
        best_N_1 = ranked_N_G.argmax(dim=1, keepdim=True)
        centred = torch.zeros_like(rewards).scatter(1, best_N_1, 1.0).scatter(1, worst_N_1, -1.0)
    else:
        assert norm == "none", norm
    return torch.where(counts, centred, 0.0)


def chosen(
    kind: str, rewards_N_G: Tensor, is_valid_N_G: Tensor, generators: Sequence[torch.Generator], min_std: float = 0.0
) -> Tensor:
    """1 for one valid sample of each row, the first "best" one or a "random" one, which its generator draws; 0 for the
    others, and in rows without spread, of which none is better."""
    score_N_G = rewards_N_G
    if kind == "random":
        size = rewards_N_G.shape[1]
        score_N_G = torch.stack([torch.rand(size, generator=each) for each in generators]).to(rewards_N_G)
    one_N_1 = score_N_G.masked_fill(~is_valid_N_G, -torch.inf).argmax(dim=1, keepdim=True)
    weights_N_G = torch.zeros_like(rewards_N_G).scatter(1, one_N_1, 1.0)
    return weights_N_G * has_spread(rewards_N_G, is_valid_N_G, min_std)[:, None]


def has_spread(rewards_N_G: Tensor, is_valid_N_G: Tensor, min_std: float = 0.0) -> Tensor:
    """The rows with an advantage that is not 0, [N]."""
    return group_advantages(rewards_N_G, is_valid_N_G, norm="none", min_std=min_std).ne(0).any(dim=1)


def groups_within(
    rewards_N_G: Tensor, is_valid_N_G: Tensor, *, lower: float | None = None, upper: float | None = None
) -> Tensor:
    """Dynamic sampling (DAPO): the groups with a mean reward in the bounds, both included, [N].

    As of the published filter, groups that are all alike are among them; their advantages are 0.
    """
    count_N = is_valid_N_G.sum(dim=1)
    mean_N = torch.where(is_valid_N_G, rewards_N_G, 0.0).sum(dim=1) / count_N.clamp(min=1)
    is_kept_N = count_N > 0
    if lower is not None:
        is_kept_N &= mean_N >= lower
    if upper is not None:
        is_kept_N &= mean_N <= upper
    return is_kept_N


def filled_in(rewards_G: Tensor, is_valid_G: Tensor) -> tuple[Tensor, Tensor]:
    """The published treatment of one group: invalid rewards become the mean of the valid ones, and the advantage is
    divided by the unbiased deviation of all; a group of one keeps its reward."""
    mean_valid = rewards_G[is_valid_G].mean() if is_valid_G.any() else rewards_G.new_zeros(())
    filled = torch.where(is_valid_G, rewards_G, mean_valid)
    if len(filled) == 1:
        return filled, filled
    return filled, (filled - filled.mean()) / (filled.std() + EPSILON)


SMALLEST_ERROR = 1e-5  # nft divides by a sample's error
SMALLEST_TIME = 1e-3  # forward-process objectives divide by nothing, but a sample without noise teaches nothing
LARGEST_ADVANTAGE = 5.0  # of nft by default, as published
# What one ratio of a decision stands for, and the published name of that.
RATIO_LEVELS = {"element": "token_level", "action": "action_level", "chunk": "chunk_level"}
OF_EPISODES = ("episode-mean", "slice-mean", "token-mean-of-steps")  # aggregations that need whole episodes
AGGREGATIONS = ("element-mean", "token-mean", *OF_EPISODES)
KL_KINDS = ("k1", "k2", "k3")
LARGEST_D, LARGEST_K3 = 20.0, 10.0  # as published


@dataclass(frozen=True, slots=True)
class Clipped:
    """Losses of a ratio objective and what to watch, each [B]."""

    loss_B: Tensor
    ratio_B: Tensor
    is_above_B: Tensor  # ratios above 1 + clip
    is_below_B: Tensor


@dataclass(frozen=True, slots=True)
class RatioStep:
    """Some stochastic steps, or decisions, judged again: the log-ratio of new to old probability, and the drift.

    ``mean_drift_B`` is the mean of (mean - old mean)^2, ``std`` the step's standard deviation, ``dt`` how far its level
    falls (a flow time; of churn a noise level). Of a decision they are sums at the level of its ratio where the
    objective needs a step; else the divergence is estimated from its draw, and stands there as a drift with a deviation
    of 1. The ratio is clipped at 1 - ``limit`` and 1 + ``limit_high`` (the same
    where it is None), the loss at ``dual_clip`` times the advantage.
    """

    log_ratio_B: Tensor
    advantage_B: Tensor
    mean_drift_B: Tensor
    std: float | Tensor
    limit: float
    dt: float | Tensor = 1.0
    limit_high: float | None = None
    dual_clip: float | None = None


@dataclass(frozen=True, slots=True)
class FreshNoise:
    """Generated clips with fresh noise at times t, and the velocities there: the network's, and that which sampled.

    Under context parallelism frames are this rank's; ``of_clip`` takes means over them, [B], to those of whole clips.
    Of policies what is called _B_C_T_H_W is [B, K, N], a decision at one of its times. Actions that were not executed
    are 0 in all tensors, and ``of_clip`` takes means over all to means over those that were.
    """

    x0_B_C_T_H_W: Tensor
    epsilon_B_C_T_H_W: Tensor
    t_B: Tensor
    v_B_C_T_H_W: Tensor
    v_old_B_C_T_H_W: Tensor
    advantage_B: Tensor
    limit: float  # rl.clip_ratio
    beta: float  # rl.nft_beta
    largest_advantage: float
    of_clip: Callable[[Tensor], Tensor]
    limit_high: float | None = None
    dual_clip: float | None = None


@dataclass(frozen=True, slots=True)
class WithoutRatio:
    """Losses of a forward-process objective that has no ratios [B], and what to log."""

    loss_B: Tensor
    watched: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """``function`` of a `RatioStep`, or of `FreshNoise`. ``needs_step``: noise and length of a sampler's step.

    ``imitates``: the advantage of one episode of a group is 1, and 0 of the others; of the "best" one, or of a "random"
    one, by which cloning the best is compared with cloning more.
    """

    function: Callable[[Any], Any]
    is_ratio: bool
    needs_step: bool = False
    imitates: Literal["", "best", "random"] = ""


def ratio_objective(function: Callable[[RatioStep], Clipped]) -> Objective:
    return Objective(function, is_ratio=True)


def forward_objective(function: Callable[[FreshNoise], Clipped | WithoutRatio]) -> Objective:
    return Objective(function, is_ratio=False)


# --- formulas


def clipped(
    log_ratio_B: Tensor,
    advantage_B: Tensor,
    clip: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
) -> Clipped:
    """max(-A rho, -A clip(rho, 1 - c, 1 + c)) (PPO's clipped surrogate, negated).

    Upwards the limit is ``clip_high`` if it is given (DAPO). ``dual_clip`` bounds the loss by that many times |A|.
    """
    high = clip if clip_high is None else clip_high
    ratio = log_ratio_B.exp()
    loss = torch.maximum(-advantage_B * ratio, -advantage_B * ratio.clamp(1 - clip, 1 + high))
    if dual_clip is not None:
        loss = torch.minimum(loss, dual_clip * advantage_B.abs())
    return Clipped(loss, ratio, ratio - 1 > high, 1 - ratio > clip)


def gaussian_kl(mean_drift_B: Tensor, std: float | Tensor) -> Tensor:
    """The mean over the elements of KL(N(mean, std) | N(other, std)), of ``mean_drift`` between the two."""
    return mean_drift_B / (2 * std**2)


def grpo(step: RatioStep) -> Clipped:
    return clipped(step.log_ratio_B, step.advantage_B, step.limit, step.limit_high, step.dual_clip)


def guard(step: RatioStep) -> Clipped:
    """GRPO-Guard: ratios exp(q (l - l_old + b)), clipped, and the loss divided by dt, so that all steps weigh alike.

    b is the expected decrease, drift / (2 q^2), and q the diffusion coefficient times sqrt(dt): the standard deviation.
    """
    guarded_B = step.std * (step.log_ratio_B + gaussian_kl(step.mean_drift_B, step.std))
    found = clipped(guarded_B, step.advantage_B, step.limit, step.limit_high, step.dual_clip)
    return replace(found, loss_B=found.loss_B / step.dt)


def dppo(step: RatioStep) -> Clipped:
    """Flow-DPPO: no clipping; updates that lead further away are left out where the KL divergence is over a limit."""
    ratio, advantage_B = step.log_ratio_B.exp(), step.advantage_B
    is_far = gaussian_kl(step.mean_drift_B, step.std) > step.limit
    leads_away = torch.where(advantage_B > 0, ratio > 1, ratio < 1)
    counted = (~(is_far & leads_away)).to(ratio.dtype).detach()
    return Clipped(-advantage_B * ratio * counted, ratio, is_far & (ratio > 1), is_far & (ratio < 1))


def imitation(step: RatioStep) -> Clipped:
    """-A log rho, whose gradient is that of -A log pi: what has an advantage becomes likelier, without a limit."""
    none = torch.zeros_like(step.log_ratio_B, dtype=torch.bool)
    return Clipped(-step.advantage_B * step.log_ratio_B, step.log_ratio_B.exp(), none, none)


def noised(x0: Tensor, epsilon: Tensor, t_B: Tensor) -> Tensor:
    """(1 - t) x_0 + t eps."""
    t = t_B.reshape(-1, *[1] * (x0.dim() - 1)).to(x0)
    return (1 - t) * x0 + t * epsilon


def nft(fresh: FreshNoise) -> WithoutRatio:
    """DiffusionNFT: the prediction is drawn towards good samples, and its mirror image towards bad ones.

    v+ = b v + (1 - b) v_old, v- = (1 + b) v_old - b v; their errors of x_0, each divided by its own size, are weighted
    by the share q and 1 - q.
    """
    x0, t_B, beta, largest = fresh.x0_B_C_T_H_W, fresh.t_B, fresh.beta, fresh.largest_advantage
    v, v_old, of_clip = fresh.v_B_C_T_H_W, fresh.v_old_B_C_T_H_W, fresh.of_clip
    y_t, t = noised(x0, fresh.epsilon_B_C_T_H_W, t_B), t_B.reshape(-1, *[1] * (x0.dim() - 1))

    def relative_error(velocity: Tensor) -> Tensor:
        error = y_t - t * velocity - x0
        with torch.no_grad():
            size = of_clip(error.double().abs().flatten(1).mean(dim=1)).clamp(min=SMALLEST_ERROR).to(error.dtype)
        return of_clip(error.square().flatten(1).mean(dim=1)) / size

    positive = relative_error(beta * v + (1 - beta) * v_old)
    negative = relative_error((1 + beta) * v_old - beta * v)
    share = (fresh.advantage_B.clamp(-largest, largest) / (2 * largest) + 0.5).clamp(0, 1)  # how far it counts as good
    return WithoutRatio(largest * (share * positive + (1 - share) * negative) / beta, {"good_share": share.mean()})


def awm(fresh: FreshNoise) -> Clipped:
    """Advantage-weighted matching: the error of the velocity stands for the log-probability."""
    v, v_old, target = fresh.v_B_C_T_H_W, fresh.v_old_B_C_T_H_W, fresh.epsilon_B_C_T_H_W - fresh.x0_B_C_T_H_W
    log_ratio_B = fresh.of_clip(((v_old - v) * (v_old + v - 2 * target)).flatten(1).mean(dim=1))
    return clipped(log_ratio_B, fresh.advantage_B, fresh.limit, fresh.limit_high, fresh.dual_clip)


def mean_drift(mean: Tensor, other: Tensor) -> Tensor:
    """The mean over the elements of (mean - other)^2, [B]: in place of a KL divergence where it is not scaled."""
    return (mean - other).square().flatten(1).mean(dim=1)


def approximate_kl(log_ratio_B: Tensor) -> Tensor:
    """Half the mean square of the log-ratio, as Flow-GRPO reports it."""
    return 0.5 * log_ratio_B.square().mean()


def old_policy_decay(kind: int, updates: int) -> float:
    """Share of the sampling policy that stays at an update (DiffusionNFT's ``weight_copy_decay_type``)."""
    if kind == 0:
        return 0.0
    if kind == 1:
        return min(0.001 * updates, 0.5)
    assert kind == 2, kind
    return 0.0 if updates < 75 else min(0.0075 * (updates - 75), 0.999)


# --- levels of a ratio, and means over what counts


def rows_of_actions(valid_B_A: Tensor, rows: int) -> Tensor:
    """The rows that count, bool [B, K]: those with an action that does."""
    return valid_B_A.unflatten(1, (rows, -1)).any(dim=2)


def at_level(
    log_prob_B_K_N: Tensor, rows_B_K: Tensor, level: str, sums_unexecuted: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities at the level of the ratio and which of them count, [B, K', N'] and [B, K', 1].

    "element" leaves them, "action" adds up each row, "chunk" the whole decision: of the rows that count, or with
    ``sums_unexecuted`` of all.
    """
    rows_B_K_1 = rows_B_K[..., None]
    level = level_of(level)
    if level == "element":
        return log_prob_B_K_N, rows_B_K_1
    log_prob_B_K_1 = log_prob_B_K_N.sum(dim=2, keepdim=True)
    if level == "action":
        return log_prob_B_K_1, rows_B_K_1
    assert level == "chunk", level
    counted = log_prob_B_K_1 if sums_unexecuted else torch.where(rows_B_K_1, log_prob_B_K_1, 0.0)
    return counted.sum(dim=1, keepdim=True), rows_B_K_1.any(dim=1, keepdim=True)


def level_of(name: str) -> str:
    """ "element", "action" or "chunk", also of a published name."""
    return {published: own for own, published in RATIO_LEVELS.items()}.get(name, name)


def aggregate(
    value_B_K_N: Tensor,
    mask_B_K_1: Tensor,
    how: str,
    episode_sum_B: Tensor | None = None,
    num_episodes: float | None = None,
) -> Tensor:
    """One number of what counts.

    "element-mean" is the true mean, and "token-mean" its published form, which divides by the rows that count instead
    of their elements. The others give each decision a divisor, ``episode_sum_B``, and divide what they add up by
    ``num_episodes``, so that decisions of an episode may lie in several minibatches. "episode-mean" is the mean over
    episodes of each one's own mean: the divisor is how many elements count in the whole episode. Published forms:
    "slice-mean", where it is how many count in the decision's slice of the episode, so that a long episode counts
    several times; "token-mean-of-steps", where ``num_episodes`` is the number of all elements, also those that do not
    count, by ``max_episode_steps``.
    """
    if how == "element-mean":
        return element_mean(value_B_K_N, mask_B_K_1)
    if how == "token-mean":
        return token_mean(value_B_K_N, mask_B_K_1)
    counted = torch.where(mask_B_K_1, value_B_K_N, 0.0)
    if episode_sum_B is None or num_episodes is None:
        raise ConfigError(f"aggregation={how} needs episode_sum_B and num_episodes.")
    return (counted / episode_sum_B.clamp(min=1).to(counted)[:, None, None]).sum() / num_episodes


def element_mean(value_B_K_N: Tensor, mask_B_K_1: Tensor) -> Tensor:
    """The mean over what counts, 0 where nothing does."""
    return torch.where(mask_B_K_1, value_B_K_N, 0.0).sum() / mask_B_K_1.expand_as(value_B_K_N).sum().clamp(min=1)


def token_mean(value_B_K_N: Tensor, mask_B_K_1: Tensor) -> Tensor:
    """The sum over what counts divided by the rows that count, N times the mean."""
    return torch.where(mask_B_K_1, value_B_K_N, 0.0).sum() / mask_B_K_1.sum().clamp(min=1)


def kl_estimate(d: Tensor, kind: str) -> Tensor:
    """Estimates of KL(new | reference) from the new policy's draws, d the log-probability under the reference less
    that under the new policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1, of which as published no term is above 10;
    a term beyond (d > 2.6) pulls no more, where k2 does."""
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d.square()
    assert kind == "k3", kind
    near = d.clamp(-LARGEST_D, LARGEST_D)
    return (near.exp() - near - 1).clamp(max=LARGEST_K3)


# --- by name


OBJECTIVES = shipped(
    "objective",
    {
        "grpo": ratio_objective(grpo),
        "guard": Objective(guard, is_ratio=True, needs_step=True),
        "dppo": ratio_objective(dppo),
        "best_of_n": Objective(imitation, is_ratio=True, imitates="best"),
        "random_of_n": Objective(imitation, is_ratio=True, imitates="random"),
        "nft": forward_objective(nft),
        "awm": forward_objective(awm),
    },
)


@functools.cache
def objective_of(name: str) -> Objective:
    """The objective of a name, or at module:name."""
    found = resolve(name, "objective")
    if not isinstance(found, Objective):
        raise ConfigError(f"'{name}' is no objective: decorate it with ratio_objective or forward_objective.")
    return found
