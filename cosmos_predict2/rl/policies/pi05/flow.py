# SPDX-License-Identifier: Apache-2.0
"""The steps from noise (t = 1) to actions (t = 0) that PI0.5 decides by, each a normal distribution with a probability.

    times = step_times(K)
    mean, std = flow_step("flow_sde", times, index_B, x_B_H_D, v_B_H_D, level_B)
    log_prob = step_log_prob(x_next, mean, std)

All of it is float32: old and new probabilities are compared to parts in 1e5. Letters: B decisions, H actions of the
model's horizon, D their numbers, K steps.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from imaginaire.errors import ConfigError

METHODS = ("flow_sde", "flow_cps", "flow_noise")
EVAL = "eval"  # no noise: the ordinary differential equation


def step_times(num_steps: int) -> Tensor:
    """1, 1 - 1/K, ..., 1/K and exactly 0, [K + 1]: with a rounded 0 the last flow_cps step has no log-probability."""
    return torch.cat([torch.linspace(1, 1 / num_steps, num_steps), torch.zeros(1)])


def noise_level(level: float, is_annealed: bool, params: Sequence[float], step: int) -> float:
    """Noise that is added at a step of the trainer: annealed from params[0] to params[1] over params[2] steps."""
    if not is_annealed:
        return level
    first, last, steps = params
    return first + (last - first) * min(step, steps) / steps


def flow_step(
    method: str,
    times: Tensor,
    index_B: Tensor,
    x_B_H_D: Tensor,
    v_B_H_D: Tensor,
    level_B: Tensor,
    std_B_H_D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of what follows ``x`` at step ``index``; ``std`` comes from flow_noise's head."""
    x, v = x_B_H_D.float(), v_B_H_D.float()
    times = times.to(x)
    t, after = (times[index_B + k][:, None, None] for k in (0, 1))
    level = level_B.to(x)[:, None, None]
    data, noise = x - v * t, x + v * (1 - t)
    mean = (1 - after) * data + after * noise
    if method == EVAL:
        return mean, torch.zeros_like(mean)
    if method == "flow_noise":
        assert std_B_H_D is not None
        return mean, std_B_H_D.float()
    if method == "flow_cps":
        angle = 0.5 * math.pi * level
        mean = (1 - after) * data + after * torch.cos(angle) * noise
        return mean, (after * torch.sin(angle)).expand_as(mean)
    if method != "flow_sde":
        raise ConfigError(f"noise_method={method!r}, but it must be one of: {', '.join(METHODS)}.")
    step = t - after
    rate = level * torch.sqrt(t / (1 - torch.where(t == 1, times[1], t)))
    mean = (1 - after) * data + (after - rate.square() * step / (2 * t)) * noise
    return mean, (rate * step.sqrt()).expand_as(mean)


def step_log_prob(x_next: Tensor, mean: Tensor, std: Tensor, *, is_safe: bool = False) -> Tensor:
    """Log-probabilities by number, 0 where nothing was drawn; ``is_safe`` is the published substitute -(x - mean)^2."""
    off = x_next.float() - mean
    if is_safe:
        return -off.square()
    is_drawn = std > 0
    std = torch.where(is_drawn, std, 1.0)
    log_prob = -torch.log(std) - 0.5 * math.log(2 * math.pi) - 0.5 * (off / std).square()
    return torch.where(is_drawn, log_prob, 0.0)


def noise_log_prob(noise: Tensor, std: Tensor, *, is_safe: bool = False) -> Tensor:
    """The same of a step that was drawn as mean + std * noise, by the noise itself."""
    if is_safe:
        return -(std * noise).square()
    of_unit = -0.5 * noise.square() - 0.5 * math.log(2 * math.pi)
    return torch.where(std > 0, of_unit - torch.log(std), 0.0)


def start_log_prob(x: Tensor) -> Tensor:
    """The log-probability of the noise that a decision began with."""
    return -0.5 * math.log(2 * math.pi) - 0.5 * x.float().square()


def step_entropy(std: Tensor) -> Tensor:
    """The entropy of each number; what was not drawn counts as drawn with deviation 1, as published."""
    return 0.5 * math.log(2 * math.pi * math.e) + torch.log(torch.where(std > 0, std, 1.0))
