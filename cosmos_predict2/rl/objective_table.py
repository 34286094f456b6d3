# SPDX-License-Identifier: Apache-2.0
"""Objectives by name, and by import path: what ``model.config.rl.objective`` may say.

# my_objectives.py:  model.config.rl.objective=my_objectives:better_or_worse
@ratio_objective
def better_or_worse(step: RatioStep) -> Clipped:
    return clipped(step.log_ratio_B, step.advantage_B.sign(), step.limit)
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from cosmos_predict2.rl import objectives
from cosmos_predict2.rl.objectives import Clipped
from imaginaire.buildable import resolve, shipped
from imaginaire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RatioStep:
    """One stochastic step of some clips, judged again: the log-ratio of new to old probability, and how the mean moved.

    ``mean_drift_B`` is the mean of (mean - old mean)^2, ``std`` the step's standard deviation, ``dt`` how far its level
    falls (a flow time; of churn a noise level), ``limit`` is ``rl.clip_ratio``.
    """

    log_ratio_B: Tensor
    advantage_B: Tensor
    mean_drift_B: Tensor
    std: float
    limit: float
    dt: float = 1.0


@dataclass(frozen=True, slots=True)
class FreshNoise:
    """Generated clips with fresh noise at times t, and the velocities there: the network's, and that which sampled.

    Under context parallelism frames are this rank's; ``of_clip`` takes means over them, [B], to those of whole clips.
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


@dataclass(frozen=True, slots=True)
class Weighed:
    """Losses of an objective without ratios [B], and what to log."""

    loss_B: Tensor
    watched: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """``function`` of a `RatioStep`, or of `FreshNoise`, which any sampler may precede."""

    function: Callable[[Any], Any]
    is_ratio: bool


def ratio_objective(function: Callable[[RatioStep], Clipped]) -> Objective:
    return Objective(function, is_ratio=True)


def forward_objective(function: Callable[[FreshNoise], Clipped | Weighed]) -> Objective:
    return Objective(function, is_ratio=False)


@ratio_objective
def grpo(step: RatioStep) -> Clipped:
    return objectives.clipped(step.log_ratio_B, step.advantage_B, step.limit)


@ratio_objective
def guard(step: RatioStep) -> Clipped:
    return objectives.guard(step.log_ratio_B, step.advantage_B, step.mean_drift_B, step.std, step.dt, step.limit)


@ratio_objective
def dppo(step: RatioStep) -> Clipped:
    return objectives.dppo(step.log_ratio_B, step.advantage_B, step.mean_drift_B, step.std, step.limit)


@forward_objective
def nft(fresh: FreshNoise) -> Weighed:
    x0, t_B = fresh.x0_B_C_T_H_W, fresh.t_B
    y = objectives.noised(x0, fresh.epsilon_B_C_T_H_W, t_B)
    v, v_old = fresh.v_B_C_T_H_W, fresh.v_old_B_C_T_H_W
    found = objectives.nft(x0, y, t_B, v, v_old, fresh.advantage_B, fresh.beta, fresh.largest_advantage, fresh.of_clip)
    return Weighed(found.loss_B, {"good_share": found.share_B.mean()})


@forward_objective
def awm(fresh: FreshNoise) -> Clipped:
    target = fresh.epsilon_B_C_T_H_W - fresh.x0_B_C_T_H_W
    log_ratio = objectives.awm_log_ratio(fresh.v_B_C_T_H_W, fresh.v_old_B_C_T_H_W, target)
    return objectives.clipped(fresh.of_clip(log_ratio), fresh.advantage_B, fresh.limit)


OBJECTIVES = shipped("objective", {"grpo": grpo, "guard": guard, "dppo": dppo, "nft": nft, "awm": awm})


def objective_of(name: str) -> Objective:
    """The objective of a name, or at module:name."""
    found = resolve(name, "objective")
    if not isinstance(found, Objective):
        raise ConfigError(f"'{name}' is no objective: decorate it with ratio_objective or forward_objective.")
    return found
