# SPDX-License-Identifier: Apache-2.0
"""Modules that are built without memory."""

import pytest
import torch
from torch import nn

from imaginaire.distributed import meta_device
from imaginaire.distributed.parallel import ParallelDims
from imaginaire.errors import TrainingError


def _half_built() -> nn.Sequential:
    with torch.device("meta"):
        late = nn.BatchNorm2d(3)
    return nn.Sequential(nn.Conv2d(3, 3, 1), late)


def test_what_has_memory_is_moved_and_the_rest_stays() -> None:
    module = _half_built()
    weight = module[0].weight
    meta_device.move_to(module, torch.device("cpu"), torch.channels_last)
    assert module[0].weight is weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert all(tensor.is_meta for tensor in [*module[1].parameters(), *module[1].buffers()])
    whole = nn.Conv2d(3, 3, 2)
    meta_device.move_to(whole, torch.device("cpu"), torch.channels_last)
    assert whole.weight.is_contiguous(memory_format=torch.channels_last)


def test_what_never_got_memory_is_named() -> None:
    module = _half_built()
    with pytest.raises(TrainingError, match=r"5 of the 7 parameters and buffers of Sequential .*1\.weight, 1\.bias"):
        meta_device.require_memory(module)
    module.to_empty(device="cpu")
    assert not meta_device.has_meta(module)
    meta_device.require_memory(module)


@pytest.mark.parametrize(
    ("dims", "shard_size", "expected"),
    [
        (ParallelDims(world_size=4), 0, False),
        (ParallelDims(world_size=4), -1, True),
        (ParallelDims(world_size=4), 1, True),  # a mesh of one shard, replicated
        (ParallelDims(world_size=1), 8, False),
        (ParallelDims(world_size=4, replicate_only=True), 8, False),
    ],
)
def test_whether_a_model_will_be_sharded(dims: ParallelDims, shard_size: int, expected: bool) -> None:
    assert dims.will_shard(shard_size) is expected
