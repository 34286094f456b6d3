# SPDX-License-Identifier: Apache-2.0
"""The decisions of a rollout, the minibatches in which they are trained on, and their loss.

    loss = policy_loss(policy.log_prob(record), old_B_K_N, advantage_B, valid_B_A, rl)

The objectives nft and awm judge a decision by fresh noise on its executed actions: `fresh_draws` are its times and
seeds, `predicted` the velocities there.

Letters: those of `objectives`; A actions of a decision; L times of a decision; decision b of a rollout is decision
b // E of episode b % E.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.episodes.config import PolicyLossConfig, VLARLConfig
from cosmos_predict2.rl.episodes.episodes import Trajectories
from cosmos_predict2.rl.interfaces import LogProb, Policy, PolicyDefaults, Velocities, completed
from cosmos_predict2.rl.learner import Facts, rows_of
from cosmos_predict2.rl.objectives import (
    LARGEST_ADVANTAGE,
    OF_EPISODES,
    SMALLEST_TIME,
    Clipped,
    FreshNoise,
    RatioStep,
    WithoutRatio,
    aggregate,
    at_level,
    element_mean,
    kl_estimate,
    level_of,
    mean_drift,
    objective_of,
    rows_of_actions,
    token_mean,
)
from cosmos_predict2.rl.policies.network import difference
from imaginaire import distributed, random
from imaginaire.errors import ConfigError, TrainingError

RULES = "check_policy of cosmos_predict2.rl.policies.contract"
# objectives that take no step where no group has an advantage
BY_ADVANTAGE = ("grpo", "guard", "dppo", "nft", "awm", "best_of_n", "random_of_n")


@dataclass(frozen=True)
class FreshDraws:
    """The times of each decision, the seed of its noise, and the velocities that other weights predict there."""

    time_B_L: Tensor
    seed_B: Tensor
    v_old_B_L_K_N: Tensor | None = None  # by the sampling policy; None: the weights are still those
    v_reference_B_L_K_N: Tensor | None = None


def misfits(policy: Any, rl: VLARLConfig) -> Iterator[tuple[str, str]]:
    """(field, sentence) where a policy, or its class alone, cannot learn by an objective of fresh noise."""
    if rl.is_ratio:
        return
    is_class = isinstance(policy, type)
    if completed(policy, PolicyDefaults).velocities is None or not (is_class or policy.flow_times):
        name = policy.__name__ if is_class else type(policy).__name__
        text = f"{rl.objective} learns from velocities at fresh noise, which {name} does not give; PI0.5 does, but not"
        cure = "Take grpo or dppo, or define velocities and flow_times of cosmos_predict2.rl.interfaces.Policy"
        yield "objective", f"{text} with noise_method=flow_noise. {cure}"
    elif not is_class and rl.num_timesteps > (most := len(policy.flow_times)):
        yield "num_timesteps", f"{rl.num_timesteps}, but the policy decides in {most} steps (0: all of them)"


def fresh_draws(
    times: Sequence[float], rl: VLARLConfig, num_decisions: int, num_episodes: int, seed: int, first: int
) -> FreshDraws:
    """Each decision has ``num_timesteps`` of the sampler's times, without repetition, or all.

    Chance follows from ``first``, the place of the rollout's first start in the run. With ``use_same_forward_noise``
    the decisions of a group that have the same number in their episodes share their draws.
    """
    count, size = rl.num_timesteps or len(times), rl.group_size if rl.use_same_forward_noise else 1
    shape, draws = (num_decisions, num_episodes // size), random.generator(seed, first, "fresh_noise")
    chosen = torch.rand(*shape, len(times), generator=draws).argsort(dim=2)[..., :count].sort(dim=2).values
    seeds = torch.randint(2**62, shape, generator=draws)
    levels = torch.tensor(times, dtype=torch.float32).clamp(SMALLEST_TIME, 1 - SMALLEST_TIME)
    return FreshDraws(*(draw.repeat_interleave(size, dim=1).flatten(0, 1) for draw in (levels[chosen], seeds)))


def predicted(policy: Policy, record: Mapping[str, Tensor], fresh: FreshDraws) -> Velocities:
    """The policy's velocities at these draws: each call adds the same noise."""
    assert policy.velocities is not None
    generators = [torch.Generator().manual_seed(seed) for seed in fresh.seed_B.tolist()]
    return policy.velocities(record, fresh.time_B_L.to(next(iter(record.values())).device), generators)


