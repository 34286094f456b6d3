# SPDX-License-Identifier: Apache-2.0
"""Which members of which groups a rank rolls out, their random numbers, and how the scores of groups come together.

A group has the same conditions. It is rolled out by ``ranks`` neighbouring data-parallel ranks, which read the same
samples, each some of its members; with 1, every rank has whole groups of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Scores
from imaginaire import distributed, random
from imaginaire.data.stream import POSITION_KEY
from imaginaire.distributed import places
from imaginaire.distributed.parallel import ParallelDims


@dataclass(frozen=True)
class Groups:
    """The groups of a batch on the ranks of a run. Scores and advantages are [N, members], a group in each row."""

    num_rollout: int
    ranks: int = 1
    dims: ParallelDims = field(default_factory=ParallelDims)

    @property
    def batch_number(self) -> int:
        """Which of the batches of all ranks this rank has; ranks that share groups have the same."""
        return self.dims.dp_rank // self.ranks

    @property
    def members(self) -> range:
        """Those of each group that this rank rolls out."""
        share = self.num_rollout // self.ranks
        first = self.dims.dp_rank % self.ranks * share
        return range(first, first + share)

    def gathered(self, scores: Mapping[str, Scores]) -> dict[str, Scores]:
        """The scores of all groups of all ranks, from those of each rank's members; the same on every rank."""
        with places.at("gathering the scores of all ranks"):
            of_ranks = distributed.all_gather_object(dict(scores))
        of_ranks = of_ranks[self.dims.cp_rank :: self.dims.context_parallel_size]
        return {name: self._whole([each[name] for each in of_ranks]) for name in scores}

    def own(self, value_N_G: Tensor) -> Tensor:
        """This rank's part of a number for each sample of all groups."""
        rows = value_N_G.chunk(self.dims.dp_size // self.ranks)[self.batch_number]
        return rows[:, self.members.start : self.members.stop]

    def _whole(self, of_ranks: list[Scores]) -> Scores:
        names = set.intersection(*(set(one.parts) for one in of_ranks))
        return Scores(
            self._rows([one.value_B for one in of_ranks]),
            self._rows([one.is_valid_B for one in of_ranks]),
            {name: self._rows([one.parts[name] for one in of_ranks]) for name in sorted(names)},
        )

    def _rows(self, of_ranks: list[Tensor]) -> Tensor:
        batches = [of_ranks[i : i + self.ranks] for i in range(0, len(of_ranks), self.ranks)]
        return torch.cat([torch.cat(parts, dim=1) for parts in batches])


class RowDraws:
    """Draws of a rollout: each follows from the run's seed, the condition's place in the stream and the member."""

    def __init__(self, batch: Mapping[str, Any], seed: int, groups: Groups) -> None:
        self.size = len(batch["fps"])
        self.seed = seed
        self.groups = groups
        self.positions: list[int] = batch[POSITION_KEY].tolist()
        with places.at("agreeing on the draws of a rollout"):
            self.first = distributed.broadcast_object(self.positions[0])

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
        """The same for the batches of all ranks: it follows from the first place of the first rank."""
        generator = random.generator(self.seed, self.first, f"rl/{purpose}")
        drawn: list[int] = torch.randperm(count, generator=generator).tolist()
        return drawn

    def shuffled(self, steps: list[int], update: int) -> list[int]:
        """The steps in the order of one update."""
        return [steps[i] for i in self.permutation(len(steps), f"order{update}")]
