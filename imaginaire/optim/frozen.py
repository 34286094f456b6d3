# SPDX-License-Identifier: Apache-2.0
"""Frozen weights below adapters in fewer bytes, or on the host: what a small card need not hold.

``fp8`` keeps float8_e4m3fn and a power of two for each row, 1 byte a weight. ``nf4`` keeps 4 bits and the largest
absolute weight of each block of 64 (arXiv 2305.14314, without its second quantisation), .53 bytes beside bfloat16. A
layer opens its weight in its own dtype where it computes. Both forms are plain PyTorch and run on every device. What
was opened is kept again as it was: checkpoints hold opened weights under their usual names, and resume bit for bit.

A swapped block leaves its weights on the host. The first of its layers that computes waits for the copies of the block
and starts those of its neighbour, the next one forward and the one before in a backward pass, on a stream of their own.
The results are those without it. Where a swapped block begins the host waits for the device, so that two blocks are
there at a time.

Opened weights are held while autograd needs them, so the blocks should recompute: then that is one block at a time.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from imaginaire.errors import ConfigError
from imaginaire.optim import lora

FORMS = ("full", "fp8", "nf4")
BLOCK = 64  # weights that share a scale in nf4
OPEN_NUMEL = 1 << 22  # weights that are unpacked at a time
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
NF4 = (  # quantiles of a normal distribution, as published
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def freeze(module: nn.Module, blocks: Sequence[nn.Module], form: str = "full", swap_blocks: int = 0) -> None:
    """Keep the weights of all adapted layers in ``form``, and those of so many of the ``blocks``, evenly, on the host.

    In place, once the weights are there and before the module moves to its device. They are no parameters any more;
    the module's state dict still has them, in their dtype and on the host.
    """
    if not (layers := [adapter.base_layer for adapter in lora.adapters(module).values()]):
        raise ConfigError("frozen weights are those below adapters, and the module has none: inject them before.")
    if not 0 <= swap_blocks <= len(blocks):
        raise ConfigError(f"model.config.swap_blocks is {swap_blocks}, but the network has {len(blocks)} blocks.")
    swapped = [_Swapped() for _ in range(swap_blocks)]
    place = {blocks[i * len(blocks) // swap_blocks]: block for i, block in enumerate(swapped)}
    block_of = {child: block for parent, block in place.items() for child in parent.modules()}
    for i, block in enumerate(swapped):
        block.next, block.previous = (swapped[j] if 0 <= j < swap_blocks else None for j in (i + 1, i - 1))
    for layer in layers:
        own_block = block_of.get(layer)
        if form == "full" and own_block is None:
            continue
        frozen = FrozenWeight(layer.weight.detach(), form, own_block)
        del layer.weight
        layer.__class__ = type(f"Frozen{type(layer).__name__}", (_FrozenLayer, type(layer)), {})
        layer.frozen = frozen  # type: ignore[assignment]
        if own_block is not None:
            own_block.weights.append(frozen)


def frozen_layers(module: nn.Module) -> "dict[str, FrozenWeight]":
    """The kept weights by the name that they have in a state dict."""
    return {f"{n}.weight": child.frozen for n, child in module.named_modules() if isinstance(child, _FrozenLayer)}


def take(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """Keep loaded weights, by their names in the module's state dict behind ``prefix``."""
    for name, frozen in frozen_layers(module).items():
        if prefix + name in tensors and (weight := tensors[prefix + name]).shape == frozen.shape:
            frozen.write(weight)


class FrozenWeight:
    """A weight in its kept form, on its layer's device or, of a swapped block, on the host."""

    def __init__(self, weight: Tensor, form: str, block: "_Swapped | None") -> None:
        self.form, self.block, self.shape, self.dtype = form, block, weight.shape, weight.dtype
        self.device = weight.device
        self.write(weight)

    def write(self, weight: Tensor) -> None:
        """Keep these numbers from now on."""
        kept = _encoded(weight.detach().to(self.dtype), self.form)
        place = torch.device("cpu") if self.block is not None else self.device
        self.kept = tuple(tensor.to(place) for tensor in kept)
        self.fetched: tuple[Tensor, ...] | None = None
        self._pin()

    def move(self, device: torch.device) -> None:
        """The layer computes there from now on."""
        self.device, self.fetched = device, None
        if self.block is None:
            self.kept = tuple(tensor.to(device) for tensor in self.kept)
        self._pin()

    def _pin(self) -> None:
        if self.block is not None and self.device.type == "cuda":
            self.kept = tuple(tensor.pin_memory() for tensor in self.kept)

    def opened(self) -> Tensor:
        """The weight where the layer computes."""
        kept = self.kept
        if self.block is not None:
            with _disable_current_modes():  # recomputation compares the operations of both passes: copies differ
                kept = self.block.fetch(self)
        return _decoded(kept, self.form, self.shape, self.dtype)

    def on_host(self) -> Tensor:
        """The weight on the host, for a checkpoint; of a full one the memory that is kept."""
        return _decoded(tuple(tensor.cpu() for tensor in self.kept), self.form, self.shape, self.dtype)


