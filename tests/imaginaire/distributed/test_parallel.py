# SPDX-License-Identifier: Apache-2.0
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from imaginaire import distributed
from imaginaire.distributed import parallel
from imaginaire.distributed.context_parallel import exchange, gather, split
from imaginaire.distributed.parallel import GradientAverager, ParallelDims
from imaginaire.errors import ConfigError
from tests.multiprocess import run_distributed


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


def _uneven(find_unused: bool, static: bool) -> dict[str, Tensor | None]:
    net = _net()
    averager = GradientAverager(net, static_graph=static, find_unused_parameters=find_unused)
    net(_data(), use_idle=distributed.rank() == 1).square().mean().backward()
    averager()
    return _grads(net)


def _whole_steps() -> list[dict[str, Tensor | None]]:
    """The gradients of two steps, each rank with half of the batch, in a bucket for each parameter."""
    parallel._BUCKET_BYTES = 8
    net = _net()
    averager = GradientAverager(net, static_graph=True, find_unused_parameters=False)
    steps = []
    for batch in _data().split(4):
        net.zero_grad()
        net(batch.tensor_split(2)[distributed.rank()]).square().mean().backward()
        averager()
        steps.append(_grads(net))
    net.zero_grad()
    net(_data(), use_idle=True).mean().backward()
    with pytest.raises(ConfigError, match=r"parameter (idle|head)\.\w+ .* gradient, unlike.*static_graph=False"):
        averager()
    return steps


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)  # another tensor at each step
        self.scratch += x.mean()
        self.mask |= x.mean() > 0
        return self.norm(x)


def _buffers_after_steps(enabled: bool) -> dict[str, Tensor]:
    net = Normed()
    broadcast = parallel.BufferBroadcaster(net, enabled)
    data = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(distributed.rank())) + distributed.rank() - 0.5
    for batch in data:
        net(batch)
        broadcast()
    return dict(net.named_buffers())


