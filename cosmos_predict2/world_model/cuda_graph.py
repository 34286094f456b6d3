# SPDX-License-Identifier: Apache-2.0
"""A network whose forward pass is captured once and replayed: no launch overhead between small kernels."""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map

from cosmos_predict2.nn.dit import DiT, Prepared
from imaginaire.errors import ConfigError

register_pytree_node(
    Prepared,
    lambda prepared: ([*vars(prepared).values()], [*vars(prepared)]),
    lambda values, names: Prepared(**dict(zip(names, values, strict=True))),
)
MOST_KEPT = 4  # captured passes: two halves of a guidance, of a full batch and of the last one


class GraphedNetwork:
    """Called like the network it holds; a pass is captured for each structure of the inputs.

    What is in them may change from call to call; what was prepared is copied only when it is another object.
    """

    def __init__(self, net: DiT, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError(f"CUDA graphs need a GPU, but the device is {device}. Leave out --use_cuda_graphs.")
        self.net = net
        self._device = device
        self._places = _places(net)
        self._kept: OrderedDict[Any, _Captured] = OrderedDict()
        self._pool: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.net, name)

    def fits(self, net: DiT) -> bool:
        """True for the network that was captured, while its weights lie where they lay then."""
        return net is self.net and _places(net) == self._places

    def __call__(
        self, x: Tensor, timesteps: Tensor, text: Tensor | None, *, prepared: Prepared | None, **inputs: Any
    ) -> Tensor:
        changing = (x, timesteps, text, inputs)
        key = (_structure(changing), _structure(prepared), self.net.part)
        if (captured := self._kept.get(key)) is None:
            while len(self._kept) >= MOST_KEPT:
                self._kept.popitem(last=False)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()  # for several: no result outlives the next replay
            mine, kept = _copy(changing), _copy(prepared)
            forward = partial(self.net, *mine[:3], prepared=kept, **mine[3])
            captured = self._kept[key] = _Captured(mine, kept, capture(forward, self._device, self._pool))
        self._kept.move_to_end(key)
        _fill(captured.inputs, changing)
        if prepared is not None and captured.source() is not prepared:
            _fill(captured.prepared, prepared)
            captured.source = weakref.ref(prepared)
        return captured.replay().clone()


@dataclass
class _Captured:
    inputs: tuple[Any, ...]
    prepared: Prepared | None
    replay: Callable[[], Tensor]
    source: Callable[[], Prepared | None] = lambda: None  # what ``prepared`` was last copied from


def capture(forward: Callable[[], Tensor], device: torch.device, pool: Any) -> Callable[[], Tensor]:
    """A function that runs the captured pass again; its result is overwritten by any other pass of the pool."""
    with torch.cuda.device(device):  # streams belong to the current one
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # lazy initialisations must not be captured
                forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = forward()
        torch.cuda.empty_cache()  # what the other passes took would be counted as held by the graph

    def replay() -> Tensor:
        with torch.cuda.device(device):
            graph.replay()
        return output

    return replay


# ---- inputs of any structure -----------------------------------------------------------------------------------------


def _places(net: DiT) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in (*net.parameters(), *net.buffers()))


def _structure(value: Any) -> Any:
    """All but the numbers in the tensors."""
    leaves, spec = tree_flatten(value)
    described = (
        (tuple(leaf.shape), leaf.dtype, leaf.device, _repeated(leaf)) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    )
    return (repr(spec), *described)


def _copy(value: Any) -> Any:
    return tree_map(lambda leaf: _once(leaf).clone().expand(leaf.shape) if isinstance(leaf, Tensor) else leaf, value)


def _fill(kept: Any, value: Any) -> None:
    """Copy the numbers into a copy of the same structure."""
    for mine, new in zip(tree_leaves(kept), tree_leaves(value), strict=True):
        if isinstance(mine, Tensor):
            _once(mine).copy_(_once(new))


def _repeated(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions along which the same memory is seen again and again: the one text of many samples."""
    return tuple(dim for dim, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[dim] > 1)


def _once(tensor: Tensor) -> Tensor:
    for dim in _repeated(tensor):
        tensor = tensor.narrow(dim, 0, 1)
    return tensor