class _FrozenLayer(nn.Module):
    """Put before the class of a Linear: its ``weight`` is opened whenever it is asked for."""

    frozen: FrozenWeight

    @property
    def weight(self) -> Tensor:
        return self.frozen.opened()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.frozen.move(fn(torch.empty(0, dtype=torch.uint8, device=self.frozen.device)).device)
        return moved

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[no-untyped-call]
        destination[prefix + "weight"] = self.frozen.on_host()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        state_dict = dict(state_dict)
        if (weight := state_dict.pop(prefix + "weight", None)) is not None:
            self.frozen.write(weight)
        super()._load_from_state_dict(state_dict, prefix, *others)  # type: ignore[no-untyped-call]


class _Swapped:
    """A block whose kept weights come to the device when they are needed, and go once they were opened."""

    next: "_Swapped | None" = None
    previous: "_Swapped | None" = None

    def __init__(self) -> None:
        self.weights: list[FrozenWeight] = []
        self._copied: Any = None  # the event after the copies
        self._stream: Any = None

    def fetch(self, weight: FrozenWeight) -> tuple[Tensor, ...]:
        """The kept tensors of one of the weights on its device; the neighbour's copies begin."""
        if weight is self.weights[0] and weight.device.type == "cuda":
            # A host that runs ahead would find no memory free yet of the blocks behind, and take that of all blocks.
            torch.cuda.current_stream(weight.device).synchronize()
        if weight.fetched is None:
            self.start()
        is_backward = torch._C._current_graph_task_id() != -1  # a block recomputes
        neighbour = self.previous if is_backward else self.next
        if weight is self.weights[0] and neighbour is not None:
            neighbour.start()
        found, weight.fetched = weight.fetched, None
        assert found is not None
        if self._copied is not None:
            here = torch.cuda.current_stream(weight.device)
            here.wait_event(self._copied)
            for tensor in found:
                tensor.record_stream(here)
        return found

    def start(self) -> None:
        """Begin to copy what is not there, on a stream beside the computation where the device has streams."""
        has_streams = self.weights[0].device.type == "cuda"
        if has_streams and self._stream is None:
            self._stream = torch.cuda.Stream(self.weights[0].device)
        with torch.cuda.stream(self._stream) if has_streams else nullcontext():
            for weight in self.weights:
                if weight.fetched is None:
                    copies = (tensor.to(weight.device, non_blocking=True, copy=True) for tensor in weight.kept)
                    weight.fetched = tuple(copies)
            self._copied = self._stream.record_event() if has_streams else None


# Forms ----------------------------------------------------------------------------------------------------------------


def kept_bytes(shape: Sequence[int], form: str, itemsize: int) -> int:
    """Bytes of a weight of that shape and dtype in a form."""
    numel = math.prod(shape)
    if form == "fp8":
        return numel + 4 * shape[0]
    if form == "nf4":
        blocks = -(-numel // BLOCK)
        return blocks * (BLOCK // 2 + itemsize)
    return numel * itemsize


@torch.no_grad()
def _encoded(weight: Tensor, form: str) -> tuple[Tensor, ...]:
    if form == "full":
        return (weight.clone(),)
    if form == "fp8":
        largest = weight.float().abs().amax(1, keepdim=True)
        parts, exponents = torch.frexp(largest / FP8_MAX)  # powers of two: what is opened is kept again as it was
        scales = torch.ldexp(torch.ones_like(largest), exponents - (parts == 0.5).int())
        return ((weight.float() / scales).to(FP8).view(torch.uint8), scales)
    blocks = F.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True)
    table = torch.tensor(NF4, device=weight.device)
    middles = (table[1:] + table[:-1]) / 2
    shares = blocks.float() / largest.float().clamp(min=torch.finfo(torch.float32).tiny)
    codes = torch.bucketize(shares, middles, out_int32=True).to(torch.uint8)
    return codes[:, 0::2] * 16 + codes[:, 1::2], largest


@torch.no_grad()
def _decoded(kept: tuple[Tensor, ...], form: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    if form == "full":
        return kept[0]
    codes, scales = kept
    opened = torch.empty(codes.shape if form == "fp8" else (len(codes), BLOCK), dtype=dtype, device=codes.device)
    step = max(1, OPEN_NUMEL // opened.shape[1])
    pairs = _pairs(codes.device)
    for start in range(0, len(codes), step):
        part, scale = codes[start : start + step], scales[start : start + step].float()
        wide = part.view(FP8).float() if form == "fp8" else F.embedding(part.int(), pairs).flatten(1)
        opened[start : start + step] = wide.mul_(scale)
    return opened.view(-1)[: math.prod(shape)].view(shape)


@functools.cache  # to be made once on a device: the host waits for it
def _pairs(device: torch.device) -> Tensor:
    """[256, 2], the two numbers that each byte of two codes of nf4 stands for."""
    numbers = torch.tensor(NF4)
    return torch.cartesian_prod(numbers, numbers).to(device)
