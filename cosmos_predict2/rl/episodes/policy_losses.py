# SPDX-License-Identifier: Apache-2.0
"""What a policy minimises, as pure functions: from rewards and ends of episodes to masks, advantages and a loss.

    valid_M_E_A = valid_actions(dones_M1_E_A) & executed_M_E_A
    score_E = episode_scores(rewards_M_E_A, valid_M_E_A)
    groups = choose_groups(score_E.unflatten(0, (-1, G)), lower=0.1, upper=0.9, wanted=24)
    loss = policy_loss(policy.log_prob(record), old_B_K_N, advantage_B, valid_B_A, config)

Rewards and masks may stand for actions, or for whole decisions (`of_chunks`).

Letters: M decisions of an episode, E environments (the members of a group are neighbours), A actions of a decision,
B decisions that are trained together, in any order; K rows of a decision and N elements of a row (`LogProb`), K' and
N' what the level of the ratio leaves of them; N_G groups and their members.
"""

from dataclasses import dataclass
from typing import TypeVar

import attrs
import torch
from torch import Tensor

from cosmos_predict2.rl.advantages import has_spread
from cosmos_predict2.rl.interfaces import LogProb
from cosmos_predict2.rl.objectives import clipped
from imaginaire.config.schema import Section, above, at_least, one_of
from imaginaire.errors import ConfigError

# What one ratio of probabilities stands for, and the published name of that.
RATIO_LEVELS = {"element": "token_level", "action": "action_level", "chunk": "chunk_level"}
OF_EPISODES = ("episode-mean", "slice-mean", "token-mean-of-steps")  # by what counts around a decision, too
AGGREGATIONS = ("element-mean", "token-mean", *OF_EPISODES)
KL_KINDS = ("k1", "k2", "k3")
LARGEST_D, LARGEST_K3 = 20.0, 10.0  # as published
T = TypeVar("T")


@attrs.define(kw_only=True, slots=False)
class PolicyLossConfig(Section):
    """The clipped objective of a policy. ``aggregation`` is what `aggregate` describes."""

    ratio_level: str = attrs.field(default="chunk", validator=one_of(*RATIO_LEVELS, *RATIO_LEVELS.values()))
    clip_low: float = attrs.field(default=0.2, validator=above(0))
    clip_high: float = attrs.field(default=0.28, validator=above(0))
    dual_clip: float | None = attrs.field(default=None, validator=above(1))  # the loss is at most this times |A|
    aggregation: str = attrs.field(default="element-mean", validator=one_of(*AGGREGATIONS))
    slice_decisions: int = attrs.field(default=16, validator=at_least(1))  # of "slice-mean", one after the other
    max_episode_steps: int | None = attrs.field(default=None, validator=at_least(1))  # of "token-mean-of-steps"
    entropy_bonus: float = attrs.field(default=0.0, validator=at_least(0))
    kl_beta: float = attrs.field(default=0.0, validator=at_least(0))
    kl_kind: str = attrs.field(default="k3", validator=one_of(*KL_KINDS))
    sums_unexecuted: bool = False  # a chunk's ratio also counts actions that were never executed, as published
    largest_log_ratio: float = attrs.field(default=20.0, validator=above(0))  # beyond it the exponential says no more

    def __attrs_post_init__(self) -> None:
        if self.aggregation == "token-mean-of-steps" and self.max_episode_steps is None:
            raise ConfigError(
                "max_episode_steps=null, but aggregation=token-mean-of-steps divides by it: set an episode's steps."
            )


# --- from rewards and ends to scores


def valid_actions(dones_M1_E_A: Tensor) -> Tensor:
    """Which actions count, bool [M, E, A]: no end up to and including the action before.

    ``dones_M1_E_A[0]`` belongs to the reset, and [m + 1] to decision m.
    """
    actions = dones_M1_E_A.shape[2]
    done_T_E = dones_M1_E_A.bool().transpose(1, 2).flatten(0, 1)[actions - 1 : -1]  # before each action
    valid_T_E = done_T_E.cumsum(dim=0) == 0
    return valid_T_E.unflatten(0, (-1, actions)).transpose(1, 2)


