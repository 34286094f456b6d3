# SPDX-License-Identifier: Apache-2.0
"""Which rank reads which samples with a plain torch DataLoader, as published experiments build it.

    DataLoader(dataset, sampler=get_sampler(dataset), batch_size=1, drop_last=True, num_workers=8)

Ranks are data-parallel ones: those of one context-parallel group hold parts of the same sample. Our own experiments use
`imaginaire.data.ResumableLoader`, which divides the samples itself; the trainer resumes both by index.
"""

from typing import Any

import torch
from torch.utils.data import DistributedSampler

from imaginaire.errors import ConfigError
from imaginaire.parallel import current_dims


def get_sampler(dataset: Any) -> "DistributedSampler[Any]":
    """The shuffled sampler of this data-parallel rank; the order follows from the epoch alone."""
    dims = current_dims()
    return DistributedSampler(dataset, num_replicas=dims.dp_size, rank=dims.dp_rank, shuffle=True, seed=0)


def distributed_indices(
    dataset_len: int, num_replicas: int, rank: int, seed: int = 0, epoch: int = 0, shuffle: bool = True
) -> list[int]:
    """The samples of a rank in one epoch, in order: what torch's DistributedSampler (drop_last=False) gives it.

    Every rank gets as many: the order is continued from its own beginning until it divides.
    """
    if dataset_len < 1:
        raise ConfigError(f"dataset_len={dataset_len}: there is nothing to divide among ranks.")
    if not 0 <= rank < num_replicas:
        raise ConfigError(f"rank={rank} of num_replicas={num_replicas}: a rank is one of 0 to num_replicas - 1.")
    if shuffle:
        order = torch.randperm(dataset_len, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
    else:
        order = list(range(dataset_len))
    per_rank = -(-dataset_len // num_replicas)
    return [order[place % dataset_len] for place in range(rank, per_rank * num_replicas, num_replicas)]
