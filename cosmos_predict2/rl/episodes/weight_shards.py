# SPDX-License-Identifier: Apache-2.0
"""Weights on their way from the processes that train to the workers that play, by shards.

Each rank puts the parts that it holds into Ray's object store; a worker assembles the whole from those of all ranks, so
that none of them gathers it. Of replicas, sharded or not, the first one sends.

    shared = SharedObjects(ray)
    references = shared.of_all_ranks(shards_of(module, CHANGING))   # on all ranks
    fill(module, (ray.get(reference) for reference in references))   # in a worker
"""

import math
import uuid
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from imaginaire import distributed
from imaginaire.distributed.parallel import is_dtensor, local_part, reshard
from imaginaire.errors import ConfigError, TrainingError

CHANGING, FROZEN = "changing", "frozen"  # trained parameters and all buffers; the other parameters
_NAMESPACE = "cosmos_predict2"  # of named actors


@dataclass(frozen=True)
class Shard:
    """A part of a tensor. Its content is bytes, which workers read where they lie in the object store."""

    whole: tuple[int, ...]
    place: tuple[slice, ...]
    dtype: torch.dtype
    content: NDArray[numpy.uint8]

    @classmethod
    def of(cls, tensor: Tensor) -> "Shard | None":
        """The part that this rank has to send; None where that is nothing."""
        part, place = local_part(tensor)
        if not _sends(tensor) or not part.numel():
            return None
        content = part.detach().reshape(-1).view(torch.uint8).cpu().numpy()
        return cls(tuple(tensor.shape), place, tensor.dtype, content)

    def tensor(self) -> Tensor:
        with warnings.catch_warnings():  # memory that nobody may write into
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable", category=UserWarning)
            content = torch.from_numpy(self.content)
        return content.view(self.dtype).view([part.stop - part.start for part in self.place])


Shards = dict[str, Shard]


def _sends(tensor: Tensor) -> bool:
    """True where this rank is the first that holds what it holds of a tensor."""
    if not is_dtensor(tensor):
        return distributed.is_rank0()
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(i == 0 for i, placement in zip(coordinate, tensor.placements) if placement.is_replicate())


def shards_of(module: nn.Module, which: str) -> Shards:
    """This rank's shards of what is ``CHANGING`` or ``FROZEN``, by name."""
    reshard(module)  # a pass may have left something gathered
    changes, parameters = which == CHANGING, module.named_parameters()
    named: list[tuple[str, Tensor]] = [(name, weight) for name, weight in parameters if weight.requires_grad == changes]
    named += module.named_buffers() if changes else []
    found = {name: Shard.of(tensor) for name, tensor in named}
    return {name: shard for name, shard in found.items() if shard is not None}


@torch.no_grad()
def fill(module: nn.Module, of_ranks: Iterable[Shards]) -> None:
    """Put the shards of all ranks into a module whose parameters may be without memory; each tensor must be whole."""
    targets = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    left: dict[str, int] = {}  # numbers that are still to come
    for shards in of_ranks:
        for name, shard in shards.items():
            if name not in targets:
                wrong = f"The trained policy has '{name}', which it had not when its rollout workers began"
                raise TrainingError(f"{wrong}: create all parameters and buffers in its __init__.")
            target = targets[name]
            if (tuple(target.shape), target.dtype) != (shard.whole, shard.dtype) or not target.is_contiguous():
                target.data = torch.empty(shard.whole, dtype=shard.dtype, device=target.device)
            part = shard.tensor()
            target.data[shard.place].copy_(part)
            left[name] = left.get(name, math.prod(shard.whole)) - part.numel()
    assert not any(left.values()), f"not whole: {[name for name, number in left.items() if number]}"


@contextmanager
def without_weights(module: Any) -> Iterator[None]:
    """Inside, a module's parameters are empty: so it travels, and `fill` gives it the weights where it arrives."""
    weights = [(weight, weight.data) for weight in module.parameters()] if isinstance(module, nn.Module) else []
    try:
        for weight, _ in weights:
            weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)
        yield
    finally:
        for weight, data in weights:
            weight.data = data


class SharedObjects:
    """Objects of all ranks in Ray's store. Each is freed when no rank and no worker needs it any more.

    References go through an actor, since only those that travel in its calls are counted: one that is sent otherwise,
    by a collective, keeps its object for ever.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._table: Any = None
        self._number = 0

    def of_all_ranks(self, value: Any) -> list[Any]:
        """References of every rank's value, in rank order; a collective."""
        mine, ranks = self._ray.put(value), distributed.world_size()
        if ranks == 1:
            return [mine]
        if self._table is None:
            self._table = self._found(ranks)
        self._number += 1
        self._ray.get(self._table.put.remote(self._number, distributed.rank(), [mine]))
        distributed.barrier("weights of rollout workers")
        references: list[Any] = self._ray.get(self._table.take.remote(self._number))
        return references

    def _found(self, ranks: int) -> Any:
        """The table of this run, which rank 0 makes and others find by its name."""
        name, table = f"shards-{uuid.uuid4().hex}", None
        if distributed.is_rank0():
            options = dict(name=name, namespace=_NAMESPACE, num_cpus=0)
            table = self._ray.remote(reference_table()).options(**options).remote(ranks)
        name = distributed.broadcast_object(name)
        if table is not None:
            return table
        try:
            return self._ray.get_actor(name, namespace=_NAMESPACE)
        except ValueError as error:
            wrong = f"Process {distributed.rank()} trains by another Ray cluster than process 0"
            cure = "give all one, model.config.rollout.address, and end others by `ray stop --force`"
            raise ConfigError(f"{wrong}: {cure}.") from error


def reference_table() -> type:
    """The class of an actor, by value: its process imports nothing of this package, and no torch."""

    class ReferenceTable:
        """References of each rank by the number of the exchange, kept until all ranks have taken them."""

        def __init__(self, num_ranks: int) -> None:
            self.num_ranks = num_ranks
            self.references: dict[int, dict[int, Any]] = {}
            self.num_taken: dict[int, int] = {}

        def put(self, number: int, rank: int, references: list[Any]) -> None:
            """One reference in a list, by which Ray passes it on as it is."""
            self.references.setdefault(number, {})[rank] = references[0]

        def take(self, number: int) -> list[Any]:
            """The references of all ranks, in their order."""
            found = self.references[number]
            self.num_taken[number] = self.num_taken.get(number, 0) + 1
            if self.num_taken[number] == self.num_ranks:
                del self.references[number], self.num_taken[number]
            return [found[rank] for rank in range(self.num_ranks)]

    return ReferenceTable
