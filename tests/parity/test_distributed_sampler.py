# SPDX-License-Identifier: Apache-2.0
"""How samples are divided among ranks, against golden values."""

import pytest

from cosmos_predict2.data.loaders import get_sampler
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import ParallelDims
from tests.goldens import Value

AREA = "training"


@pytest.mark.golden_cases("frame_selection.json", "distributed_sampler")
def test_ranks_get_these_samples(case: Value, monkeypatch: pytest.MonkeyPatch) -> None:
    num_replicas, by_rank = case["num_replicas"].use(), case["indices_by_rank"]
    assert sorted(map(int, by_rank)) == list(range(num_replicas))
    for rank in by_rank:
        monkeypatch.setattr(parallel, "_current", ParallelDims(world_size=num_replicas, rank=int(rank)))
        sampler = get_sampler(range(case["dataset_len"].use()))
        case["seed"].compare(sampler.seed)
        sampler.set_epoch(case["epoch"].use())
        by_rank[rank].compare(list(sampler))