@dataclass(frozen=True)
class Decisions:
    """Decisions that are trained on together, with the probabilities that they were drawn with, or ``fresh`` noise."""

    record: dict[str, Tensor]  # [B, ...]
    old_log_prob_B_K_N: Tensor | None
    advantage_B: Tensor
    mask_B_A: Tensor  # bool, the actions that were executed
    share: float = 1.0  # of the optimizer step's decisions, times the micro-batches
    old_mean_B_K_N: Tensor | None = None  # of a `DrawnStep`
    reference_log_prob_B_K_N: Tensor | None = None
    fresh: FreshDraws | None = None
    episode_sum_B: Tensor | None = None  # terms of the loss in the decision's episode or slice, which they divide
    num_episodes: float | None = None  # a micro-batch's part of them
    is_before_update: bool = False  # no step was taken since the rollout, so that ratios are 1
    teaches: bool = True  # there is something to learn in its minibatch, on any rank
    facts: Facts = field(default_factory=dict)


def teaches_without_advantage(rl: VLARLConfig) -> bool:
    """Decisions with an advantage of 0 may have a gradient: nft draws them to the policy that sampled; one's own
    objective may have any."""
    return bool(rl.kl_beta) or rl.objective == "nft" or teaches_without_spread(rl)


def teaches_without_spread(rl: VLARLConfig) -> bool:
    """Steps are taken of a rollout in which no group has an advantage: not of the distance to the reference alone, by
    which only what the optimizer remembers would move the policy."""
    return bool(rl.loss.entropy_bonus) or rl.objective not in BY_ADVANTAGE


def taught(whole: Decisions, rl: VLARLConfig) -> Tensor:
    """The decisions that the loss needs, bool [B]: something was executed, and its episode was better or worse than the
    others of its group. The entropy and the distance to a reference need those without an advantage, too."""
    is_needed_B = whole.mask_B_A.any(dim=1)
    return is_needed_B if teaches_without_advantage(rl) else is_needed_B & (whole.advantage_B != 0)


def rows_that_count(whole: Decisions, rl: VLARLConfig) -> Tensor:
    """The decisions that are `taught`. Others fill up, so that no micro-batch is empty."""
    counts_B, at_least = taught(whole, rl), rl.minibatches * rl.micro_batches
    if len(counts_B) < at_least:
        raise ConfigError(
            f"model.config.rl.minibatches={rl.minibatches} times micro_batches={rl.micro_batches} are more than the"
            f" {len(counts_B)} decisions of a rollout: lower them, or play more groups (dataloader_train.batch_size)."
        )
    order = torch.argsort((~counts_B).long(), stable=True)
    return order[: max(int(counts_B.sum()), at_least)]


def require_drawn(drawn_M_E_K_N: Tensor | None, whole: Decisions, rows: Tensor, tolerance: float) -> float:
    """Distance of the log-probabilities of decisions from those that they were drawn with, in nats an element on
    average; raises where that is no rounding."""
    if drawn_M_E_K_N is None:
        found = "The policy's act gives no log-probability of what it draws: return Decision(actions, record, log_prob)"
        raise TrainingError(f"{found}, taken where it draws. {RULES} checks the rest.")
    assert whole.old_log_prob_B_K_N is not None
    rows = rows[whole.mask_B_A.any(dim=1)[rows]]
    drawn, computed = drawn_M_E_K_N.flatten(0, 1)[rows], whole.old_log_prob_B_K_N[rows]
    away = difference(drawn, computed) if len(rows) else 0.0
    if not away <= tolerance:
        found = f"{away:.3g} nats an element"
        if drawn.shape != computed.shape:
            found = f"shape {list(drawn.shape[1:])} and {list(computed.shape[1:])} of a decision"
        raise TrainingError(
            f"What decisions were drawn with and what log_prob computes of their records differ by {found} (at most"
            f" model.config.rl.draw_tolerance={tolerance:g}): log_prob has another order, noise, temperature or weights"
            f" than act, or the record lacks something. {RULES} names the rule that is broken."
        )
    return away


