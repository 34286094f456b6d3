# SPDX-License-Identifier: Apache-2.0
"""Moments of AdamW in fewer bytes: in bfloat16, or in 8 bits with a float32 scale for each block of a row.

An entry of 8 bits is the place of a number in a table of 256, times the number of its block of 256 that is furthest
from 0 (arXiv 2110.02861, "dynamic tree quantisation", whose scales have no sign: its table has 1 and no -1). Blocks end
with their row, so that shards of rows hold whole ones and any sharding holds the same. Parameters of one dimension or
of fewer than 4,096 numbers keep float32 moments.

Rounding is stochastic: a step moves a moment by less than the distance between two numbers of either form, which
rounding to the nearest would drop each time. The draws follow from the step alone, so a resumed run makes the same. In
8 bits a second moment above 0 never becomes 0, which would make its parameter's next update huge.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from imaginaire.distributed.parallel import copy_shard, is_dtensor, local_part, to_local
from imaginaire.random import derive_seed

FORMS = ("float32", "bfloat16", "int8")
KEYS = ("exp_avg", "exp_avg_sq")
SCALE = "_scale"  # behind the key of a moment: the scales of its blocks
BLOCK = 256
SMALLEST = 4096


def form_of(shape: Sequence[int], form: str) -> str:
    """The form of the moments of a parameter in a run that keeps them in ``form`` where that is worth it."""
    return "float32" if form == "int8" and (len(shape) < 2 or math.prod(shape) < SMALLEST) else form


def kept_bytes(shape: Sequence[int], form: str, itemsize: int, rows: int | None = None) -> int:
    """Bytes of both moments of a parameter of that shape and dtype, of all its rows or of a shard with so many."""
    width = math.prod(shape[1:])
    numel = (shape[0] if rows is None else rows) * width
    form = form_of(shape, form)
    if form == "int8":
        return 2 * (numel + 4 * numel // width * -(-width // BLOCK))
    return 2 * numel * (2 if form == "bfloat16" else max(4, itemsize))


def empty(param: Tensor, form: str, key: str, device: torch.device) -> dict[str, Tensor]:
    """A moment of zeros, by its key, and the scales of its blocks."""

    def zeros(like: Tensor, dtype: torch.dtype) -> Tensor:
        if device == like.device:
            return torch.zeros_like(like, dtype=dtype)
        pins = like.device.type == "cuda"
        return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=device, pin_memory=pins).zero_()

    form = form_of(param.shape, form)
    if form == "int8":
        return {key: zeros(param, torch.uint8), key + SCALE: zeros(_scale_like(param), torch.float32)}
    wide = torch.promote_types(param.dtype, torch.float32)
    return {key: zeros(param, torch.bfloat16 if form == "bfloat16" else wide)}


def opened(value: Tensor, scale: Tensor | None, *, signed: bool, device: torch.device) -> Tensor:
    """The moment (of this rank) in float32 on a device; itself where it is that already."""
    value = value.to(device, non_blocking=True)
    if scale is None:
        return value.float() if value.dtype == torch.bfloat16 else value
    numbers = _table(signed, device)[value.int()]
    rows = numbers.flatten(1)
    wide = scale.to(device, non_blocking=True).repeat_interleave(BLOCK, dim=1)[:, : rows.shape[1]]
    found = rows.mul_(wide).view_as(numbers)
    # In the memory order of the parameter, as the kernels walk plain memory.
    return found if found.stride() == value.stride() else torch.empty_like(value, dtype=found.dtype).copy_(found)


def keep(
    value: Tensor, scale: Tensor | None, found: Tensor, *, signed: bool, generator: torch.Generator | None
) -> None:
    """Write a float32 moment into its kept form, in place; float32 needs no generator."""
    if scale is not None:
        codes, scales = _encoded(found, signed=signed, generator=generator)
        scale.copy_(scales, non_blocking=True)
        value.copy_(codes, non_blocking=True)
    elif value.dtype == torch.bfloat16:
        bits = found.view(torch.int32)
        bits = bits + torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
        value.copy_(torch.where(found.isfinite(), (bits & ~0xFFFF).view(torch.float32), found), non_blocking=True)
    elif value is not found:
        value.copy_(found, non_blocking=True)


def draws(step: int, device: torch.device) -> torch.Generator:
    """The generator of all roundings of a step."""
    return torch.Generator(device).manual_seed(derive_seed(0, step, "moments"))


def form_in(values: Mapping[str, Any]) -> str:
    """The form of the moments in the saved state of a parameter."""
    if KEYS[0] + SCALE in values:
        return "int8"
    return "bfloat16" if values[KEYS[0]].dtype == torch.bfloat16 else "float32"


def loaded(values: dict[str, Any], key: str, param: Tensor, form: str, device: torch.device) -> dict[str, Tensor]:
    """A saved moment, whole or sharded, in the form and at the place in which this run keeps it."""
    scale, live = values.get(key + SCALE), empty(param, form, key, device)
    if form_in(values) == form_of(param.shape, form):
        for name, target in live.items():
            copy_shard(target, values[name].detach())
        return live
    signed = key == KEYS[0]
    place = param.device
    like = {key: torch.zeros_like(param, dtype=values[key].dtype)}
    if scale is not None:
        like[key + SCALE] = _scale_like(param)
    for name, target in like.items():
        copy_shard(target, values[name].detach())
    own = {name: to_local(target) for name, target in {**like, **{f"live {k}": v for k, v in live.items()}}.items()}
    found = opened(own[key], own.get(key + SCALE), signed=signed, device=place)
    keep(own[f"live {key}"], own.get(f"live {key}{SCALE}"), found, signed=signed, generator=draws(0, place))
    return live


def _encoded(found: Tensor, *, signed: bool, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Codes of the moment's shape, and scales [rows, blocks of a row]."""
    rows = found.flatten(1)
    blocks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    least, most = blocks.aminmax(dim=-1)
    scales = torch.where(-least > most, least, most)
    blocks = blocks / scales.where(scales != 0, 1.0)[..., None]
    table = _table(signed, found.device)
    above = torch.bucketize(blocks, table, out_int32=True).clamp_(1, len(table) - 1)
    low = table[above - 1]
    share = (blocks - low) / (table[above] - low)
    drawn = torch.rand(share.shape, device=share.device, generator=generator)
    codes = above - (drawn >= share).int()
    if not signed:
        codes = torch.where(blocks > 0, codes.clamp_(min=1), codes)
    return codes.to(torch.uint8).flatten(1)[:, : rows.shape[1]].reshape(found.shape), scales


@functools.cache
def _table(signed: bool, device: torch.device) -> Tensor:
    """256 numbers in [-1, 1], or in [0, 1]: seven decades, each with twice as many as the one below."""
    numbers = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, (1 if signed else 2) * 2**i + 1, dtype=torch.float64)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)
        numbers += [*means.tolist(), *((-means).tolist() if signed else [])]
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


def _scale_like(param: Tensor) -> Tensor:
    """Zeros [rows, blocks of a row] in float32, sharded as the parameter."""
    width = param.numel() // max(1, param.shape[0])
    shape = (param.shape[0], -(-width // BLOCK))
    if not is_dtensor(param):
        return torch.zeros(shape, device=param.device)
    from torch.distributed.tensor import DTensor

    own = torch.zeros(local_part(param)[0].shape[0], shape[1], device=param.device)
    stride = (shape[1], 1)
    return DTensor.from_local(
        own, param.device_mesh, param.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
