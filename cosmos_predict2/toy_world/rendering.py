# SPDX-License-Identifier: Apache-2.0
"""Pictures of states: soft-edged sprites, prerendered at sub-pixel places, laid over each other.

A sprite exists at 8 x 8 phases of its sub-pixel place, as colour times alpha and 256 minus alpha. Laying it on a batch
of pictures is gather, blend, scatter through a strided view whose last axis is one run of bytes of a picture's row, so
that the fancy index touches rows, not pixels.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cosmos_predict2.toy_world.scene import (
    BOX_HALF_SIDE,
    BOX_X,
    CLOSED,
    COLOURS,
    GOAL_X,
    GRIPPER_RADIUS,
    GRIPPER_X,
    PUCK_RADIUS,
    PUCK_X,
    RING_RADIUS,
    RING_WIDTH,
    Floats,
)

Picture = NDArray[numpy.uint8]

SOFTNESS = 1.8  # width of the linear ramp at an edge
NUM_PHASES = 8
PAD = 16  # around the picture: a sprite that is out of sight lies in it

_OVER_THE_EDGE = 100.0


def render(states: Floats, size: int) -> Picture:
    """uint8 [..., size, size, 3], RGB, of states [..., 10]."""
    rows = states.reshape(-1, states.shape[-1])
    canvas = table(rows, size)
    draw_things(canvas, rows, size)
    inside = canvas[:, PAD : PAD + size, PAD : PAD + size]
    return numpy.ascontiguousarray(inside).reshape(*states.shape[:-1], size, size, 3)


def table(states: Floats, size: int) -> Picture:
    """Padded canvases [N, size + 2 PAD, size + 2 PAD, 3] with what never moves: the table and the ring."""
    side = size + 2 * PAD
    canvas = numpy.empty((len(states), side, side, 3), dtype=numpy.uint8)
    canvas[:] = COLOURS["table"]
    _lay(canvas, "ring", states[:, GOAL_X], states[:, GOAL_X + 1], size)
    return canvas


def draw_things(canvas: Picture, states: Floats, size: int) -> None:
    """Draw objects and gripper on padded canvases."""
    for name, column in (("box", BOX_X), ("puck", PUCK_X), ("gripper", GRIPPER_X)):
        x, y = states[:, column], states[:, column + 1]
        is_there = x > -_OVER_THE_EDGE
        if is_there.any():
            variant = states[:, CLOSED].astype(numpy.intp) if name == "gripper" else None
            _lay(canvas, name, x, y, size, None if is_there.all() else is_there, variant)


def _lay(
    canvas: Picture,
    name: str,
    x: Floats,
    y: Floats,
    size: int,
    is_there: NDArray[numpy.bool_] | None = None,
    variant: NDArray[numpy.intp] | None = None,
) -> None:
    colour, inverse_alpha = _sprite(name)
    side = colour.shape[1]
    which = numpy.arange(len(canvas))
    if is_there is not None:
        which, x, y = which[is_there], x[is_there], y[is_there]
        variant = None if variant is None else variant[is_there]
    # in eighths of a pixel, from the canvas's corner to the sprite's
    left, top = (
        numpy.rint(numpy.clip((v + (PAD - side / 2)) * NUM_PHASES, 0, (size + 2 * PAD - side - 1) * NUM_PHASES))
        for v in (x, y)
    )
    left, top = left.astype(numpy.intp), top.astype(numpy.intp)
    column, row = left // NUM_PHASES, top // NUM_PHASES
    phase = (top % NUM_PHASES) * NUM_PHASES + left % NUM_PHASES
    n, height, width, _ = canvas.shape
    per_picture, per_row, per_pixel, per_byte = canvas.strides
    windows = as_strided(
        canvas, (n, height, width - side + 1, side * 3), (per_picture, per_row, per_pixel, per_byte), writeable=True
    )
    rows = (row[:, None] + numpy.arange(side), column[:, None])
    patch = windows[which[:, None], rows[0], rows[1]].astype(numpy.uint16)
    patch *= inverse_alpha[phase]
    patch += colour[phase] if variant is None else colour[phase + variant * NUM_PHASES**2]
    patch >>= 8
    windows[which[:, None], rows[0], rows[1]] = patch


@lru_cache
def _sprite(name: str) -> tuple[NDArray[numpy.uint16], NDArray[numpy.uint16]]:
    """Colour times alpha [variants * phases, s, 3 s] and 256 - alpha [phases, s, 3 s] of a thing."""
    half, coverage = _SHAPES[name]
    side = 2 * int(numpy.ceil(half + SOFTNESS / 2 + 0.5))
    places = numpy.arange(NUM_PHASES) / NUM_PHASES
    pixels = numpy.arange(side) + 0.5
    y = (pixels[None, :] - side / 2 - places[:, None])[:, None, :, None]
    x = (pixels[None, :] - side / 2 - places[:, None])[None, :, None, :]
    alpha = numpy.rint(256 * numpy.broadcast_to(coverage(x, y), (NUM_PHASES, NUM_PHASES, side, side)))
    alpha = numpy.repeat(alpha.reshape(NUM_PHASES**2, side, side, 1), 3, axis=3)
    variants = ("open gripper", "closed gripper") if name == "gripper" else (name,)
    colours = numpy.concatenate([alpha * numpy.array(COLOURS[variant]) for variant in variants])
    colour = (colours + 127).reshape(-1, side, side * 3)  # + 127: the shift by 8 bits then rounds
    return colour.astype(numpy.uint16), (256 - alpha).reshape(-1, side, side * 3).astype(numpy.uint16)


def _edge(inside: Floats) -> Floats:
    """Share of a pixel that is covered, from how far inside the edge its centre lies."""
    return numpy.clip(inside / SOFTNESS + 0.5, 0.0, 1.0)


def _disc(radius: float) -> Callable[[Floats, Floats], Floats]:
    return lambda x, y: _edge(radius - numpy.hypot(x, y))


_SHAPES: dict[str, tuple[float, Callable[[Floats, Floats], Floats]]] = {
    "gripper": (GRIPPER_RADIUS, _disc(GRIPPER_RADIUS)),
    "puck": (PUCK_RADIUS, _disc(PUCK_RADIUS)),
    "box": (BOX_HALF_SIDE, lambda x, y: _edge(BOX_HALF_SIDE - abs(x)) * _edge(BOX_HALF_SIDE - abs(y))),
    "ring": (
        RING_RADIUS + RING_WIDTH / 2,
        lambda x, y: _edge(RING_WIDTH / 2 - abs(numpy.hypot(x, y) - RING_RADIUS)),
    ),
}
