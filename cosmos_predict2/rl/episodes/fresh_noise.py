# SPDX-License-Identifier: Apache-2.0
"""Fresh noise on executed chunks of actions, for the objectives nft and awm: its draws, and predictions there.

    fresh = fresh_draws(policy.flow_times, rl, num_decisions=2, num_episodes=32, seed=0, first=0)
    found = predicted(policy, record, fresh)  # with gradients

Letters: those of `decisions`; L times of a decision.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.episodes.config import VLARLConfig
from cosmos_predict2.rl.interfaces import Policy, PolicyDefaults, Velocities, completed
from cosmos_predict2.rl.objectives import (
    LARGEST_ADVANTAGE,
    SMALLEST_TIME,
    Clipped,
    FreshNoise,
    WithoutRatio,
    mean_drift,
    objective_of,
)
from imaginaire import random


@dataclass(frozen=True)
class FreshDraws:
    """The times of each decision, the seed of its noise, and the velocities that other weights predict there."""

    time_B_L: Tensor
    seed_B: Tensor
    v_old_B_L_K_N: Tensor | None = None  # by the sampling policy; None: the weights are still those
    v_reference_B_L_K_N: Tensor | None = None

    def rows(self, rows: Tensor) -> "FreshDraws":
        """Those of some of the decisions."""
        return FreshDraws(*(None if value is None else value[rows] for value in vars(self).values()))  # type: ignore[arg-type]


def misfits(policy: Any, rl: VLARLConfig) -> Iterator[tuple[str, str]]:
    """(field, sentence) where a policy, or its class alone, cannot learn by an objective of fresh noise."""
    if objective_of(rl.objective).is_ratio:
        return
    is_class = isinstance(policy, type)
    if completed(policy, PolicyDefaults).velocities is None or not (is_class or policy.flow_times):
        name = policy.__name__ if is_class else type(policy).__name__
        text = (
            f"{rl.objective} learns from velocities at fresh noise, which {name} does not give; PI0.5 does, but not"
            " with noise_method=flow_noise. Take grpo or dppo, or define velocities and flow_times of"
            " cosmos_predict2.rl.interfaces.Policy"
        )
        yield "objective", text
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


def judged_at(
    found: Velocities, fresh: FreshDraws, advantage_B: Tensor, rows_B_K: Tensor, rl: VLARLConfig
) -> tuple[Clipped | WithoutRatio, Tensor | None]:
    """The objective of decisions, each at L times one after the other, [B L]; and the square of what the velocities
    are away from the reference's. ``rows_B_K`` are those that count."""
    v = found.velocity_B_L_K_N
    counts_B_1_K_1 = rows_B_K[:, None, :, None]

    def counted(value: Tensor) -> Tensor:
        return torch.where(counts_B_1_K_1, value.to(v).expand_as(v), 0.0).flatten(0, 1)

    def of_decision(mean_BL: Tensor) -> Tensor:
        share_B = rows_B_K.double().mean(dim=1).clamp(min=1 / rows_B_K.shape[1])
        return mean_BL / share_B.repeat_interleave(v.shape[1]).to(mean_BL)

    v_old = v.detach() if fresh.v_old_B_L_K_N is None else fresh.v_old_B_L_K_N
    largest = LARGEST_ADVANTAGE if rl.advantage.adv_clip_max is None else rl.advantage.adv_clip_max
    given = FreshNoise(
        counted(found.x0_B_K_N[:, None]),
        counted(found.noise_B_L_K_N),
        fresh.time_B_L.flatten().to(v),
        counted(v),
        counted(v_old),
        advantage_B.to(v).repeat_interleave(v.shape[1]),
        limit=rl.clip_ratio,
        beta=rl.nft_beta,
        largest_advantage=largest,
        of_clip=of_decision,
        limit_high=rl.clip_ratio_high,
        dual_clip=rl.dual_clip,
    )
    terms: Clipped | WithoutRatio = objective_of(rl.objective).function(given)
    if fresh.v_reference_B_L_K_N is None:
        return terms, None
    return terms, of_decision(mean_drift(given.v_B_C_T_H_W, counted(fresh.v_reference_B_L_K_N)))
