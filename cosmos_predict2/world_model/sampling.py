# SPDX-License-Identifier: Apache-2.0
"""Parts of the sampling of a world model: the options, the first noise, and pixels as bytes."""

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from cosmos_predict2.world_model.options import GUIDED, UNGUIDED, SamplingOptions
from imaginaire.errors import ConfigError

__all__ = ["GUIDED", "UNGUIDED", "SamplingOptions", "initial_noise", "to_uint8"]


def initial_noise(shape: tuple[int, ...], seed: int | Sequence[int]) -> Tensor:
    """Standard normal float32 from NumPy's RandomState: the same on every device and number of processes.

    With a seed for each sample, each is what a batch of it alone gets.
    """
    if not isinstance(seed, int):
        if len(seed) != shape[0]:
            raise ConfigError(f"There are {len(seed)} seeds for a batch of {shape[0]}: one for each sample.")
        return torch.cat([initial_noise((1, *shape[1:]), int(one)) for one in seed])
    return torch.from_numpy(numpy.random.RandomState(seed).standard_normal(shape).astype(numpy.float32))


def to_uint8(video: Tensor) -> Tensor:
    """[-1, 1] to 0 ... 255, rounded."""
    return video.float().clamp(-1, 1).add_(1).mul_(127.5).round_().to(torch.uint8)
