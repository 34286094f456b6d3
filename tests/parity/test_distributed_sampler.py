# SPDX-License-Identifier: Apache-2.0
"""How samples are divided among ranks, against golden values."""

import pytest

from cosmos_predict2.data.loaders import distributed_indices
from tests.goldens import Value

AREA = "training"


@pytest.mark.golden_cases("frame_selection.json", "distributed_sampler")
def test_ranks_get_these_samples(case: Value) -> None:
    options = {key: case[key].use() for key in ("dataset_len", "num_replicas", "seed", "epoch")}
    by_rank = case["indices_by_rank"]
    assert sorted(map(int, by_rank)) == list(range(options["num_replicas"]))
    for rank in by_rank:
        by_rank[rank].compare(distributed_indices(rank=int(rank), **options))
