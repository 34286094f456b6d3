# SPDX-License-Identifier: Apache-2.0
"""Pictures of states, and the places of things on pictures, true ones or imagined.

Drawn are soft-edged sprites. A sprite exists at 8 x 8 phases of its sub-pixel place, as colour times alpha and 256
minus alpha. Laying it on a batch of pictures is gather, blend, scatter through a strided view whose last axis is one
run of bytes of a picture's row, so that the fancy index touches rows, not pixels.

Things are found by colour alone. Every pixel is taken as a mixture of at most two of the scene's colours, which is
what soft edges make. A table over colours of five bits a channel, filled once, gives each thing's share of a pixel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import numpy
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from cosmos_predict2.toy_world.physics import (
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
COVER = (150, 120, 90)
_RIM = 8  # of the picture at the wrist, cut off: with PAD wider than any sprite, so that none reaches in from outside

_OVER_THE_EDGE = 100.0


def render(states: Floats, size: int, cover: int | None = None) -> Picture:
    """uint8 [..., size, size, 3], RGB, of states [..., 10]; a cover hides all but the gripper and a rim so wide."""
    rows = states.reshape(-1, states.shape[-1])
    canvas = table(rows, size)
    draw_things(canvas, rows, size, cover)
    inside = canvas[:, PAD : PAD + size, PAD : PAD + size]
    return numpy.ascontiguousarray(inside).reshape(*states.shape[:-1], size, size, 3)


def render_wrist(states: Floats, size: int) -> Picture:
    """uint8 [..., size, size, 3] from below a cover: the table around the gripper, as a camera that moves with it sees
    it. Beyond the walls all looks like the table."""
    moved = states.copy()
    for column in (PUCK_X, BOX_X, GOAL_X, GRIPPER_X):  # the gripper last
        moved[..., column : column + 2] += size / 2 + _RIM - moved[..., GRIPPER_X : GRIPPER_X + 2]
    return numpy.ascontiguousarray(render(moved, size + 2 * _RIM)[..., _RIM:-_RIM, _RIM:-_RIM, :])


def table(states: Floats, size: int) -> Picture:
    """Padded canvases [N, size + 2 PAD, size + 2 PAD, 3] with what never moves: the table and the ring."""
    side = size + 2 * PAD
    canvas = numpy.empty((len(states), side, side, 3), dtype=numpy.uint8)
    canvas[:] = COLOURS["table"]
    _lay(canvas, "ring", states[:, GOAL_X], states[:, GOAL_X + 1], size, numpy.arange(len(states)))
    return canvas


def draw_things(canvas: Picture, states: Floats, size: int, cover: int | None = None) -> None:
    """Draw objects and gripper on padded canvases, a cover between them."""
    for name, column in (("box", BOX_X), ("puck", PUCK_X), ("gripper", GRIPPER_X)):
        if name == "gripper" and cover is not None:
            covered = slice(PAD + cover, PAD + size - cover)
            canvas[:, covered, covered] = COVER
        which = numpy.flatnonzero(states[:, column] > -_OVER_THE_EDGE)
        if which.size:
            own = states[which]
            variant = own[:, CLOSED].astype(numpy.intp) if name == "gripper" else 0
            _lay(canvas, name, own[:, column], own[:, column + 1], size, which, variant)


def _lay(
    canvas: Picture,
    name: str,
    x: Floats,
    y: Floats,
    size: int,
    which: NDArray[numpy.intp],
    variant: NDArray[numpy.intp] | int = 0,
) -> None:
    """Lay a thing on some of the canvases, at a place of its own on each."""
    colour, inverse_alpha = _sprite(name)
    side = colour.shape[1]
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
    patch += colour[phase + variant * NUM_PHASES**2]
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
    "ring": (RING_RADIUS + RING_WIDTH / 2, lambda x, y: _edge(RING_WIDTH / 2 - abs(numpy.hypot(x, y) - RING_RADIUS))),
}


THINGS = ("gripper", "puck", "box", "ring")

BITS = 5
_FAINT = 0.2  # a smaller share of a pixel is noise
_LEAST_AREA = 8.0  # pixels; a disc of the gripper's size has 64
_LEAST_RING_AREA = 12.0
_RING_STEPS = 6
_RING_PIXELS = 192
_MARGIN = 2.0
_RADII = {"gripper": GRIPPER_RADIUS, "puck": PUCK_RADIUS, "box": BOX_HALF_SIDE * 2**0.5}
_FRAMES_AT_ONCE = 512


@dataclass(frozen=True)
class Detection:
    """Things found on pictures [..., H, W, 3]."""

    position: Mapping[str, Floats]  # thing -> [..., 2] (x, y) in pixels, NaN where it is not seen
    is_closed: NDArray[numpy.bool_]  # [...], colour of the gripper


def detect(frames: Picture, things: Sequence[str] = THINGS) -> Detection:
    """Centres of gripper, puck, box and ring, or of some of them, on uint8 pictures [..., H, W, 3]."""
    if frames.dtype != numpy.uint8 or frames.ndim < 3 or frames.shape[-1] != 3:
        raise ValueError(f"detect() needs uint8 pictures [..., H, W, 3]; got {frames.dtype} {list(frames.shape)}.")
    shape = frames.shape[:-3]
    flat = frames.reshape(-1, *frames.shape[-3:])
    starts = range(0, max(1, len(flat)), _FRAMES_AT_ONCE)
    parts = [_detect(flat[i : i + _FRAMES_AT_ONCE], things) for i in starts]
    position, closed = (numpy.concatenate(part) for part in zip(*parts, strict=True))
    return Detection(
        position={thing: position[:, i].reshape(*shape, 2) for i, thing in enumerate(things)},
        is_closed=closed.reshape(shape),
    )


def _detect(frames: Picture, things: Sequence[str]) -> tuple[Floats, NDArray[numpy.bool_]]:
    """Positions [N, things, 2] and whether the gripper is closed [N]."""
    n, height, width, _ = frames.shape
    code = frames.astype(numpy.int32) >> (8 - BITS)
    code = (code[..., 0] << 2 * BITS) | (code[..., 1] << BITS) | code[..., 2]
    share = shares()[code.reshape(n, height * width)]  # [N, H W, things + 1]
    y, x = (v + 0.5 for v in numpy.divmod(numpy.arange(height * width), width))
    moments = numpy.stack([numpy.ones_like(x), x, y]).astype(numpy.float32)
    sums = (moments @ share).astype(numpy.float64)  # [N, 3, things + 1]
    position = numpy.empty((n, len(things), 2))
    for k, thing in enumerate(things):
        i = THINGS.index(thing)
        area: NDArray[Any] = sums[:, :1, i]
        centre = sums[:, 1:, i] / numpy.maximum(area, 1e-6)
        if thing == "ring":
            centre = _fit_ring(share[..., i], x, y, centre)
        else:  # once more without what lies apart: other things' edges can mix to the same colour
            near = (moments[1] - centre[:, :1].astype(numpy.float32)) ** 2
            near += (moments[2] - centre[:, 1:].astype(numpy.float32)) ** 2
            own = share[..., i] * (near < (_RADII[thing] + _MARGIN) ** 2)
            near_sums = own @ moments.T
            area = near_sums[:, :1]
            centre = near_sums[:, 1:] / numpy.maximum(area, 1e-6)
        least = _LEAST_RING_AREA if thing == "ring" else _LEAST_AREA
        position[:, k] = numpy.where(area < least, numpy.nan, centre)
    return position, sums[:, 0, -1] > 0.5 * sums[:, 0, 0]


def _fit_ring(share: NDArray[numpy.float32], x: Floats, y: Floats, start: Floats) -> Floats:
    """Centres [N, 2] of circles of the ring's radius through its visible pixels (Gauss-Newton from their centroid).

    Things hide a part of the ring, so the centroid of what is left would be off by pixels.
    """
    which = numpy.argpartition(-share, min(_RING_PIXELS, share.shape[1] - 1), axis=1)[:, :_RING_PIXELS]
    weight = numpy.take_along_axis(share, which, axis=1).astype(numpy.float64)
    x, y = x[which], y[which]
    centre = start
    for _ in range(_RING_STEPS):
        dx, dy = x - centre[:, :1], y - centre[:, 1:]
        distance = numpy.maximum(numpy.hypot(dx, dy), 1e-6)
        ux, uy, beyond = dx / distance, dy / distance, distance - RING_RADIUS
        a, b, c = ((weight * v).sum(1) + ridge for v, ridge in ((ux * ux, 1e-3), (ux * uy, 0.0), (uy * uy, 1e-3)))
        p, q = (weight * ux * beyond).sum(1), (weight * uy * beyond).sum(1)
        determinant = a * c - b * b
        centre = centre + numpy.stack([(c * p - b * q) / determinant, (a * q - b * p) / determinant], -1)
    return centre


@lru_cache
def shares() -> NDArray[numpy.float32]:
    """Share of each thing in a pixel, by coded colour: [32768, things + 1]; the last is the closed gripper alone.

    A colour's code has the upper five bits of red, green and blue, in this order.
    """
    levels = (numpy.arange(2**BITS) + 0.5) * 2 ** (8 - BITS) - 0.5
    colours = numpy.stack(numpy.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(-1, 3)
    names = list(COLOURS)
    best = numpy.full(len(colours), numpy.inf)
    weights = numpy.zeros((len(colours), len(names)))
    for i, k in combinations(range(len(names)), 2):
        if "gripper" in names[i] and "gripper" in names[k]:
            continue  # it is one or the other
        first, second = (numpy.array(COLOURS[names[j]], dtype=numpy.float64) for j in (i, k))
        line = second - first
        t = (((colours - first) @ line) / (line @ line)).clip(0.0, 1.0)
        error = ((colours - first - t[:, None] * line) ** 2).sum(1)
        better = error < best
        best[better] = error[better]
        weights[better] = 0.0
        weights[better, i] = 1.0 - t[better]
        weights[better, k] = t[better]
    weights = ((weights - _FAINT) / (1.0 - _FAINT)).clip(0.0, 1.0)
    by_name = dict(zip(names, weights.T, strict=True))
    gripper = by_name["open gripper"] + by_name["closed gripper"]
    columns = [gripper, by_name["puck"], by_name["box"], by_name["ring"], by_name["closed gripper"]]
    return numpy.ascontiguousarray(numpy.stack(columns, -1), dtype=numpy.float32)
