# SPDX-License-Identifier: Apache-2.0
"""The random numbers of a training batch: functions of the run's seed and each sample's place in the stream."""

import torch
from torch import Tensor

from imaginaire import random


class Draws:
    """The random numbers of a batch: of each sample by its position, or of all from torch's global generator."""

    def __init__(self, size: int, positions: list[int] | None, seed: int = 0, pass_name: str = "train") -> None:
        self._size = size
        self._positions = positions
        self._seed = seed
        self._pass_name = pass_name

    def each(self, purpose: str) -> list[torch.Generator] | int:
        """One generator per sample, or, without positions, how many samples there are."""
        if self._positions is None:
            return self._size
        return [random.generator(self._seed, position, f"{self._pass_name}/{purpose}") for position in self._positions]

    def uniform(self, count: int, purpose: str) -> Tensor:
        """[B, count] in [0, 1), float64."""
        generators = self.each(purpose)
        if isinstance(generators, int):
            return torch.rand(generators, count, dtype=torch.float64)
        return torch.stack([torch.rand(count, dtype=torch.float64, generator=g) for g in generators])

    def integers(self, low: int, high: int, purpose: str) -> Tensor:
        """[B], each from low to high - 1."""
        generators = self.each(purpose)
        if isinstance(generators, int):
            return torch.randint(low, high, (generators,))
        return torch.cat([torch.randint(low, high, (1,), generator=g) for g in generators])

    def normal(self, shape: tuple[int, ...] | torch.Size, purpose: str) -> Tensor:
        """Standard normal float32 of a shape that begins with the batch."""
        generators = self.each(purpose)
        if isinstance(generators, int):
            return torch.randn(shape)
        return torch.stack([torch.randn(shape[1:], generator=g) for g in generators])
