# SPDX-License-Identifier: Apache-2.0
"""How the processes of a run divide the work, and the gradient arithmetic that follows from it.

The world is data-parallel x context-parallel; ranks of one context-parallel group are neighbours and share a sample.
Parameters that a model shards (`fully_shard`) are DTensors and reduce their own gradients; the gradients of all other
parameters are averaged over all ranks by `GradientAverager`, and what replicas must have in common (first weights,
buffers) comes from rank 0.
"""

import logging
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from imaginaire import distributed
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)

_BUCKET_BYTES = 25 * 2**20
_MESSAGE_BYTES = 64 * 2**20  # of one broadcast: what it costs in memory
_CHECKSUM_NUMEL = 2**16  # elements that are int64 at a time: they stay in a CPU's cache


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Sizes and this process's places. ``replicate_only`` forbids sharding
    (``trainer.distributed_parallelism=ddp``)."""

    world_size: int = 1
    rank: int = 0
    context_parallel_size: int = 1
    replicate_only: bool = False
    cp_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None

    @property
    def dp_size(self) -> int:
        return self.world_size // self.context_parallel_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.context_parallel_size

    @property
    def cp_rank(self) -> int:
        return self.rank % self.context_parallel_size

    def will_shard(self, shard_size: int) -> bool:
        """Whether `fsdp_mesh` gives a mesh: such a model is best built without memory and filled once it is sharded."""
        return shard_size != 0 and self.world_size > 1 and not self.replicate_only

    def fsdp_mesh(self, shard_size: int) -> DeviceMesh | None:
        """Mesh ("replicate", "shard") for `fully_shard`, or None when nothing is to be sharded.

        ``shard_size`` is the config's ``fsdp_shard_size``: 0 off, -1 the whole world, else cut to the world size.
        """
        if self.replicate_only and self.world_size > 1 and shard_size not in (0, 1):
            log.info("fsdp_shard_size=%d is not used: trainer.distributed_parallelism=ddp replicates", shard_size)
        if not self.will_shard(shard_size):
            return None
        shard = self.world_size if shard_size == -1 else min(shard_size, self.world_size)
        if shard < 1 or self.world_size % shard:
            raise ConfigError(
                f"fsdp_shard_size={shard_size} does not divide the {self.world_size} processes. "
                f"Use one of {divisors(self.world_size)}, -1 (all of them) or 0 (no sharding)."
            )
        if shard_size > shard:
            log.info("fsdp_shard_size=%d is cut to the %d processes of this run", shard_size, shard)
        device_type = distributed.device().type
        return init_device_mesh(
            device_type,
            (self.world_size // shard, shard),
            mesh_dim_names=("replicate", "shard"),
        )


_current = ParallelDims()


def init_dims(context_parallel_size: int = 1, *, replicate_only: bool = False) -> ParallelDims:
    """Set and return the process-wide dims; called once by the trainer or an example, on all ranks."""
    global _current
    world, rank = (
        distributed.world_size(),
        distributed.rank() if distributed.is_initialized() else 0,
    )
    check_context_parallel_size(context_parallel_size, world)
    cp_group = dp_group = None
    if distributed.is_initialized():
        ranks = range(world)
        for members in (
            [r for r in ranks if r // context_parallel_size == i] for i in range(world // context_parallel_size)
        ):
            group = dist.new_group(members) if context_parallel_size > 1 else None
            cp_group = group if rank in members else cp_group
        for members in ([r for r in ranks if r % context_parallel_size == i] for i in range(context_parallel_size)):
            group = dist.new_group(members) if context_parallel_size > 1 else dist.group.WORLD
            dp_group = group if rank in members else dp_group
    _init_megatron(context_parallel_size)
    _current = ParallelDims(world, rank, context_parallel_size, replicate_only, cp_group, dp_group)
    return _current


def current_dims() -> ParallelDims:
    return _current


def check_context_parallel_size(size: int, world_size: int) -> None:
    if size < 1 or world_size % size:
        raise ConfigError(
            f"model_parallel.context_parallel_size={size} does not divide the {world_size} processes of this run. "
            f"Use one of {divisors(world_size)}, or start a multiple of {max(size, 1)} processes (torchrun "
            "--nproc_per_node)."
        )


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _init_megatron(context_parallel_size: int) -> None:
    """Give samplers that are written against megatron-core's ``parallel_state`` the same sizes.

    Such an experiment has imported it by now; nobody else should wait the seconds that its import takes.
    """
    parallel_state: Any = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None:
        return
    if not distributed.is_initialized():  # megatron would call this a world of 0 processes
        parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE, parallel_state._MPU_DATA_PARALLEL_RANK = 1, 0
        return
    parallel_state._MPU_DATA_PARALLEL_WORLD_SIZE = parallel_state._MPU_DATA_PARALLEL_RANK = None
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=context_parallel_size)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor (a collective for DTensors), detached."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_part(target: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's piece of a tensor, and where it lies in the whole; all of a plain tensor."""
    if not isinstance(target, DTensor):
        return target, tuple(slice(0, length) for length in target.shape)
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    local = target.to_local()
    assert tuple(local.shape) == tuple(shape), f"local shard {tuple(local.shape)}, computed {tuple(shape)}"
    return local, tuple(slice(start, start + length) for start, length in zip(offset, shape))


