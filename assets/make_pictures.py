# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures and clips in this folder that are our own, from nothing but arithmetic.

python -m assets.make_pictures [--only scene|toy_world]

The scene is traced through distance fields: a robot arm over a wooden table with the things of the toy world on it.
The toy world's frames are of a held-out episode. The same code gives the same pixels; JPEG and H.264 files may differ
in their bytes between versions of the encoders.
"""

import argparse
import io
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image

from cosmos_predict2.data.toy.videos import SPLITS
from cosmos_predict2.data.video.media import write_image, write_video
from cosmos_predict2.toy_world.episodes import make_episodes

HERE = Path(__file__).parent
WIDTH, HEIGHT = 1280, 704
LARGEST_BYTES = 200_000

Vectors = NDArray[numpy.float32]

EYE, LOOK_AT, ZOOM = (0.42, 1.25, 2.15), (-0.06, 0.40, 0.0), 2.2
LIGHT = numpy.array([-0.55, 0.80, 0.22], dtype=numpy.float32)
LIGHT /= numpy.linalg.norm(LIGHT)
FARTHEST = 25.0

# Things as (kind, colour, shininess, numbers); y points up and the table's top is at 0.
BASE, SHOULDER, ELBOW, WRIST = (-0.72, 0.0, -0.28), (-0.72, 0.42, -0.28), (-0.50, 0.95, -0.20), (0.03, 0.70, 0.03)
HAND = (0.05, 0.44, 0.05)
WHITE, ORANGE, DARK, STEEL = (0.86, 0.87, 0.88), (0.91, 0.45, 0.12), (0.10, 0.11, 0.13), (0.55, 0.57, 0.60)
THINGS = [
    ("plane", (0.0, 0.0, 0.0), 0.15, ()),
    ("wall", (0.62, 0.66, 0.68), 0.0, (-1.6,)),
    ("cylinder", DARK, 0.5, (*BASE, 0.21, 0.05)),
    ("cylinder", WHITE, 0.6, (BASE[0], 0.05, BASE[2], 0.145, 0.30)),
    ("ball", ORANGE, 0.7, (*SHOULDER, 0.135)),
    ("rod", WHITE, 0.6, (*SHOULDER, *ELBOW, 0.085)),
    ("ball", ORANGE, 0.7, (*ELBOW, 0.115)),
    ("rod", WHITE, 0.6, (*ELBOW, *WRIST, 0.068)),
    ("ball", DARK, 0.6, (*WRIST, 0.085)),
    ("rod", STEEL, 0.8, (*WRIST, *HAND, 0.045)),
    ("block", DARK, 0.5, (*HAND, 0.15, 0.035, 0.05, 0.02)),
    ("block", STEEL, 0.8, (HAND[0] - 0.135, 0.31, HAND[2], 0.016, 0.12, 0.032, 0.008)),
    ("block", STEEL, 0.8, (HAND[0] + 0.135, 0.31, HAND[2], 0.016, 0.12, 0.032, 0.008)),
    ("cylinder", (0.80, 0.10, 0.09), 0.5, (0.07, 0.0, 0.10, 0.105, 0.075)),
    ("block", (0.10, 0.22, 0.78), 0.4, (0.62, 0.095, -0.42, 0.08, 0.08, 0.08, 0.015)),
    ("ring", (0.08, 0.50, 0.18), 0.3, (0.52, 0.0, 0.42, 0.19, 0.022)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("scene", "toy_world"), help="one part (default: both)")
    only = parser.parse_args().only
    if only in (None, "scene"):
        write_scene(HERE / "video2world" / "input0.jpg")
    if only in (None, "toy_world"):
        write_toy_world(HERE / "toy_world")


def write_toy_world(folder: Path) -> None:
    """First frame, clip and prompt of a held-out episode in which an expert pushes the puck to the ring."""
    episodes = make_episodes(200, mix="expert", first=SPLITS["val"])
    wanted = [i for i, text in enumerate(episodes.captions) if text == "push the red puck to the green ring"]
    way = episodes.travel(12)[:, 0]  # of the puck in the first 13 frames
    chosen = max(wanted, key=lambda i: way[i])
    clip = torch.from_numpy(episodes.render(chosen)).permute(3, 0, 1, 2)
    write_image(folder / "first_frame.png", clip[:, 0])
    write_video(folder / "clip.mp4", clip, 10)
    (folder / "prompt.txt").write_text(episodes.captions[chosen] + "\n", encoding="utf-8")
    print(f"toy world: episode {SPLITS['val'] + chosen} of seed 0, puck moves {way[chosen]:.1f} px in 13 frames")


def write_scene(path: Path) -> None:
    pixels = draw_scene(WIDTH, HEIGHT)
    for quality in (92, 88, 84, 80):
        encoded = io.BytesIO()
        Image.fromarray(pixels).save(encoded, format="JPEG", quality=quality, optimize=True)
        if encoded.tell() <= LARGEST_BYTES:
            break
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(encoded.getvalue())
    print(f"{path}: {encoded.tell():,} bytes at quality {quality}")


def draw_scene(width: int, height: int) -> NDArray[numpy.uint8]:
    """uint8 [height, width, 3]: one ray per pixel, and nine where neighbours differ."""
    y, x = numpy.mgrid[:height, :width].astype(numpy.float32)
    colour = _in_parts(x.ravel() + 0.5, y.ravel() + 0.5, width, height).reshape(height, width, 3)
    differs = numpy.zeros((height, width), dtype=bool)
    for axis in (0, 1):
        jump = (abs(numpy.diff(colour, axis=axis)).max(-1) > 0.03).nonzero()
        differs[jump] = True
        differs[(jump[0] + (axis == 0), jump[1] + (axis == 1))] = True
    row, column = differs.nonzero()
    samples = [
        _in_parts(column + (i + 0.5) / 3, row + (k + 0.5) / 3, width, height) for i in range(3) for k in range(3)
    ]
    colour[row, column] = numpy.mean(samples, axis=0)
    return numpy.rint(255 * colour).astype(numpy.uint8)


def _in_parts(x: Vectors, y: Vectors, width: int, height: int) -> Vectors:
    parts = max(1, len(x) // 100_000)
    pairs = zip(numpy.array_split(x, parts), numpy.array_split(y, parts), strict=True)
    return numpy.concatenate([_look(*pair, width, height) for pair in pairs])


def _look(x: Vectors, y: Vectors, width: int, height: int) -> Vectors:
    """What is seen [N, 3] at places of the picture, as values for a screen in [0, 1]."""
    eye, target = (numpy.array(v, dtype=numpy.float32) for v in (EYE, LOOK_AT))
    ahead = _unit(target - eye)
    right = _unit(numpy.cross(ahead, [0, 1, 0]))
    up = numpy.cross(right, ahead)
    across, along = (2 * x - width) / height, (height - 2 * y) / height
    rays = _unit(ahead * ZOOM + across[:, None] * right + along[:, None] * up).astype(numpy.float32)
    far = _march(numpy.broadcast_to(eye, rays.shape), rays)
    points = eye + far[:, None] * rays
    distances = _distances(points)
    which = distances.argmin(0)
    normal = _normal(points)
    start = points + 0.004 * normal
    sun = numpy.maximum(normal @ LIGHT, 0) * _light_arriving(start)
    sky = (0.5 + 0.5 * normal[:, 1]) * _openness(points, normal)
    paint = _paint(points, which)
    shine = numpy.array([thing[2] for thing in THINGS], dtype=numpy.float32)[which]
    half = _unit(LIGHT - rays)
    gloss = shine * numpy.maximum((normal * half).sum(1), 0) ** 40 * (sun > 0)
    warm, cool = numpy.array([1.0, 0.95, 0.86]), numpy.array([0.62, 0.70, 0.80])
    light = paint * (1.05 * sun[:, None] * warm + 0.62 * sky[:, None] * cool) + 0.30 * (gloss * sun)[:, None] * warm
    edge = 1.0 - 0.16 * ((across / (width / height)) ** 2 + along**2)
    return numpy.clip(light * edge[:, None], 0, 1).astype(numpy.float32) ** (1 / 2.2)


def _march(origin: Vectors, rays: Vectors) -> Vectors:
    """How far each ray runs until it meets something."""
    far = numpy.full(len(rays), 0.5, dtype=numpy.float32)
    active = numpy.arange(len(rays))
    for _ in range(160):
        step = _distances(origin[active] + far[active, None] * rays[active]).min(0)
        far[active] += step
        active = active[(step > 4e-4) & (far[active] < FARTHEST)]
        if active.size == 0:
            break
    return far


def _light_arriving(points: Vectors) -> Vectors:
    """Share of a broad lamp that is seen from each point: 0 in full shadow, 1 in the open."""
    seen = numpy.ones(len(points), dtype=numpy.float32)
    far = numpy.full(len(points), 0.02, dtype=numpy.float32)
    active = numpy.arange(len(points))
    for _ in range(70):
        step = _distances(points[active] + far[active, None] * LIGHT)[2:].min(0)  # table and wall cast no shadow
        seen[active] = numpy.minimum(seen[active], 0.5 + 0.5 * 11.0 * step / far[active])
        far[active] += numpy.clip(step, 0.01, 0.12)
        active = active[(seen[active] > 0) & (far[active] < 2.5)]
        if active.size == 0:
            break
    seen = numpy.clip(seen, 0, 1)
    return seen * seen * (3 - 2 * seen)


def _openness(points: Vectors, normal: Vectors) -> Vectors:
    """How much of the sky a point sees, from a few distances along its normal."""
    closed = numpy.zeros(len(points), dtype=numpy.float32)
    for i in range(1, 6):
        away = 0.045 * i
        closed += (away - _distances(points + away * normal).min(0)) / 2**i / 0.045
    return numpy.clip(1 - 0.55 * closed, 0.15, 1)


def _normal(points: Vectors) -> Vectors:
    offsets = numpy.array([[1, -1, -1], [-1, -1, 1], [-1, 1, -1], [1, 1, 1]], dtype=numpy.float32)
    return _unit(sum(offset * _distances(points + 1e-3 * offset).min(0)[:, None] for offset in offsets))


def _distances(p: Vectors) -> Vectors:
    """Distance from each thing [things, N]; negative inside."""
    return numpy.stack([_KINDS[kind](p, *numbers) for kind, _, _, numbers in THINGS])


def _cylinder(p: Vectors, x: float, y: float, z: float, radius: float, height: float) -> Vectors:
    edge = 0.015
    out = numpy.hypot(p[:, 0] - x, p[:, 2] - z) - (radius - edge)
    over = abs(p[:, 1] - (y + height / 2)) - (height / 2 - edge)
    return numpy.minimum(numpy.maximum(out, over), 0) + numpy.hypot(out.clip(0), over.clip(0)) - edge


def _rod(p: Vectors, ax: float, ay: float, az: float, bx: float, by: float, bz: float, radius: float) -> Vectors:
    a, b = numpy.array([ax, ay, az], dtype=numpy.float32), numpy.array([bx, by, bz], dtype=numpy.float32)
    share = numpy.clip((p - a) @ (b - a) / ((b - a) @ (b - a)), 0, 1)
    return _length(p - a - share[:, None] * (b - a)) - radius


def _block(p: Vectors, x: float, y: float, z: float, hx: float, hy: float, hz: float, edge: float) -> Vectors:
    q = abs(p - numpy.array([x, y, z], dtype=numpy.float32)) - numpy.array([hx, hy, hz], dtype=numpy.float32)
    return _length(q.clip(0)) + numpy.minimum(q.max(1), 0) - edge


def _ring(p: Vectors, x: float, y: float, z: float, radius: float, width: float) -> Vectors:
    out = numpy.hypot(p[:, 0] - x, p[:, 2] - z) - radius
    return numpy.hypot(out, 2.2 * (p[:, 1] - y)) * 0.6 - width * 0.6


_KINDS = {
    "plane": lambda p: p[:, 1],
    "wall": lambda p, z: p[:, 2] - z,
    "ball": lambda p, x, y, z, r: _length(p - numpy.array([x, y, z], dtype=numpy.float32)) - r,
    "cylinder": _cylinder,
    "rod": _rod,
    "block": _block,
    "ring": _ring,
}


def _paint(points: Vectors, which: NDArray[numpy.intp]) -> Vectors:
    colour = numpy.array([thing[1] for thing in THINGS], dtype=numpy.float32)[which]
    wood = which == 0
    colour[wood] = _wood(points[wood])
    return colour


def _wood(p: Vectors) -> Vectors:
    """Planks along x, each with its own tone and grain."""
    plank = numpy.floor(p[:, 2] / 0.28)
    own = numpy.modf(abs(numpy.sin(plank * 12.9898 + 4.1) * 437.585))[0]
    x, z = p[:, 0] + 3.7 * own, p[:, 2] / 0.28 - plank
    bend = 0.10 * numpy.sin(1.3 * x + 6 * own) + 0.05 * numpy.sin(3.1 * x + 11 * own)
    rings = numpy.sin(46 * (z + bend) + 5 * own) * 0.6 + numpy.sin(101 * (z + 0.7 * bend) + 3 * x) * 0.4
    fine = numpy.sin(380 * z + 9 * numpy.sin(2.3 * x)) * numpy.sin(21 * x + 40 * own)
    tone = 0.80 + 0.16 * own + 0.055 * rings + 0.02 * fine
    joint = numpy.minimum(z, 1 - z) * 0.28
    tone *= 1 - 0.45 * numpy.exp(-((joint / 0.004) ** 2))
    return tone[:, None] * numpy.array([0.60, 0.42, 0.26], dtype=numpy.float32)


def _length(v: Vectors) -> Vectors:
    return numpy.sqrt((v * v).sum(-1))


def _unit(v: Vectors) -> Vectors:
    return v / numpy.sqrt((v * v).sum(-1, keepdims=True))


if __name__ == "__main__":
    main()
