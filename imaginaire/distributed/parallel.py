# SPDX-License-Identifier: Apache-2.0
"""The division of work among the processes of a run, and the gradient arithmetic that follows from it.

The world is data-parallel x context-parallel; ranks of one context-parallel group are neighbours and share a sample.
Parameters that a model shards (`fully_shard`) are DTensors and reduce their own gradients; the gradients of all other
parameters are averaged over all ranks by `GradientAverager`, and what replicas must have in common (first weights,
buffers) comes from rank 0.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from imaginaire import distributed
from imaginaire.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

_BUCKET_BYTES = 25 * 2**20
_MESSAGE_BYTES = 64 * 2**20  # of one broadcast of several tensors: what it costs in memory
_NORM_NUMEL = 2**26  # elements whose temporary float32 copies exist at a time: of 7 B bfloat16 gradients all are 28 GB
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

    @property
    def dp_size(self) -> int:
        return self.world_size // self.context_parallel_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.context_parallel_size

    @property
    def cp_rank(self) -> int:
        return self.rank % self.context_parallel_size

    def sharing_samples(self, ranks: int) -> "ParallelDims":
        """The dims for dividing data where this many neighbouring data-parallel ranks get the same samples."""
        return replace(self, context_parallel_size=self.context_parallel_size * ranks)

    def will_shard(self, shard_size: int) -> bool:
        """True if `fsdp_mesh` gives a mesh: such a model is best built without memory and filled once it is sharded."""
        return shard_size != 0 and self.world_size > 1 and not self.replicate_only

    def fsdp_mesh(self, shard_size: int) -> DeviceMesh | None:
        """Mesh ("replicate", "shard") for `fully_shard`, or None when nothing is to be sharded.

        ``shard_size`` is the config's ``fsdp_shard_size``: 0 off, -1 the whole world, else cut to the world size.
        """
        if not self.will_shard(shard_size):
            return None
        shard = self.world_size if shard_size == -1 else min(shard_size, self.world_size)
        if shard < 1 or self.world_size % shard:
            raise ConfigError(
                f"fsdp_shard_size={shard_size} does not divide the {self.world_size} processes. "
                f"Use one of {divisors(self.world_size)}, -1 (all of them) or 0 (no sharding)."
            )
        sizes = (self.world_size // shard, shard)
        return init_device_mesh(distributed.device().type, sizes, mesh_dim_names=("replicate", "shard"))


_current = ParallelDims()


def init_dims(context_parallel_size: int = 1, *, replicate_only: bool = False) -> ParallelDims:
    """Set and return the process-wide dims; called once by the trainer or an example, on all ranks."""
    global _current
    world, rank = distributed.world_size(), distributed.rank() if distributed.is_initialized() else 0
    check_context_parallel_size(context_parallel_size, world)
    cp_group = None
    if distributed.is_initialized() and context_parallel_size > 1:
        for first in range(0, world, context_parallel_size):
            members = range(first, first + context_parallel_size)
            group = dist.new_group(list(members))
            cp_group = group if rank in members else cp_group
    _init_megatron(context_parallel_size)
    _current = ParallelDims(world, rank, context_parallel_size, replicate_only, cp_group)
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


def is_dtensor(value: Any) -> "TypeGuard[DTensor]":
    """True for a DTensor. Nothing is one before its module is imported, which takes half a second."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_fsdp(module: nn.Module) -> "TypeGuard[FSDPModule]":
    """True for a module that `fully_shard` has sharded; as `is_dtensor`, it imports nothing."""
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor (a collective for DTensors), detached."""
    tensor = tensor.detach()
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_part(target: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """This rank's piece of a tensor, and where it lies in the whole; all of a plain tensor."""
    if not is_dtensor(target):
        return target, tuple(slice(0, length) for length in target.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    local = target.to_local()
    assert tuple(local.shape) == tuple(shape), f"local shard {tuple(local.shape)}, computed {tuple(shape)}"
    return local, tuple(slice(start, start + length) for start, length in zip(offset, shape))


def copy_shard(target: Tensor, source: Tensor) -> None:
    """Copy a full or sharded tensor into a plain or sharded one; a full source needs no communication."""
    if not is_dtensor(target):
        target.copy_(full_tensor(source))
        return
    if is_dtensor(source):
        if source.device_mesh == target.device_mesh and source.placements == target.placements:
            target.to_local().copy_(source.to_local())
            return
        source = source.full_tensor()
    local, part = local_part(target)
    local.copy_(source[part])


def is_in_step(model: nn.Module, dims: ParallelDims) -> bool:
    """True if ranks wait for each other within a forward pass: parameters are sharded, or clips are split."""
    return dims.context_parallel_size > 1 or any(is_dtensor(p) for p in model.parameters())


def reshard(model: nn.Module) -> None:
    """Give back what a forward pass gathered, also one that an exception ended."""
    for module in model.modules():
        if is_fsdp(module):
            module.reshard()


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Let the sharded parts of a model reduce gradients in the next backward, or keep them for the next micro-batch."""
    for module in model.modules():
        if is_fsdp(module):
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
        layout = (grad.device_mesh, grad.placements) if is_dtensor(grad) else None
        groups.setdefault((layout, grad.dtype), []).append(to_local(grad))
    squares: list[Tensor] = []
    for (layout, dtype), parts in groups.items():
        accumulate = torch.float64 if dtype == torch.float64 else torch.float32
        runs = in_runs(parts, Tensor.numel, _NORM_NUMEL)
        norms = [torch._foreach_norm([part.to(accumulate) for part in run], 2) for run in runs]
        square = torch.stack([norm for some in norms for norm in some]).square().sum()
        if layout is not None:
            mesh, placements = layout
            for dim, placement in enumerate(placements):
                assert not placement.is_partial(), "a gradient that is not reduced yet has no norm"
                if not placement.is_replicate():  # `Shard`, and kinds of it that are not its subclasses
                    dist.all_reduce(square, group=mesh.get_group(dim))
        squares.append(square)
    widest = max((s.dtype for s in squares), key=lambda dtype: dtype.itemsize)
    return torch.stack([s.to(widest) for s in squares]).sum().sqrt()


def in_runs(items: Iterable[T], size_of: Callable[[T], int], most: float) -> Iterator[list[T]]:
    """Items in order, in lists of at most so much in all, or of one item: what is copied of a list stays small."""
    run: list[T] = []
    size = 0
    for item in items:
        if run and size + size_of(item) > most:
            yield run
            run, size = [], 0
        run.append(item)
        size += size_of(item)
    if run:
        yield run


class GradientAverager:
    """Averages the gradients of unsharded parameters over all ranks; called after the last micro-batch's backward pass.

    Parameters are packed into fixed buckets, which are reduced in one order, so the sums are the same in every step and
    after every resume. Which parameters take part is agreed between the ranks: on the first step only
    (``static_graph``), or on every step.
    """

    def __init__(self, model: nn.Module, *, static_graph: bool, find_unused_parameters: bool) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and not is_dtensor(p)]
        self._names = {p: n for n, p in named}
        self._buckets = list(_buckets([p for _, p in named]))
        self._agree_once = static_graph and not find_unused_parameters
        self._find_unused = find_unused_parameters
        self._agreed: tuple[bool, ...] | None = None

    def __call__(self) -> None:
        if not self._buckets or distributed.world_size() == 1:
            return
        have_gradient = self._have_gradient()
        for bucket in self._buckets:
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket])
            dist.all_reduce(flat)
            flat /= distributed.world_size()
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                if not have_gradient[parameter]:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part.view_as(parameter))

    def _have_gradient(self) -> dict[nn.Parameter, bool]:
        """A flag per parameter: it has a gradient on some rank."""
        parameters = [p for bucket in self._buckets for p in bucket]
        has_grad = tuple(p.grad is not None for p in parameters)
        if self._agreed is None or not self._agree_once:
            count = distributed.all_reduce_(torch.tensor(has_grad, dtype=torch.int32)).tolist()
            partial = [p for p, c in zip(parameters, count, strict=True) if 0 < c < distributed.world_size()]
            if partial and not self._find_unused:
                raise ConfigError(
                    f"{len(partial)} parameters got a gradient on some ranks only, among them "
                    f"{self._names[partial[0]]}. If that is intended (branches that depend on the batch), set "
                    "trainer.ddp.find_unused_parameters=True."
                )
            self._agreed = tuple(c > 0 for c in count)
        elif has_grad != self._agreed:
            changed = next(p for p, now, then in zip(parameters, has_grad, self._agreed, strict=True) if now != then)
            raise ConfigError(
                f"parameter {self._names[changed]} {'lost its' if changed.grad is None else 'got a'} gradient, unlike "
                "in the first step, but trainer.ddp.static_graph=True promises that the graph stays. Set "
                "trainer.ddp.static_graph=False."
            )
        return dict(zip(parameters, self._agreed, strict=True))


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


def replicas_equal(model: nn.Module, *, sharded: bool = False) -> str | None:
    """The first parameter whose bits differ between the ranks that hold the same of it, or None; the same on all ranks.

    Of the unsharded parameters, or of the shards of the ``sharded`` ones.
    """
    if distributed.world_size() == 1:
        return None
    mine: dict[str, tuple[tuple[int, ...], int]] = {}  # where this rank's shard lies, and its checksum
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter) == sharded and not parameter.is_meta:
            cut: tuple[int, ...] = ()
            if is_dtensor(parameter):
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
    """A number that differs, all but certainly, where the bits of two tensors or their shapes do.

    It is of a sum of the bits, weighted by place. Integers wrap around, so equal tensors agree whatever the order of
    sums.
    """
    size = min(tensor.element_size(), 8)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    dense = tensor.detach().contiguous()
    bits = dense.as_strided((dense.numel(),), (1,)).view(integer)  # `view(-1)` may leave a stride of 0
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    longest = min(bits.numel(), _CHECKSUM_NUMEL)
    weights = torch.arange(1, 2 * longest + 1, 2, device=tensor.device)  # odd: no bit is lost
    for part in bits.split(_CHECKSUM_NUMEL):
        total = total * 1_000_003 + (part.to(torch.int64) * weights[: part.numel()]).sum()
    return hash((*tensor.shape, tensor.element_size(), int(total)))


@torch.no_grad()
def not_finite(tensors: Mapping[str, Tensor], *, on_any_rank: bool = False) -> tuple[str, ...]:
    """The names of tensors with a NaN or an infinite number; of a DTensor this rank's part.

    ``on_any_rank``: the same answer on all ranks (a collective). The smallest and largest value alone are looked at,
    where a NaN shows too: a tenth of the time of ``isfinite``.
    """
    is_fine = {}
    for name, tensor in tensors.items():
        local = to_local(tensor)
        if local.is_floating_point():
            values = local.float() if local.itemsize == 1 else local
            ends = torch.stack(torch.aminmax(values)) if values.numel() else values
            is_fine[name] = ends.isfinite().all()
    if not is_fine:
        return ()
    flags = torch.stack([flag.float().cpu() for flag in is_fine.values()])
    flags = distributed.all_reduce_(flags, "min") if on_any_rank else flags
    return tuple(name for name, flag in zip(is_fine, flags.tolist(), strict=True) if not flag)


def _has_plain_data(tensor: Tensor) -> bool:
    return not is_dtensor(tensor) and not tensor.is_meta and tensor.numel() > 0


def _broadcast(tensors: Iterable[Tensor]) -> None:
    """Give every rank rank 0's tensors, in place, many small ones of one dtype and device in a message."""
    if not distributed.is_initialized():
        return
    for message in in_runs(tensors, lambda tensor: tensor.nbytes, _MESSAGE_BYTES):
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in message:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(_unexpanded(tensor.detach()))
        for same in by_kind.values():
            if len(same) == 1 and same[0].is_contiguous():  # a large one is not copied
                dist.broadcast(same[0].view(-1).view(torch.uint8), 0)
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            dist.broadcast(flat.view(torch.uint8), 0)  # bytes: not every backend knows every dtype
            for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _unexpanded(tensor: Tensor) -> Tensor:
    """The view of an expanded tensor that has each element once."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def shard_blocks(module: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh | None, **options: Any) -> None:
    """`fully_shard` each block and then the module that holds them; nothing when there is no mesh."""
    if mesh is None:
        return
    from torch.distributed.fsdp import fully_shard

    for block in blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)