def of_chunks(rewards_M_E_A: Tensor, valid_M_E_A: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards and validity of whole decisions, [M, E, 1]: the sum, and whether any action counts."""
    return rewards_M_E_A.sum(dim=2, keepdim=True), valid_M_E_A.any(dim=2, keepdim=True)


def episode_scores(rewards_M_E_A: Tensor, valid_M_E_A: Tensor) -> Tensor:
    """The sum of an episode's rewards until it ended, [E]."""
    return (rewards_M_E_A * valid_M_E_A).sum(dim=(0, 2))


@dataclass(frozen=True)
class Choice:
    """Which groups teach something. Groups beyond those wanted are kept too."""

    is_kept_N: Tensor
    num_low: int  # dropped for a mean below the bound, or as alike and not above the middle of the bounds
    num_high: int
    num_missing: int  # how many more are wanted


def choose_groups(
    scores_N_G: Tensor,
    is_valid_N_G: Tensor | None = None,
    *,
    lower: float = float("-inf"),
    upper: float = float("inf"),
    min_std: float | None = None,
    wanted: int = 0,
) -> Choice:
    """Dynamic sampling (DAPO): groups whose mean score lies in the bounds, both included, and that are not all alike.

    Alike is a deviation of at most ``min_std``; None keeps groups that are alike, as the published filter does, and
    their advantages are 0.
    """
    valid = torch.ones_like(scores_N_G, dtype=torch.bool) if is_valid_N_G is None else is_valid_N_G
    count_N = valid.sum(dim=1)
    mean_N = (scores_N_G * valid).sum(dim=1) / count_N.clamp(min=1)
    is_kept_N = (mean_N >= lower) & (mean_N <= upper) & (count_N > 0)
    if min_std is not None:
        is_kept_N &= has_spread(scores_N_G, valid, min_std)
    is_finite = abs(lower) < float("inf") and abs(upper) < float("inf")
    middle = 0.5 * (lower + upper) if is_finite else float(mean_N.mean())
    is_high_N = ~is_kept_N & (mean_N > middle)
    kept, high = int(is_kept_N.sum()), int(is_high_N.sum())
    return Choice(is_kept_N, len(is_kept_N) - kept - high, high, max(0, wanted - kept))


# --- from log-probabilities to a loss


@dataclass(frozen=True)
class PolicyLoss:
    """The loss, and what to watch: name -> number without a gradient."""

    loss: Tensor
    watched: dict[str, Tensor]


def policy_loss(
    log_prob: LogProb,
    old_B_K_N: Tensor,
    advantage_B: Tensor,
    valid_B_A: Tensor,
    config: PolicyLossConfig,
    *,
    reference_B_K_N: Tensor | None = None,
    episode_sum_B: Tensor | None = None,
    num_episodes: float | None = None,
) -> PolicyLoss:
    """The clipped objective of decisions, with entropy bonus and the distance to a reference where they are asked for.

    ``valid_B_A`` marks actions that were executed before their episode ended. ``episode_sum_B`` and ``num_episodes``
    are what `aggregate` needs of whole episodes.
    """
    new_B_K_N = log_prob.log_prob_B_K_N
    rows_B_K = rows_of_actions(valid_B_A, new_B_K_N.shape[1])
    new, mask = at_level(new_B_K_N, rows_B_K, config.ratio_level, config.sums_unexecuted)
    old, _ = at_level(old_B_K_N, rows_B_K, config.ratio_level, config.sums_unexecuted)
    log_ratio = torch.where(mask, new - old, 0.0).clamp(-config.largest_log_ratio, config.largest_log_ratio)
    advantage = advantage_B.to(new)[:, None, None]
    terms = clipped(log_ratio, advantage, config.clip_low, config.clip_high, config.dual_clip)

    def mean(value: Tensor) -> Tensor:
        return aggregate(value, mask, config.aggregation, episode_sum_B, num_episodes)

    loss = mean(terms.loss_B)
    is_clipped = (terms.is_above_B & (advantage > 0)) | (terms.is_below_B & (advantage < 0))
    fraction = token_mean if config.aggregation == "token-mean" else element_mean
    ratio = terms.ratio_B.detach()
    of_valid = torch.where(mask, ratio, 1.0)
    watched = {
        "policy_loss": loss.detach(),
        "clip_fraction": fraction(is_clipped.to(loss), mask),
        "approx_kl": element_mean(-log_ratio.detach(), mask),
        "ratio_mean": 1 + element_mean(ratio - 1, mask),  # 1 where nothing counts, as the others below
        "ratio_min": of_valid.min(),
        "ratio_max": of_valid.max(),
    }
    if config.dual_clip is not None:
        is_dual = (ratio > config.dual_clip) & (advantage < 0)
        watched["dual_clip_fraction"] = element_mean(is_dual.to(loss), mask)
    if log_prob.entropy_B_K_N is not None:
        entropy = element_mean(log_prob.entropy_B_K_N, rows_B_K[..., None])
        watched["entropy"] = entropy.detach()
        loss = loss - config.entropy_bonus * entropy
    elif config.entropy_bonus:
        raise ConfigError(f"entropy_bonus={config.entropy_bonus}, but this policy's log_prob gives no entropy: set 0.")
    if reference_B_K_N is not None:
        reference, _ = at_level(reference_B_K_N, rows_B_K, config.ratio_level, config.sums_unexecuted)
        kl = mean(kl_estimate(torch.where(mask, reference - new, 0.0), config.kl_kind))
        watched["kl_to_reference"] = kl.detach()
        loss = loss + config.kl_beta * kl
    elif config.kl_beta:
        raise ConfigError(f"kl_beta={config.kl_beta} needs log-probabilities of a reference policy, but got none.")
    return PolicyLoss(loss, watched)


def rows_of_actions(valid_B_A: Tensor, rows: int) -> Tensor:
    """Which of K rows count, bool [B, K]: those with an action that does."""
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
    if level != "chunk":
        raise ConfigError(f"ratio_level={level!r}, but it must be one of: {', '.join(RATIO_LEVELS)}.")
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
    if how not in OF_EPISODES:
        raise ConfigError(f"aggregation={how!r}, but it must be one of: {', '.join(AGGREGATIONS)}.")
    counted = torch.where(mask_B_K_1, value_B_K_N, 0.0)
    sum_B_1_1 = _required(episode_sum_B, how, "episode_sum_B").clamp(min=1).to(counted)[:, None, None]
    return (counted / sum_B_1_1).sum() / _required(num_episodes, how, "num_episodes")


def element_mean(value_B_K_N: Tensor, mask_B_K_1: Tensor) -> Tensor:
    """The mean over what counts, 0 where nothing does."""
    return _sum(value_B_K_N, mask_B_K_1) / mask_B_K_1.expand_as(value_B_K_N).sum().clamp(min=1)


def token_mean(value_B_K_N: Tensor, mask_B_K_1: Tensor) -> Tensor:
    """The sum over what counts divided by the rows that count, N times the mean."""
    return _sum(value_B_K_N, mask_B_K_1) / mask_B_K_1.sum().clamp(min=1)


def kl_estimate(d: Tensor, kind: str) -> Tensor:
    """Estimates of KL(new | reference) from the new policy's draws, d the log-probability under the reference less
    that under the new policy: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1, of which as published no term is above 10;
    a term beyond (d > 2.6) pulls no more, where k2 does."""
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d.square()
    if kind == "k3":
        near = d.clamp(-LARGEST_D, LARGEST_D)
        return (near.exp() - near - 1).clamp(max=LARGEST_K3)
    raise ConfigError(f"kl_kind={kind!r}, but it must be one of: {', '.join(KL_KINDS)}.")


def _sum(value_B_K_N: Tensor, mask_B_K_1: Tensor) -> Tensor:
    return torch.where(mask_B_K_1, value_B_K_N, 0.0).sum()


def _required(value: T | None, how: str, name: str) -> T:
    if value is None:
        raise ConfigError(f"aggregation={how} needs {name}.")
    return value
