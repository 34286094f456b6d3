# SPDX-License-Identifier: Apache-2.0
"""Modules that are built without memory."""

import pytest
import torch
from torch import nn

from imaginaire.errors import TrainingError
from imaginaire.training.model import has_meta, require_memory, to_device


def _half_built() -> nn.Sequential:
    with torch.device("meta"):
        late = nn.BatchNorm2d(3)
    return nn.Sequential(nn.Conv2d(3, 3, 1), late)


def test_what_has_memory_is_moved_and_the_rest_stays() -> None:
    module = _half_built()
    weight = module[0].weight
    to_device(module, torch.device("cpu"), torch.channels_last)
    assert module[0].weight is weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert all(tensor.is_meta for tensor in [*module[1].parameters(), *module[1].buffers()])
    whole = nn.Conv2d(3, 3, 2)
    to_device(whole, torch.device("cpu"), torch.channels_last)
    assert whole.weight.is_contiguous(memory_format=torch.channels_last)


def test_what_never_got_memory_is_named() -> None:
    module = _half_built()
    with pytest.raises(TrainingError, match=r"5 of the 7 parameters and buffers of Sequential .*1\.weight, 1\.bias"):
        require_memory(module)
    module.to_empty(device="cpu")
    assert not has_meta(module)
    require_memory(module)
