# SPDX-License-Identifier: Apache-2.0
"""The loss of a policy's decisions: probabilities at the level of the ratio, the objective, and its mean.

    loss = policy_loss(policy.log_prob(record), old_B_K_N, advantage_B, valid_B_A, rl)

Letters: those of `objectives`; A actions of a decision.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.episodes.config import PolicyLossConfig, VLARLConfig
from cosmos_predict2.rl.interfaces import LogProb
from cosmos_predict2.rl.objectives import (
    RatioStep,
    aggregate,
    at_level,
    element_mean,
    kl_estimate,
    objective_of,
    rows_of_actions,
    token_mean,
)
from imaginaire.errors import ConfigError


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
    rl: VLARLConfig,
    *,
    old_mean_B_K_N: Tensor | None = None,
    reference_B_K_N: Tensor | None = None,
    episode_sum_B: Tensor | None = None,
    num_episodes: float | None = None,
) -> PolicyLoss:
    """The objective of decisions, with entropy bonus and the distance to a reference where they are asked for.

    ``valid_B_A`` marks actions that were executed before their episode ended. ``episode_sum_B`` and ``num_episodes``
    are what `aggregate` needs of whole episodes.
    """
    config: PolicyLossConfig = rl.loss
    new_B_K_N = log_prob.log_prob_B_K_N
    rows_B_K = rows_of_actions(valid_B_A, new_B_K_N.shape[1])
    new, mask = at_level(new_B_K_N, rows_B_K, config.ratio_level, config.sums_unexecuted)
    old, _ = at_level(old_B_K_N, rows_B_K, config.ratio_level, config.sums_unexecuted)
    log_ratio = torch.where(mask, new - old, 0.0).clamp(-config.largest_log_ratio, config.largest_log_ratio)
    advantage = advantage_B.to(new)[:, None, None]
    objective, by_step = objective_of(rl.objective), dict[str, Any](std=1.0)
    drift = 2 * (log_ratio.exp() - 1 - log_ratio)  # the divergence from the old policy, by what that drew
    if objective.needs_step:
        if (drawn := log_prob.step) is None or old_mean_B_K_N is None:
            raise ConfigError(
                f"objective={rl.objective} weighs decisions by the step of a sampler that drew them, which log_prob of"
                " this policy does not give. That of PI0.5 does with noise_method=flow_sde, joint_logprob=False and"
                " safe_get_logprob=False; else take grpo or dppo."
            )
        moved_B_K_N = (drawn.mean_B_K_N - old_mean_B_K_N).square()
        moved, _ = at_level(moved_B_K_N, rows_B_K, config.ratio_level, config.sums_unexecuted)
        drift = torch.where(mask, moved, 0.0)
        by_step = dict(std=drawn.std_B[:, None, None], dt=drawn.dt_B[:, None, None])
    limits = dict(limit=rl.clip_ratio, limit_high=rl.clip_ratio_high, dual_clip=rl.dual_clip)
    terms = objective.function(RatioStep(log_ratio, advantage, drift, **by_step, **limits))

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
    if rl.dual_clip is not None:
        is_dual = (ratio > rl.dual_clip) & (advantage < 0)
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
        loss = loss + rl.kl_beta * kl
    elif rl.kl_beta:
        raise ConfigError(f"kl_beta={rl.kl_beta} needs log-probabilities of a reference policy, but got none.")
    return PolicyLoss(loss, watched)