class Odd(nn.Module):
    """Tensors of many kinds, with values that differ between ranks."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 4), value))
        self.small = nn.Parameter(torch.full((7,), value, dtype=torch.bfloat16))
        self.conv = nn.Parameter(torch.full((2, 3, 2, 2), value).to(memory_format=torch.channels_last))
        self.large = nn.Parameter(torch.full((1000,), value))
        self.frozen = nn.Parameter(torch.full((), value), requires_grad=False)
        self.register_buffer("count", torch.tensor(int(value)))
        self.register_buffer("is_odd", torch.tensor([value == 1.0]))
        self.register_buffer("wide", torch.tensor([value]).expand(4))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("later", torch.zeros(3, device="meta"))
        self.register_buffer("complex", torch.tensor([complex(value, 1.0)]))


def _synchronised() -> tuple[dict[str, Tensor], list[str | None]]:
    parallel._MESSAGE_BYTES, parallel._CHECKSUM_NUMEL = 1024, 300  # `large` takes several of both
    rank = distributed.rank()
    net = Odd(float(rank))
    differing = [parallel.replicas_equal(net)]
    parallel.synchronise_replicas(net)
    differing.append(parallel.replicas_equal(net))
    if rank == 1:
        net.conv.data[1, 2, 1, 1] = 1e-30
    differing.append(parallel.replicas_equal(net))
    net.conv.data.fill_(float("nan"))  # equal bits, although no NaN equals another
    if rank == 1:
        net.large.data[:2] = torch.tensor([1.0, 2.0])
    else:
        net.large.data[:2] = torch.tensor([2.0, 1.0])
    differing.append(parallel.replicas_equal(net))
    return {n: t.detach() for n, t in net.state_dict().items() if not t.is_meta}, differing


def _norms() -> list[float]:
    mesh = init_device_mesh("cpu", (2,))
    part = torch.tensor([3.0, 4.0])
    return [
        float(parallel.grad_norm([DTensor.from_local(part, mesh, [placement], run_check=False)]))
        for placement in (Shard(0), _StridedShard(0, split_factor=1), Replicate())
    ]


def _sharded_after_synchronising() -> Tensor:
    torch.manual_seed(distributed.rank())
    net = Net()
    parallel.synchronise_replicas(net)
    parallel.shard_blocks(net, net.blocks, parallel.init_dims().fsdp_mesh(-1))
    parallel.synchronise_replicas(net)  # leaves sharded weights alone
    assert parallel.replicas_equal(net) is None
    return parallel.full_tensor(net.head.weight)


SHAPE = (2, 4, 8, 3)  # batch, tokens, heads, width


def _tokens() -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _weights() -> Tensor:
    return torch.randn(SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _context_parallel_operations() -> None:
    group = parallel.init_dims(2).cp_group
    rank = group.rank()  # type: ignore[union-attr]
    whole, weights = _tokens(), _weights()

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


def _two_ranks() -> dict[str, Any]:
    with pytest.raises(ConfigError, match=r"among them (idle|head)\..*find_unused_parameters=True"):
        _uneven(False, True)
    found = {
        "uneven": _uneven(True, False),
        "steps": _whole_steps(),
        "buffers": _buffers_after_steps(True),
        "own buffers": _buffers_after_steps(False),
        "synchronised": _synchronised(),
        "norms": _norms(),
        "sharded": _sharded_after_synchronising(),
    }
    _context_parallel_operations()  # makes groups of its own
    return found


@pytest.fixture(scope="module")
def found_by_two() -> list[dict[str, Any]]:
    return run_distributed(_two_ranks, 2)


@pytest.mark.slow
def test_each_step_has_the_gradients_of_its_whole_batch(found_by_two: list[dict[str, Any]]) -> None:
    used = _net()
    used(_data(), use_idle=True).square().mean().backward()
    for found in found_by_two:
        assert_close(found["uneven"]["idle.weight"], used.idle.weight.grad / 2)  # one rank alone used it
        for batch, gradients in zip(_data().split(4), found["steps"], strict=True):
            net = _net()
            net(batch).square().mean().backward()
            assert_close(gradients, _grads(net))  # None where no rank used a parameter


@pytest.mark.slow
def test_replicas_have_in_common_what_they_must(found_by_two: list[dict[str, Any]]) -> None:
    first, second = found_by_two
    persistent = {"mean", "mask", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    for key, expected in (
        ("buffers", {"scratch"}),
        ("own buffers", persistent - {"norm.num_batches_tracked"} | {"scratch"}),
    ):
        assert set(first[key]) == persistent | {"scratch"}
        assert {n for n in first[key] if not torch.equal(first[key][n], second[key][n])} == expected
    for state, names in (first["synchronised"], second["synchronised"]):
        assert names == ["weight", None, "conv", "large"]
        for name in ("weight", "small", "frozen", "count", "is_odd", "wide", "complex"):
            assert not state[name].real.any(), name
        assert not state["large"][2:].any()
    assert first["norms"] == second["norms"] == pytest.approx([50**0.5, 50**0.5, 5.0])
    torch.manual_seed(0)
    assert torch.equal(first["sharded"], Net().head.weight) and torch.equal(second["sharded"], first["sharded"])


def test_norm_is_taken_in_float32_of_half_precision_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(70000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 1.0)
    assert float(parallel.clip_grad_norm_([parameter], 1.0)) == pytest.approx(70000**0.5, rel=1e-6)
    assert float(parallel.clip_grad_norm_([], 1.0)) == 0.0


def test_the_norm_copies_few_gradients_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All float32 copies at once took 30 GB beside the 15 GB of gradients of a policy of 7.5 B parameters."""
    grads = [torch.randn(30, 10, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(20)]
    expected = torch.stack([grad.float().norm() for grad in grads]).square().sum().sqrt()
    whole = parallel.grad_norm(grads)
    alive: list[weakref.ref[Tensor]] = []
    peak = 0

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal peak
            found = func(*args, **(kwargs or {}))
            if isinstance(found, Tensor):
                alive.append(weakref.ref(found))
            peak = max(peak, sum(one.numel() for ref in alive if (one := ref()) is not None))
            return found

    monkeypatch.setattr(parallel, "_NORM_NUMEL", 1000)
    with Copies():
        assert torch.equal(parallel.grad_norm(grads), whole)
    assert 900 <= peak <= 1000 + 3 * len(grads)
    torch.testing.assert_close(whole, expected)


def test_sizes_that_do_not_divide_are_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"fsdp_shard_size=4 does not divide the 6 .* Use one of \[1, 2, 3, 6\]"):
        ParallelDims(world_size=6).fsdp_mesh(4)
    with pytest.raises(ConfigError, match="context_parallel_size=4 does not divide the 6 processes"):
        parallel.check_context_parallel_size(4, 6)
    assert ParallelDims(world_size=6, replicate_only=True).fsdp_mesh(-1) is None
    assert ParallelDims().fsdp_mesh(-1) is None


def test_ranks_of_one_context_parallel_group_are_neighbours() -> None:
    places = [ParallelDims(world_size=4, rank=rank, context_parallel_size=2) for rank in range(4)]
    assert [(d.dp_rank, d.cp_rank) for d in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {d.dp_size for d in places} == {2}


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


def test_a_group_of_none_is_a_group_of_one() -> None:
    whole = _tokens()
    assert split(whole, 1, None) is gather(whole, 1, None) is exchange(whole, 1, 2, None) is whole
