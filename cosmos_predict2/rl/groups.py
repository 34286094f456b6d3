# SPDX-License-Identifier: Apache-2.0
"""Which members of which groups a rank rolls out, and how the scores of whole groups come together.

A group has the same conditions. It is rolled out by ``ranks`` neighbouring data-parallel ranks, which read the same
samples, each some of its members; with 1, every rank has whole groups of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Scores
from imaginaire import distributed
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
