# SPDX-License-Identifier: Apache-2.0
"""Cutting, putting together and exchanging tensors in a group, and the gradients of it."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from imaginaire.distributed import parallel
from imaginaire.distributed.context_parallel import exchange, gather, split
from tests.multiprocess import run_distributed

SHAPE = (2, 4, 8, 3)  # batch, tokens, heads, width


def _whole() -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _weights() -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _operations() -> None:
    group = parallel.init_dims(2).cp_group
    rank = group.rank()  # type: ignore[union-attr]
    whole, weights = _whole(), _weights()

    tokens = split(whole, 1, group).requires_grad_()
    assert_close(tokens, whole[:, 2 * rank : 2 * rank + 2], rtol=0, atol=0)
    heads = exchange(tokens, 2, 1, group)
    assert_close(heads, whole[:, :, 4 * rank : 4 * rank + 4], rtol=0, atol=0)
    assert_close(exchange(heads, -3, -2, group), tokens, rtol=0, atol=0)
    (heads**2 * weights[:, :, 4 * rank : 4 * rank + 4]).sum().backward()
    assert_close(tokens.grad, (2 * whole * weights)[:, 2 * rank : 2 * rank + 2])

    tokens.grad = None
    gathered = gather(tokens, 1, group)
    assert_close(gathered, whole, rtol=0, atol=0)
    (gathered**2 * weights * (rank + 1)).sum().backward()  # both ranks use every part: 1 + 2
    assert_close(tokens.grad, 3 * (2 * whole * weights)[:, 2 * rank : 2 * rank + 2])

    integers = torch.arange(2).add(2 * rank)
    assert gather(integers, 0, group).tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="not a multiple of the 2 processes"):
        split(whole[..., :3], 3, group)
    with pytest.raises(ValueError, match="not a multiple of the 2 processes"):
        exchange(whole, 3, 1, group)


@pytest.mark.slow
def test_parts_and_their_gradients() -> None:
    run_distributed(_operations, 2)


def test_a_group_of_none_is_a_group_of_one() -> None:
    whole = _whole()
    assert split(whole, 1, None) is gather(whole, 1, None) is exchange(whole, 1, 2, None) is whole
