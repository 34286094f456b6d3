# SPDX-License-Identifier: Apache-2.0
"""Rewards to advantages: how much better a sample is than the others of its group.

Groups are rows, [N, G]. Invalid samples are excluded from means and deviations, and have advantage 0.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from imaginaire.config.schema import Section, above, at_least, one_of

EPSILON = 1e-4  # beside the standard deviation
NORMS = ("group", "global", "none", "cosmos_rl", "sft", "dpo")


@attrs.define(kw_only=True, slots=False)
class GroupAdvantageConfig(Section):
    """How rewards of a group become advantages, (r - mean) / (std + epsilon)."""

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
    elif norm != "none":
        raise ValueError(f"There is no normalisation '{norm}' of advantages; there are {', '.join(NORMS)}.")
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
    rewards_N_G: Tensor,
    is_valid_N_G: Tensor,
    *,
    lower: float | None = None,
    upper: float | None = None,
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
