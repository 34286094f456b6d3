# SPDX-License-Identifier: Apache-2.0
"""The random numbers of rollouts, as functions of the run's seed, a condition's place in the stream and a member."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.groups import Groups
from imaginaire import random
from imaginaire.data.stream import POSITION_KEY


class RowDraws:
    """Draws of a rollout: each follows from the run's seed, the condition's place in the stream and the member."""

    def __init__(self, batch: Mapping[str, Any], seed: int, groups: Groups) -> None:
        positions = batch.get(POSITION_KEY)
        self.size = len(batch["fps"])
        self.seed = seed
        self.groups = groups
        self.positions = list(range(self.size)) if positions is None else positions.tolist()

    def all_rows(self) -> tuple[Tensor, Tensor]:
        """The condition and the member of each sample of this rank."""
        members = torch.tensor(self.groups.members)
        return torch.arange(self.size).repeat_interleave(len(members)), members.repeat(self.size)

    def _generators(self, rows: Tensor, members: Tensor, purpose: str) -> Iterator[torch.Generator]:
        for row, member in zip(rows.tolist(), members.tolist(), strict=True):
            yield random.generator(self.seed, self.positions[row], f"rl/{purpose}/{member}")

    def normal(self, shape: tuple[int, ...], rows: Tensor, members: Tensor, purpose: str) -> Tensor:
        return torch.stack([torch.randn(shape, generator=g) for g in self._generators(rows, members, purpose)])

    def uniform(self, count: int, rows: Tensor, members: Tensor, purpose: str) -> Tensor:
        drawn = [torch.rand(count, dtype=torch.float64, generator=g) for g in self._generators(rows, members, purpose)]
        return torch.stack(drawn)

    def permutation(self, count: int, purpose: str) -> list[int]:
        """The same for the batches of all ranks: it follows from the first place among them."""
        first = self.positions[0] - self.groups.batch_number * self.size
        generator = random.generator(self.seed, first, f"rl/{purpose}")
        drawn: list[int] = torch.randperm(count, generator=generator).tolist()
        return drawn

    def shuffled(self, steps: list[int], update: int) -> list[int]:
        """The steps in the order of one update."""
        return [steps[i] for i in self.permutation(len(steps), f"order{update}")]
