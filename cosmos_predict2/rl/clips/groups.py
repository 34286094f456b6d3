# SPDX-License-Identifier: Apache-2.0
"""The members of groups that a rank rolls out, their random numbers, and the scores of groups from all ranks.

A group has the same conditions. It is rolled out by ``ranks`` neighbouring data-parallel ranks, which read the same
samples, each some of its members; with 1, every rank has whole groups of its own.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
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
        """The number of this rank's batch among those of all ranks; ranks that share groups have the same."""
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

    def __init__(self, batch: Mapping[str, Any], seed: int, groups: Groups, first: int | None = None) -> None:
        """``first`` is that of a rollout to which this one adds groups; else the first place of the first rank."""
        self.seed = seed
        self.positions: list[int] = batch[POSITION_KEY].tolist()
        if first is None:
            with places.at("agreeing on the draws of a rollout"):
                first = distributed.broadcast_object(self.positions[0])
        self.first = first
        members = torch.tensor(groups.members)  # the condition and the member of each sample of this rank
        self.rows = torch.arange(len(batch["fps"])).repeat_interleave(len(members))
        self.members = members.repeat(len(batch["fps"]))

    def of(self, samples: Tensor) -> "RowDraws":
        """Those of some of the samples."""
        found = copy.copy(self)
        found.rows, found.members = self.rows[samples], self.members[samples]
        return found

    def with_others(self, others: Sequence["RowDraws"]) -> "RowDraws":
        """Those of several batches, one after the other."""
        found, parts = copy.copy(self), [self, *others]
        found.positions = [position for part in parts for position in part.positions]
        starts = itertools.accumulate((len(part.positions) for part in parts), initial=0)
        found.rows = torch.cat([part.rows + start for part, start in zip(parts, starts)])
        found.members = torch.cat([part.members for part in parts])
        return found

    def _generators(self, rows: Tensor, members: Tensor, purpose: str) -> Iterator[torch.Generator]:
        for row, member in zip(rows.tolist(), members.tolist(), strict=True):
            yield random.generator(self.seed, self.positions[row], f"rl/{purpose}/{member}")

    def normal(self, shape: tuple[int, ...], rows: Tensor, members: Tensor, purpose: str) -> Tensor:
        return torch.stack([torch.randn(shape, generator=g) for g in self._generators(rows, members, purpose)])

    def uniform(self, count: int, rows: Tensor, members: Tensor, purpose: str) -> Tensor:
        drawn = [torch.rand(count, dtype=torch.float64, generator=g) for g in self._generators(rows, members, purpose)]
        return torch.stack(drawn)

    def permutation(self, count: int, purpose: str) -> list[int]:
        """The same for the batches of all ranks and for all rollouts of an experience: it follows from ``first``."""
        generator = random.generator(self.seed, self.first, f"rl/{purpose}")
        drawn: list[int] = torch.randperm(count, generator=generator).tolist()
        return drawn

    def shuffled(self, steps: list[int], update: int) -> list[int]:
        """The steps in the order of one update."""
        return [steps[i] for i in self.permutation(len(steps), f"order{update}")]