@torch.no_grad()
def log_probs(
    policy: Policy, record: dict[str, Tensor], rows: Tensor, size: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities, and means of a `DrawnStep` where there is one, [B, K, N] with zeros but in some rows.

    Of ``size`` decisions at a time on the device, as training computes them: all at once may not fit.
    """
    num, found, means = len(next(iter(record.values()))), [], []
    for some in rows.split(size):
        part = policy.log_prob({key: value[some].to(device) for key, value in record.items()})
        found.append(part.log_prob_B_K_N.cpu())
        if part.step is not None:
            means.append(part.step.mean_B_K_N.cpu())
    return _in_rows(rows, found, num), _in_rows(rows, means, num) if means else None


@torch.no_grad()
def velocities(
    policy: Policy, record: Mapping[str, Tensor], fresh: FreshDraws, rows: Tensor, size: int, device: torch.device
) -> Tensor:
    """The same of velocities at fresh noise, [B, L, K, N]."""
    num, found = len(next(iter(record.values()))), []
    for some in rows.split(size):
        part = {key: value[some].to(device) for key, value in record.items()}
        found.append(predicted(policy, part, rows_of(fresh, some)).velocity_B_L_K_N.cpu())
    return _in_rows(rows, found, num)


def _in_rows(rows: Tensor, parts: Sequence[Tensor], num: int) -> Tensor:
    """Those of some rows, one after the other, in their places among zeros."""
    found = torch.cat(list(parts))
    return found.new_zeros(num, *found.shape[1:]).index_copy(0, rows, found)


def in_minibatches(whole: Decisions, rows: Tensor, rl: VLARLConfig, seed: int, first: int) -> Iterator[Decisions]:
    """Each of some decisions ``updates`` times, in ``minibatches`` of chance, each of these in ``micro_batches``.

    Chance follows from ``first``, the place of the rollout's first start in the run. Decisions that are not computed
    for their advantage of 0 stay in the divisor, evenly in all minibatches: the loss is what it is with them.
    """
    parts: list[Tensor] = []
    for update in range(rl.updates):
        order = torch.randperm(len(rows), generator=random.generator(seed, first, f"order{update}"))
        parts += list(rows[order].tensor_split(rl.minibatches))
    every, advantages = _terms(whole, rl.loss.ratio_level).sum(), whole.advantage_B.count_nonzero()
    whole = replace(whole, mask_B_A=whole.mask_B_A & taught(whole, rl)[:, None])
    counted_B = _terms(whole, rl.loss.ratio_level)
    counts = torch.stack([*(counted_B[part].sum() for part in parts), counted_B.sum(), every, advantages]).double()
    *of_all, computed, every, advantages = distributed.all_reduce_(counts) / distributed.world_size()
    takes_steps = bool(advantages > 0) or teaches_without_spread(rl)
    facts = whole.facts
    for number, part in enumerate(parts):
        for micro in part.tensor_split(rl.micro_batches):
            share = float(counted_B[micro].sum() / of_all[number].clamp(min=1) * rl.micro_batches)
            share *= float(computed / every.clamp(min=1))
            is_of_episodes = whole.episode_sum_B is not None  # which have their shares in the sums
            yield replace(
                rows_of(whole, micro),
                share=1.0 if is_of_episodes else share,
                is_before_update=number == 0,
                teaches=takes_steps and bool(of_all[number] > 0),
                facts=facts,
            )
            facts = {}


def with_episodes(whole: Decisions, played: Trajectories, rl: VLARLConfig) -> Decisions:
    """With the divisors of an aggregation by episodes or their slices, of this process's episodes."""
    loss, num = rl.loss, len(played)
    if loss.aggregation not in OF_EPISODES:
        return whole
    old, level = whole.old_log_prob_B_K_N, level_of(loss.ratio_level)
    rows, elements = (1, 1) if old is None else old.shape[1:]
    elements = elements if level == "element" else 1
    terms_M_E = (_terms(whole, level) * elements).unflatten(0, (-1, num))
    size = loss.slice_decisions if loss.aggregation == "slice-mean" else len(terms_M_E)
    sums = [part.sum(dim=0, keepdim=True).expand_as(part) for part in terms_M_E.split(size)]
    count = max(1, int(played.is_valid_E.sum()))
    if loss.aggregation == "token-mean-of-steps":
        assert loss.max_episode_steps is not None  # the configuration requires it
        count = terms_M_E.numel() * elements * (1 if level == "chunk" else rows) / loss.max_episode_steps
    parts = rl.minibatches * rl.micro_batches
    return replace(whole, episode_sum_B=torch.cat(sums).flatten(), num_episodes=count / parts)


def _terms(whole: Decisions, level: str) -> Tensor:
    """Number of rows of each decision that count, or 1 where any does, by the level of the ratios, [B]."""
    if level_of(level) == "chunk" or whole.old_log_prob_B_K_N is None:
        return whole.mask_B_A.any(dim=1).long()
    return rows_of_actions(whole.mask_B_A, whole.old_log_prob_B_K_N.shape[1]).sum(dim=1)


# --- the loss


def cloning_loss(policy: Policy, part: Decisions, generator: torch.Generator) -> Tensor | None:
    """The policy's own loss of cloning the decisions with an advantage, as a mean over all that count; None of none."""
    counts_B = part.mask_B_A.any(dim=1)
    rows = (counts_B & (part.advantage_B > 0)).nonzero().flatten()
    if not len(rows):
        return None
    assert policy.cloning_loss is not None
    record = policy.demonstrated({name: value[rows] for name, value in part.record.items()})
    return policy.cloning_loss(record, generator) * (len(rows) / counts_B.sum())


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
    cloning: Tensor | None = None,
) -> PolicyLoss:
    """The objective of decisions, with entropy bonus and the distance to a reference where they are asked for.

    ``cloning`` stands for the mean of the objective, where a policy has a loss of its own for it.

    ``valid_B_A`` marks actions that were executed before their episode ended. ``episode_sum_B`` and ``num_episodes``
    are what `aggregate` needs of whole episodes.
    """
    config: PolicyLossConfig = rl.loss
    new_B_K_N = log_prob.log_prob_B_K_N
    rows_B_K = rows_of_actions(valid_B_A, new_B_K_N.shape[1])
    leveled = partial(at_level, rows_B_K=rows_B_K, level=config.ratio_level, sums_unexecuted=config.sums_unexecuted)
    (new, mask), (old, _) = leveled(new_B_K_N), leveled(old_B_K_N)
    log_ratio = torch.where(mask, new - old, 0.0).clamp(-config.largest_log_ratio, config.largest_log_ratio)
    advantage = advantage_B.to(new)[:, None, None]
    objective, by_step = objective_of(rl.objective), dict[str, Any](std=1.0)
    drift = 2 * (log_ratio.exp() - 1 - log_ratio)  # the divergence from the old policy, by what that drew
    if objective.needs_step:
        if (drawn := log_prob.step) is None or old_mean_B_K_N is None:
            raise ConfigError(
                f"objective={rl.objective} needs a sampler's step, which this policy's log_prob does not give. That of"
                " PI0.5 does with noise_method=flow_sde, joint_logprob=False and safe_get_logprob=False; else take grpo"
                " or dppo."
            )
        moved, _ = leveled((drawn.mean_B_K_N - old_mean_B_K_N).square())
        drift = torch.where(mask, moved, 0.0)
        by_step = dict(std=drawn.std_B[:, None, None], dt=drawn.dt_B[:, None, None])
    limits = dict(limit=rl.clip_ratio, limit_high=rl.clip_ratio_high, dual_clip=rl.dual_clip)
    terms = objective.function(RatioStep(log_ratio, advantage, drift, **by_step, **limits))

    def mean(value: Tensor) -> Tensor:
        return aggregate(value, mask, config.aggregation, episode_sum_B, num_episodes)

    loss = mean(terms.loss_B) if cloning is None else cloning
    fraction = token_mean if config.aggregation == "token-mean" else element_mean
    watched = {"policy_loss": loss.detach(), **_ratio_facts(terms, log_ratio, advantage, mask, rl, fraction)}
    if log_prob.entropy_B_K_N is not None:
        entropy = element_mean(log_prob.entropy_B_K_N, rows_B_K[..., None])
        watched["entropy"] = entropy.detach()
        loss = loss - config.entropy_bonus * entropy
    elif config.entropy_bonus:
        raise ConfigError(f"entropy_bonus={config.entropy_bonus}, but this policy's log_prob gives no entropy: set 0.")
    if reference_B_K_N is not None:
        reference, _ = leveled(reference_B_K_N)
        kl = mean(kl_estimate(torch.where(mask, reference - new, 0.0), config.kl_kind))
        watched["kl_to_reference"] = kl.detach()
        loss = loss + rl.kl_beta * kl
    elif rl.kl_beta:
        raise ConfigError(f"kl_beta={rl.kl_beta} needs log-probabilities of a reference policy, but got none.")
    return PolicyLoss(loss, watched)


