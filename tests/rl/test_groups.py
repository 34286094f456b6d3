# SPDX-License-Identifier: Apache-2.0
"""Groups on several ranks: who rolls out what, and that scores come back to the clips they are of."""

import pytest
import torch

from cosmos_predict2.rl.groups import Groups
from cosmos_predict2.rl.interfaces import Scores
from imaginaire import distributed
from imaginaire.distributed.parallel import ParallelDims


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_scores_of_all_ranks_are_whole_groups_and_each_gets_its_own_back(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight processes of which pairs are context-parallel, two conditions a batch; a score names its clip."""
    every = [Groups(4, ranks, ParallelDims(8, rank, 2)) for rank in range(8)]
    of_ranks = []
    for groups in every:
        condition = torch.arange(2)[:, None] + 2 * groups.batch_number
        value = 10.0 * condition + torch.tensor(groups.members)
        of_ranks.append({"reward": Scores(value, value > 0, {"part": -value})})
    monkeypatch.setattr(distributed, "all_gather_object", lambda value: of_ranks)
    wanted = 10.0 * torch.arange(8 // ranks)[:, None] + torch.arange(4)
    for groups, scores in zip(every, of_ranks, strict=True):
        found = groups.gathered(scores)["reward"]
        assert torch.equal(found.value_B, wanted)
        assert torch.equal(found.is_valid_B, wanted > 0)
        assert torch.equal(found.parts["part"], -wanted)
        assert torch.equal(groups.own(wanted), scores["reward"].value_B)
