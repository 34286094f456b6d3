# SPDX-License-Identifier: Apache-2.0
"""The loss at fixed noise levels with fixed noise, so that validations can be compared.

A validation sees every sample at each level of ``validation_sigmas``. The noise follows from the run's seed and the
sample's position, so it is the same in every validation and in every layout of processes; the text is kept, and as few
latent frames are given as the config allows. Two validations of a run differ by the weights alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from imaginaire.errors import ConfigError

# Training draws levels around sqrt(state_t), 5 for the released models: these lie there and a factor of 10 around.
RELEASED_SIGMAS = (0.5, 1.0, 2.0, 4.0, 9.0, 19.0, 39.0, 80.0)
TINY_SIGMAS = (1.0, 1.9, 3.5, 6.5, 12.0, 23.0, 43.0, 80.0)  # the tiny model is trained near pure noise

# Noise levels [B, 1] -> the parts of the model's loss at them, and the loss.
LossAt = Callable[[Tensor], tuple[dict[str, Any], Tensor]]


def sigma_name(sigma: float) -> str:
    """The metric of the loss at one level."""
    return f"loss_sigma_{sigma:g}"


def check_sigmas(instance: Any, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    """A validator: noise levels above 0, each once."""
    levels = list(value)
    if not all(isinstance(level, (int, float)) and 0 < level < float("inf") for level in levels):
        raise ConfigError(f"{attribute.name}={levels}, but noise levels are numbers above 0 (empty: as in training).")
    if len({sigma_name(level) for level in levels}) < len(levels):
        raise ConfigError(f"{attribute.name}={levels} has a level twice.")


def losses_by_sigma(
    loss_at: LossAt, sigmas: Sequence[float], like_B: Tensor, sample_weight_B: Tensor | None = None
) -> tuple[dict[str, Any], Tensor]:
    """The mean loss of a batch at each level as metrics ``loss_sigma_<level>``, and the mean over the levels.

    ``like_B`` has the batch's size, device and precision. Samples of weight 0 (those that another rank has, too) do not
    count.
    """
    metrics: dict[str, Any] = {}
    edm_losses = []
    for sigma in sigmas:
        output, loss = loss_at(torch.full((len(like_B), 1), float(sigma), dtype=like_B.dtype, device=like_B.device))
        edm_loss, loss = counted_losses(output, loss, sample_weight_B)
        metrics[sigma_name(sigma)] = loss
        edm_losses.append(edm_loss)
    mean = torch.stack(list(metrics.values())).mean()
    return {**metrics, "edm_loss": torch.stack(edm_losses).mean()}, mean


def counted_losses(output: Mapping[str, Any], loss: Tensor, sample_weight_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """``edm_loss`` and the loss of a batch, of its samples of weight 1 alone; None: of all."""
    edm_loss: Tensor = output["edm_loss"]
    if sample_weight_B is None:
        return edm_loss, loss
    counted = _weighted_mean(output["edm_loss_per_frame"].mean(dim=1), sample_weight_B)
    return counted, loss * counted / edm_loss.clamp(min=torch.finfo(edm_loss.dtype).tiny)


def _weighted_mean(value_B: Tensor, weight_B: Tensor) -> Tensor:
    weight_B = weight_B.to(value_B)
    return (value_B * weight_B).sum() / weight_B.sum().clamp(min=1)
