# SPDX-License-Identifier: Apache-2.0
"""What reinforcement learning minimises, as pure functions of a batch; each returns one value per sample.

Ratio objectives ("grpo", "guard", "dppo") take the log-ratio of a stochastic step; forward-process objectives ("nft",
"awm") take predictions at freshly noised samples, whatever sampler made them. Advantages are clamped by the caller.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SMALLEST_ERROR = 1e-5  # nft divides by a sample's error


@dataclass(frozen=True, slots=True)
class Clipped:
    """Losses of a ratio objective and what to watch, each [B]."""

    loss_B: Tensor
    ratio_B: Tensor
    is_above_B: Tensor  # ratios above 1 + clip
    is_below_B: Tensor


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


def guard(
    log_ratio_B: Tensor, advantage_B: Tensor, mean_drift_B: Tensor, std: float, dt: float, clip: float
) -> Clipped:
    """GRPO-Guard: ratios exp(q (l - l_old + b)), clipped, and the loss divided by dt, so that all steps weigh alike.

    b is the expected decrease, drift / (2 q^2), and q the diffusion coefficient times sqrt(dt): the standard deviation.
    """
    guarded_B = std * (log_ratio_B + gaussian_kl(mean_drift_B, std))
    found = clipped(guarded_B, advantage_B, clip)
    return replace(found, loss_B=found.loss_B / dt)


def dppo(log_ratio_B: Tensor, advantage_B: Tensor, mean_drift_B: Tensor, std: float, limit: float) -> Clipped:
    """Flow-DPPO: no clipping; updates that lead further away are left out where the KL divergence is over a limit."""
    ratio = log_ratio_B.exp()
    is_far = gaussian_kl(mean_drift_B, std) > limit
    leads_away = torch.where(advantage_B > 0, ratio > 1, ratio < 1)
    counted = (~(is_far & leads_away)).to(ratio.dtype).detach()
    return Clipped(-advantage_B * ratio * counted, ratio, is_far & (ratio > 1), is_far & (ratio < 1))


def noised(x0: Tensor, epsilon: Tensor, t_B: Tensor) -> Tensor:
    """(1 - t) x_0 + t eps."""
    t = t_B.reshape(-1, *[1] * (x0.dim() - 1)).to(x0)
    return (1 - t) * x0 + t * epsilon


def nft_share(advantage_B: Tensor, largest: float) -> Tensor:
    """How far a sample counts as a good one, from 0 to 1."""
    return (advantage_B.clamp(-largest, largest) / (2 * largest) + 0.5).clamp(0, 1)


@dataclass(frozen=True, slots=True)
class NFT:
    share_B: Tensor
    positive_B: Tensor
    negative_B: Tensor
    loss_B: Tensor


def nft(
    x0: Tensor,
    y_t: Tensor,
    t_B: Tensor,
    v: Tensor,
    v_old: Tensor,
    advantage_B: Tensor,
    beta: float,
    largest: float,
    of_clip: Callable[[Tensor], Tensor] = lambda mean_B: mean_B,
) -> NFT:
    """DiffusionNFT: the prediction is drawn towards good samples, and its mirror image towards bad ones.

    v+ = b v + (1 - b) v_old, v- = (1 + b) v_old - b v; their errors of x_0, each divided by its own size, are weighted
    by the share q and 1 - q. ``of_clip`` takes means of this rank's frames to those of whole clips.
    """
    t = t_B.reshape(-1, *[1] * (x0.dim() - 1))

    def relative_error(velocity: Tensor) -> Tensor:
        error = y_t - t * velocity - x0
        with torch.no_grad():
            size = of_clip(error.double().abs().flatten(1).mean(dim=1)).clamp(min=SMALLEST_ERROR).to(error.dtype)
        return of_clip(error.square().flatten(1).mean(dim=1)) / size

    positive = relative_error(beta * v + (1 - beta) * v_old)
    negative = relative_error((1 + beta) * v_old - beta * v)
    share = nft_share(advantage_B, largest)
    return NFT(share, positive, negative, largest * (share * positive + (1 - share) * negative) / beta)


def awm_log_ratio(v: Tensor, v_old: Tensor, target: Tensor) -> Tensor:
    """Advantage-weighted matching: the error of the velocity stands for the log-probability, [B]."""
    return ((v_old - v) * (v_old + v - 2 * target)).flatten(1).mean(dim=1)


def mean_drift(mean: Tensor, other: Tensor) -> Tensor:
    """The mean over the elements of (mean - other)^2, [B]: in place of a KL divergence where it is not scaled."""
    return (mean - other).square().flatten(1).mean(dim=1)


def data_weight(sigma: float | Tensor, sigma_data: float = 1.0) -> float | Tensor:
    """The weight of the squared error of x_0 in DDRL's data term: (sigma^2 + sigma_d^2) / (sigma sigma_d)^2."""
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


def approximate_kl(log_ratio_B: Tensor) -> Tensor:
    """Half the mean square of the log-ratio, as Flow-GRPO reports it."""
    return 0.5 * log_ratio_B.square().mean()


def old_policy_decay(kind: int, updates: int) -> float:
    """How much of the sampling policy stays at an update (DiffusionNFT's ``weight_copy_decay_type``)."""
    if kind == 0:
        return 0.0
    if kind == 1:
        return min(0.001 * updates, 0.5)
    if kind == 2:
        return 0.0 if updates < 75 else min(0.0075 * (updates - 75), 0.999)
    raise ValueError(f"There is no decay type {kind} of the sampling policy; there are 0, 1 and 2.")


def exponential_advantage(advantage: Tensor) -> Tensor:
    """-exp(-A), the theoretical form of DDRL: negative for every sample."""
    return -(math.e ** (-advantage))