def is_in_step(model: nn.Module, dims: ParallelDims) -> bool:
    """Whether the ranks wait for each other within a forward pass: parameters are sharded, or clips are split."""
    return dims.context_parallel_size > 1 or any(isinstance(p, DTensor) for p in model.parameters())


def reshard(model: nn.Module) -> None:
    """Give back what a forward pass gathered, also one that an exception ended."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Let the sharded parts of a model reduce gradients in the next backward, or keep them for the next micro-batch."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(enabled, recurse=False)


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients to a total L2 norm of at most ``max_norm`` and return the norm before; plain tensors and
    DTensors mix."""
    grads = [p.grad for p in parameters if p.grad is not None]
    total = grad_norm(grads)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in map(to_local, grads):
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    for same in by_kind.values():
        torch._foreach_mul_(same, scale.to(same[0].device, same[0].dtype))
    return total


def grad_norm(grads: Sequence[Tensor]) -> Tensor:
    """Total L2 norm over all ranks' parts, in at least float32."""
    if not grads:
        return torch.zeros(())
    groups: dict[Any, list[Tensor]] = {}
    for grad in grads:
        layout = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
        groups.setdefault((layout, grad.dtype), []).append(to_local(grad))
    squares: list[Tensor] = []
    for (layout, dtype), parts in groups.items():
        accumulate = torch.float64 if dtype == torch.float64 else torch.float32
        norms = torch.stack(
            torch._foreach_norm(
                [part.to(accumulate) if dtype != accumulate else part for part in parts],
                2,
            )
        )
        square = norms.square().sum()
        if layout is not None:
            mesh, placements = layout
            for dim, placement in enumerate(placements):
                assert not placement.is_partial(), "a gradient that is not reduced yet has no norm"
                if not placement.is_replicate():  # `Shard`, and kinds of it that are not its subclasses
                    dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    widest = max((s.dtype for s in squares), key=lambda dtype: dtype.itemsize)
    return torch.stack([s.to(widest) for s in squares]).sum().sqrt()


