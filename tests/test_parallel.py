# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from imaginaire import distributed, parallel
from imaginaire.errors import ConfigError
from imaginaire.parallel import GradientAverager, ParallelDims
from tests.multiprocess import RankError, run_distributed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 1)
        self.idle = nn.Linear(5, 1)

    def forward(self, x: Tensor, use_idle: bool = False) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.idle(x) if use_idle else self.head(x)


def _net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _data() -> Tensor:
    return torch.randn(8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _grads(net: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else parallel.full_tensor(p.grad).clone() for n, p in net.named_parameters()}


def _single(max_norm: float) -> tuple[dict[str, Tensor | None], float]:
    net = _net()
    net(_data()).square().mean().backward()
    norm = parallel.clip_grad_norm_(net.parameters(), max_norm)
    return _grads(net), float(norm)


def _on_ranks(layout: str, micro_batches: int, max_norm: float) -> tuple[dict[str, Tensor | None], float]:
    dims = parallel.init_dims()
    net = _net()
    if layout != "replicate":
        shard = {"fsdp": -1, "hsdp": 2}[layout]
        parallel.shard_blocks(net, net.blocks, dims.fsdp_mesh(shard))
    averager = GradientAverager(net, static_graph=True, find_unused_parameters=False)
    for _ in range(2):  # the second step runs with what the first agreed on
        net.zero_grad()
        mine = _data().tensor_split(dims.dp_size)[dims.dp_rank].tensor_split(micro_batches)
        for i, micro in enumerate(mine):
            is_last = i == micro_batches - 1
            parallel.set_gradient_sync(net, is_last)
            if is_last:
                averager.arm()
            (net(micro).square().mean() / micro_batches).backward()
            averager.finish()
    norm = parallel.clip_grad_norm_(net.parameters(), max_norm)
    return _grads(net), float(norm)


@pytest.mark.slow
def test_every_layout_has_the_gradients_of_one_process() -> None:
    for max_norm in (1e9, 1e-3):
        expected, norm = _single(max_norm)
        cases = [("replicate", 1), ("replicate", 2), ("fsdp", 2)]
        for values in run_distributed(_all_layouts, 2, args=(cases, max_norm)):
            for found, found_norm in values:
                assert found_norm == pytest.approx(norm, rel=1e-12)
                assert found["idle.weight"] is None
                for name, grad in expected.items():
                    if grad is not None:
                        assert_close(found[name], grad, rtol=1e-10, atol=1e-14)


def _all_layouts(cases: list[tuple[str, int]], max_norm: float) -> list[Any]:
    return [_on_ranks(layout, micro, max_norm) for layout, micro in cases]


def _uneven(find_unused: bool, static: bool) -> dict[str, Tensor | None]:
    net = _net()
    averager = GradientAverager(net, static_graph=static, find_unused_parameters=find_unused)
    averager.arm()
    net(_data(), use_idle=distributed.rank() == 1).square().mean().backward()
    averager.finish()
    return _grads(net)


@pytest.mark.slow
def test_a_parameter_used_on_one_rank_only_is_averaged_or_named() -> None:
    with pytest.raises(RankError, match=r"among them (idle|head)\..*find_unused_parameters=True"):
        run_distributed(_uneven, 2, args=(False, True))
    first, second = run_distributed(_uneven, 2, args=(True, False))
    net = _net()
    net(_data(), use_idle=True).square().mean().backward()
    for values in (first, second):
        assert_close(values["idle.weight"], net.idle.weight.grad / 2)


def test_norm_is_taken_in_float32_of_half_precision_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(70000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 1.0)
    assert float(parallel.clip_grad_norm_([parameter], 1.0)) == pytest.approx(70000**0.5, rel=1e-6)
    assert float(parallel.clip_grad_norm_([], 1.0)) == 0.0


def test_sizes_that_do_not_divide_are_refused_with_those_that_do() -> None:
    with pytest.raises(
        ConfigError, match=r"fsdp_shard_size=4 does not divide the 6 processes. Use one of \[1, 2, 3, 6\]"
    ):
        ParallelDims(world_size=6).fsdp_mesh(4)
    with pytest.raises(ConfigError, match="context_parallel_size=4 does not divide the 6 processes"):
        parallel.check_context_parallel_size(4, 6)
    assert ParallelDims(world_size=6, replicate_only=True).fsdp_mesh(-1) is None
    assert ParallelDims().fsdp_mesh(-1) is None


def test_ranks_of_one_context_parallel_group_are_neighbours() -> None:
    places = [ParallelDims(world_size=4, rank=rank, context_parallel_size=2) for rank in range(4)]
    assert [(d.dp_rank, d.cp_rank) for d in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {d.dp_size for d in places} == {2}
