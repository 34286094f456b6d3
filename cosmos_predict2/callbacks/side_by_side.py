# SPDX-License-Identifier: Apache-2.0
"""Clips of one kind in a column under its name, those of one subject in a row: one video to compare them in."""

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from cosmos_predict2.data.video.media import resize

GAP = 4
HEADER = 22


def side_by_side(
    rows: Sequence[Sequence[Tensor]], labels: Sequence[str], *, least: int = 192, most: int = 512
) -> Tensor:
    """uint8 [3, F, H, W] of clips [3, F, h, w]; shorter ones hold their last frame.

    Small clips are magnified in whole steps until their longer side has about ``least`` pixels, large ones are made
    smaller until it has ``most``.
    """
    assert rows and all(len(row) == len(labels) for row in rows), (
        f"{[len(row) for row in rows]} clips, {len(labels)} labels"
    )
    tiles = [[_tile(clip, least, most) for clip in row] for row in rows]
    num_frames = max(tile.shape[1] for row in tiles for tile in row)
    widths = [max(row[i].shape[-1] for row in tiles) for i in range(len(labels))]
    heights = [max(tile.shape[-2] for tile in row) for row in tiles]
    header = _header(labels, widths)
    canvas = torch.full(
        (3, num_frames, HEADER + sum(heights) + GAP * len(heights), header.shape[-1]), 255, dtype=torch.uint8
    )
    canvas[:, :, :HEADER] = header[:, None]
    top = HEADER
    for row, height in zip(tiles, heights):
        left = GAP
        for tile, width in zip(row, widths):
            count = tile.shape[1]
            area = canvas[:, :, top : top + tile.shape[-2], left : left + tile.shape[-1]]
            area[:, :count] = tile
            area[:, count:] = tile[:, -1:]
            left += width + GAP
        top += height + GAP
    return canvas


def _tile(clip: Tensor, least: int, most: int) -> Tensor:
    longest = max(clip.shape[-2:])
    if longest > most:
        return resize(clip, (max(1, clip.shape[-2] * most // longest), max(1, clip.shape[-1] * most // longest)))
    times = max(1, round(least / longest))
    return clip.repeat_interleave(times, -1).repeat_interleave(times, -2)


def _header(labels: Sequence[str], widths: Sequence[int]) -> Tensor:
    """The names of the columns, uint8 [3, HEADER, W]."""
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (sum(widths) + GAP * (len(widths) + 1), HEADER), (255, 255, 255))
    draw, font, left = ImageDraw.Draw(picture), ImageFont.load_default(14), GAP
    for label, width in zip(labels, widths):
        draw.text((left, 2), label, fill=(0, 0, 0), font=font)
        left += width + GAP
    return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1)