class GradientAverager:
    """Averages the gradients of unsharded parameters over all ranks, overlapped with the backward pass.

    Parameters are packed into fixed buckets in reverse order; a bucket is reduced as soon as its last gradient is
    there, always in one order of buckets, so the sums are the same in every step and after every resume. Which
    parameters take part is agreed between the ranks: on the first step only (``static_graph``), or on every step.

    A parameter may get its gradient in several parts (a module shared by re-entrant checkpoints, a second backward).
    ``p.grad`` holds this rank's sum until `finish` writes the average back, so a bucket that was reduced too early is
    reduced again from there, and from then on waits for `finish`.
    """

    def __init__(self, model: nn.Module, *, static_graph: bool, find_unused_parameters: bool) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
        self._names = {p: n for n, p in named}
        self._buckets = list(_buckets([p for _, p in named]))
        self._bucket_of = {p: i for i, bucket in enumerate(self._buckets) for p in bucket}
        self._agree_once = static_graph and not find_unused_parameters
        self._find_unused = find_unused_parameters
        self._agreed: tuple[bool, ...] | None = None
        self._late: set[int] = set()  # buckets that are not reduced before `finish`, the same on all ranks
        self._armed = False
        self._missing: list[set[nn.Parameter]] = []  # for each bucket, who has no gradient yet
        self._repeated: dict[int, nn.Parameter] = {}  # buckets in which a parameter got a second gradient
        self._queue: deque[int] = deque()
        self._flights: dict[int, tuple[Tensor, Any]] = {}
        if distributed.world_size() > 1:
            for parameter in self._names:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def arm(self) -> None:
        """Call before the backward pass of the last micro-batch."""
        self._armed = True
        self._missing = [set(bucket) for bucket in self._buckets]
        self._repeated = {}
        self._queue = deque(i for i in range(len(self._buckets)) if i not in self._late)
        self._flights = {}

    def finish(self) -> None:
        """Call after that backward pass: launches what is left, waits, and writes the averages back."""
        if not self._armed or not self._buckets or distributed.world_size() == 1:
            return
        self._armed = False
        for i in (*self._queue, *sorted(self._late)):
            self._launch(i)
        used, too_early = self._agree()
        for i in too_early:
            self._flights[i][1].wait()
            self._launch(i)
        self._late.update(too_early)
        world = distributed.world_size()
        for i, bucket in enumerate(self._buckets):
            flat, work = self._flights.pop(i)
            work.wait()
            flat /= world
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                if not used[parameter]:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part.view_as(parameter))

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self._armed:
            return
        assert isinstance(parameter, nn.Parameter)
        bucket = self._bucket_of[parameter]
        if parameter not in self._missing[bucket]:
            self._repeated.setdefault(bucket, parameter)
        self._missing[bucket].discard(parameter)
        while self._queue and not self._missing[self._queue[0]]:
            self._launch(self._queue.popleft())

    def _launch(self, i: int) -> None:
        bucket = self._buckets[i]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
        self._flights[i] = (flat, dist.all_reduce(flat, async_op=True))

    def _agree(self) -> tuple[dict[nn.Parameter, bool], list[int]]:
        """Which parameters have a gradient on any rank, and which buckets any rank may have reduced too early."""
        parameters = [p for bucket in self._buckets for p in bucket]
        has_grad = tuple(p.grad is not None for p in parameters)
        repeated = [i in self._repeated and i not in self._late for i in range(len(self._buckets))]
        too_early: list[int] = []
        if self._agreed is None or not self._agree_once:
            flags = torch.tensor([*has_grad, *repeated], dtype=torch.int32)
            dist.all_reduce(flags)
            count = flags.tolist()[: len(parameters)]
            partial = [p for p, c in zip(parameters, count, strict=True) if 0 < c < distributed.world_size()]
            if partial and not self._find_unused:
                raise ConfigError(
                    f"{len(partial)} parameters got a gradient on some ranks only, among them "
                    f"{self._names[partial[0]]}. If that is intended (branches that depend on the batch), set "
                    "trainer.ddp.find_unused_parameters=True."
                )
            self._agreed = tuple(c > 0 for c in count)
            too_early = [i for i, c in enumerate(flags.tolist()[len(parameters) :]) if c > 0]
        elif has_grad != self._agreed:
            changed = next(p for p, now, then in zip(parameters, has_grad, self._agreed, strict=True) if now != then)
            raise self._graph_changed(changed, "lost its gradient" if changed.grad is None else "got a gradient")
        elif any(repeated):
            raise self._graph_changed(self._repeated[repeated.index(True)], "got its gradient in several parts")
        return dict(zip(parameters, self._agreed, strict=True)), too_early

    def _graph_changed(self, parameter: nn.Parameter, what: str) -> ConfigError:
        return ConfigError(
            f"parameter {self._names[parameter]} {what}, unlike in the first step, but trainer.ddp.static_graph=True "
            "promises that the graph stays. Set trainer.ddp.static_graph=False."
        )