def forward_loss(
    found: Velocities,
    fresh: FreshDraws,
    advantage_B: Tensor,
    valid_B_A: Tensor,
    rl: VLARLConfig,
    *,
    episode_sum_B: Tensor | None = None,
    num_episodes: float | None = None,
) -> PolicyLoss:
    """The same of an objective of fresh noise: a decision counts by the mean over its times.

    The distance to a reference is the mean of (v - v_reference)^2, as of clips.
    """
    v, num_times = found.velocity_B_L_K_N, fresh.time_B_L.shape[1]
    rows_B_K = rows_of_actions(valid_B_A, v.shape[2])
    mask, by_time = rows_B_K.any(dim=1)[:, None, None], (-1, 1, num_times)

    def counted(value: Tensor) -> Tensor:
        """[B L, K, N], with zeros in rows that do not count."""
        return torch.where(rows_B_K[:, None, :, None], value.to(v).expand_as(v), 0.0).flatten(0, 1)

    def of_decision(mean_BL: Tensor) -> Tensor:
        share_B = rows_B_K.double().mean(dim=1).clamp(min=1 / rows_B_K.shape[1])
        return mean_BL / share_B.repeat_interleave(num_times).to(mean_BL)

    def mean(value: Tensor) -> Tensor:
        each = value.reshape(by_time).mean(dim=2, keepdim=True)
        return aggregate(each, mask, rl.loss.aggregation, episode_sum_B, num_episodes)

    largest = LARGEST_ADVANTAGE if rl.advantage.adv_clip_max is None else rl.advantage.adv_clip_max
    numbers = (rl.clip_ratio, rl.nft_beta, largest, of_decision, rl.clip_ratio_high, rl.dual_clip)  # as of clips
    given = FreshNoise(
        counted(found.x0_B_K_N[:, None]),
        counted(found.noise_B_L_K_N),
        fresh.time_B_L.flatten().to(v),
        counted(v),
        counted(v.detach() if fresh.v_old_B_L_K_N is None else fresh.v_old_B_L_K_N),
        advantage_B.to(v).repeat_interleave(num_times),
        *numbers,
    )
    terms: Clipped | WithoutRatio = objective_of(rl.objective).function(given)
    loss = mean(terms.loss_B)
    watched = {"policy_loss": loss.detach()}
    if isinstance(terms, Clipped):
        terms = Clipped(*(getattr(terms, field.name).reshape(by_time) for field in fields(terms)))
        advantage = advantage_B.to(loss)[:, None, None]
        watched |= _ratio_facts(terms, terms.ratio_B.log(), advantage, mask, rl, element_mean)
    else:
        watched |= terms.watched
    if fresh.v_reference_B_L_K_N is not None:
        kl = mean(of_decision(mean_drift(given.v_B_C_T_H_W, counted(fresh.v_reference_B_L_K_N))))
        watched["kl_to_reference"] = kl.detach()
        loss = loss + rl.kl_beta * kl
    return PolicyLoss(loss, watched)


def _ratio_facts(
    terms: Clipped,
    log_ratio: Tensor,
    advantage: Tensor,
    mask: Tensor,
    rl: VLARLConfig,
    fraction: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, Tensor]:
    """Numbers to watch of the ratios that count; 1 and 0 where none does."""
    is_clipped = (terms.is_above_B & (advantage > 0)) | (terms.is_below_B & (advantage < 0))
    ratio = terms.ratio_B.detach()
    of_valid = torch.where(mask, ratio, 1.0)
    facts = {
        "clip_fraction": fraction(is_clipped.to(ratio), mask),
        "approx_kl": element_mean(-log_ratio.detach(), mask),
        "ratio_mean": 1 + element_mean(ratio - 1, mask),
        "ratio_min": of_valid.min(),
        "ratio_max": of_valid.max(),
    }
    if rl.dual_clip is not None:
        is_dual = (ratio > rl.dual_clip) & (advantage < 0)
        facts["dual_clip_fraction"] = element_mean(is_dual.to(ratio), mask)
    return facts
