# SPDX-License-Identifier: Apache-2.0
"""Encoding and decoding in overlapping spatial tiles, whose seams are blended by linear ramps."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

OVERLAP = 0.25  # of a tile's side


def encode_in_tiles(encode: Callable[[Tensor], Tensor], video_B_C_F_H_W: Tensor, size: int, step: int) -> Tensor:
    """``encode`` of every tile of ``size`` pixels, joined; ``step`` pixels make one position of the result."""
    height, width = (side // step for side in video_B_C_F_H_W.shape[3:])

    def piece(rows: slice, columns: slice) -> Tensor:
        return encode(video_B_C_F_H_W[..., _times(rows, step), _times(columns, step)])

    return _blend(piece, height, width, size // step, 1)


def decode_in_tiles(decode: Callable[[Tensor], Tensor], latent_B_C_T_H_W: Tensor, size: int, step: int) -> Tensor:
    """``decode`` of every tile of ``size`` pixels, joined; one latent position makes ``step`` pixels."""
    height, width = latent_B_C_T_H_W.shape[3:]

    def piece(rows: slice, columns: slice) -> Tensor:
        return decode(latent_B_C_T_H_W[..., rows, columns])

    return _blend(piece, height, width, size // step, step)


def _blend(piece: Callable[[slice, slice], Tensor], height: int, width: int, size: int, scale: int) -> Tensor:
    """The weighted mean of overlapping pieces; places count in latents, and each makes ``scale`` of the result."""
    total: Tensor | None = None
    for rows, row_ramp in _spans(height, size, scale):
        for columns, column_ramp in _spans(width, size, scale):
            part = piece(rows, columns)
            if total is None:
                total = part.new_zeros((*part.shape[:3], height * scale, width * scale))
            # The ramps of neighbours add up to one, so no division follows.
            weight = (row_ramp.unsqueeze(1) * column_ramp).to(part)
            total[..., _times(rows, scale), _times(columns, scale)] += part * weight
    assert total is not None
    return total


def _spans(length: int, size: int, scale: int) -> Iterator[tuple[slice, Tensor]]:
    """Places of tiles that cover ``length``, and how much each counts along itself."""
    if length <= size:
        yield slice(0, length), torch.ones(length * scale)
        return
    num_tiles = -(-(length - int(size * OVERLAP)) // (size - int(size * OVERLAP)))
    starts = [round(i * (length - size) / (num_tiles - 1)) for i in range(num_tiles)]
    for i, start in enumerate(starts):
        ramp = torch.ones(size * scale)
        if i > 0:
            shared = (starts[i - 1] + size - start) * scale
            ramp[:shared] = _rise(shared)
        if i + 1 < num_tiles:
            shared = (start + size - starts[i + 1]) * scale
            ramp[-shared:] = 1 - _rise(shared)
        yield slice(start, start + size), ramp


def _rise(length: int) -> Tensor:
    return (torch.arange(length) + 0.5) / length


def _times(span: slice, factor: int) -> slice:
    return slice(span.start * factor, span.stop * factor)
