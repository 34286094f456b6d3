# SPDX-License-Identifier: Apache-2.0
"""Samples of each rank with a plain torch DataLoader, as published experiments build it.

    DataLoader(dataset, sampler=get_sampler(dataset), batch_size=1, drop_last=True, num_workers=8)

Ranks are data-parallel ones: those of one context-parallel group hold parts of the same sample. Our own experiments use
`imaginaire.data.stream.ResumableLoader`, which divides the samples itself; the trainer resumes both by index.
"""

from typing import Any

from torch.utils.data import DistributedSampler

from imaginaire.distributed.parallel import current_dims


def get_sampler(dataset: Any) -> "DistributedSampler[Any]":
    """The shuffled sampler of this data-parallel rank; the order follows from the epoch alone."""
    dims = current_dims()
    return DistributedSampler(dataset, num_replicas=dims.dp_size, rank=dims.dp_rank, shuffle=True, seed=0)