def _buckets(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        if bucket and (size >= _BUCKET_BYTES or kind != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket


def synchronise_replicas(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers.

    Call it before the model is sharded: DTensors are left alone, and so are tensors without data (device "meta").
    """
    _broadcast([t for t in [*model.parameters(), *model.buffers()] if _has_plain_data(t)])


class BufferBroadcaster:
    """Gives every rank rank 0's persistent buffers, such as the statistics of a BatchNorm.

    A call costs one small broadcast, and nothing for a model without such buffers. Build it when the modules are final.
    """

    def __init__(self, model: nn.Module, enabled: bool) -> None:
        # Places and not tensors, because a module may assign another tensor to its buffer.
        self._places = [
            (module, name)
            for module in model.modules()
            for name in module._buffers
            if enabled and name not in module._non_persistent_buffers_set
        ]

    def __call__(self) -> None:
        buffers = [buffer for module, name in self._places if (buffer := module._buffers[name]) is not None]
        _broadcast([buffer for buffer in buffers if _has_plain_data(buffer)])


def replicas_equal(model: nn.Module) -> str | None:
    """The first unsharded parameter whose bits differ between the ranks, or None; the same answer on every rank."""
    named = [(name, p) for name, p in model.named_parameters() if _has_plain_data(p)]
    if distributed.world_size() == 1 or not named:
        return None
    mine = torch.stack([_checksum(p).to("cpu") for _, p in named])
    everyone = [torch.empty_like(mine) for _ in range(distributed.world_size())]
    dist.all_gather(everyone, mine)
    is_equal = (torch.stack(everyone) == everyone[0]).all(dim=0).tolist()
    return next((name for (name, _), same in zip(named, is_equal, strict=True) if not same), None)


def shards_equal(model: nn.Module) -> str | None:
    """The first sharded parameter whose shards differ between their replicas, or None; the same on every rank."""
    mine: dict[str, tuple[tuple[int, ...], int]] = {}  # where this rank's shard lies, and its checksum
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            place: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
            cut = tuple(i for i, placement in zip(place, parameter.placements) if not placement.is_replicate())
            mine[name] = (cut, checksum(to_local(parameter)))
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    for of_rank in distributed.all_gather_object(mine):
        for found, (cut, number) in of_rank.items():
            if first.setdefault((found, cut), number) != number:
                return str(found)
    return None


def checksum(tensor: Tensor) -> int:
    """A number that differs, all but certainly, where the bits of two tensors or their shapes do."""
    return hash((*tensor.shape, tensor.element_size(), int(_checksum(tensor)) if tensor.numel() else 0))


def _has_plain_data(tensor: Tensor) -> bool:
    return not isinstance(tensor, DTensor) and not tensor.is_meta and tensor.numel() > 0


def _broadcast(tensors: Iterable[Tensor]) -> None:
    """Give every rank rank 0's tensors, in place, as messages of bytes that hold many small ones or a part of one."""
    if distributed.world_size() == 1:
        return
    message: list[Tensor] = []
    size = 0
    for tensor in tensors:
        target = _unexpanded(tensor.detach())
        dense = target.contiguous()  # itself, nearly always
        for piece in _elements(dense, torch.uint8).split(_MESSAGE_BYTES):
            if size + piece.numel() > _MESSAGE_BYTES:
                distributed.broadcast_tensors_(message)
                message, size = [], 0
            message.append(piece)
            size += piece.numel()
        if dense.data_ptr() != target.data_ptr():
            distributed.broadcast_tensors_(message)
            message, size = [], 0
            target.copy_(dense)
    distributed.broadcast_tensors_(message)


def _unexpanded(tensor: Tensor) -> Tensor:
    """The view of an expanded tensor that has each element once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _elements(dense: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor's memory as a flat view of another type, which is no larger than its own."""
    return dense.as_strided((dense.numel(),), (1,)).view(dtype)  # `view(-1)` may leave a stride of 0


def _checksum(tensor: Tensor) -> Tensor:
    """A sum of the bits, weighted by place. Integers wrap around, so equal tensors agree whatever the order of sums."""
    size = min(tensor.element_size(), 8)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bits = _elements(tensor.detach().contiguous(), integer)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = torch.arange(1, 2 * min(bits.numel(), _CHECKSUM_NUMEL), 2, device=tensor.device)  # odd: no bit is lost
    for part in bits.split(_CHECKSUM_NUMEL):
        total = total * 1_000_003 + (part.to(torch.int64) * weights[: part.numel()]).sum()
    return total


def shard_blocks(
    module: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh | None,
    **options: Any,
) -> None:
    """`fully_shard` each block and then the module that holds them; nothing when there is no mesh."""
    if mesh is None:
        return
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the whole tensors, shards counted at full size."""
    return sum(math.prod(t.shape) * t.element_size() for t in tensors)
