# SPDX-License-Identifier: Apache-2.0
"""How a world model is sampled: the options, the first noise, and pixels as bytes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from imaginaire.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """What all requests of a run share; handed on whole from the flags of a program to the sampler."""

    guidance: float = 0.0  # away from the negative prompt, or without one from no text; 0: the network runs once a step
    num_steps: int = 35
    solver: str | None = None  # None: that of the model's objective
    use_cuda_graphs: bool = False
    progress: bool = False  # show a bar

    def record(self) -> dict[str, Any]:
        """What changes or describes a result, as plain values."""
        return {key: value for key, value in asdict(self).items() if key != "progress"}


UNGUIDED = SamplingOptions()
GUIDED = SamplingOptions(guidance=7.0)  # the published scale, for prompts


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
    return ((video.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
