# SPDX-License-Identifier: Apache-2.0
"""A sample of the episodes of a LeRobot data set as arrays: actions, states, and small grey pictures of each camera."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.actions.transforms import Floats
from cosmos_predict2.data.lerobot.info import STATE, Info, Part
from cosmos_predict2.data.lerobot.reader import LeRobotSource, choose_action, part_width
from cosmos_predict2.data.video.clips import stretch
from imaginaire.errors import ConfigError, DataError

MOST_EPISODES = 100  # evenly spread: a fault that is in fewer than one of a hundred is not seen
MOST_PICTURES = 5000  # of a camera, some seconds of decoding
SIDE = 32  # pixels: a motion that matters to a robot is of some cells, and noise of a codec is averaged


@dataclass(frozen=True)
class CheckedEpisode:
    """Row k of actions belongs to row k of states; pictures are those of rows ``first`` and following."""

    name: str
    time: Floats | None  # seconds [F]
    action: Floats  # [F, d]
    state: Floats  # [F, s]; s is 0 where none is recorded
    success: Mapping[str, Floats]  # by column [F]
    first: int
    pictures: Mapping[str, Floats]  # by camera [n, SIDE, SIDE], 0 to 255

    def changes(self, camera: str | None) -> tuple[NDArray[numpy.int64], Floats]:
        """Rows, and what changes from each to the next one: the state, or the `motion` that a camera sees."""
        if camera is None:
            return numpy.arange(len(self.state) - 1), numpy.diff(self.state, axis=0)
        return self.first + numpy.arange(len(self.pictures[camera]) - 1), motion(self.pictures[camera])


def read_sample(source: LeRobotSource, *, with_pictures: bool) -> list[CheckedEpisode]:
    """Evenly spread episodes that can be read and whose numbers are finite; others are reported elsewhere."""
    chosen = numpy.linspace(0, len(source) - 1, min(len(source), MOST_EPISODES)).round().astype(int).tolist()
    most, features = max(8, MOST_PICTURES // max(1, len(chosen))), source.info.features
    parts = [part for choice in action_choices(source.info) for part in choice]
    states, cameras = state_parts(source.info), source.info.cameras if with_pictures else []
    columns = [name for name in features if name == "timestamp" or "success" in name]
    columns = [name for name in columns if _width(source.info, name) == 1]
    fit, found = partial(stretch, size=(SIDE, SIDE)), []
    for i in chosen if parts else ():
        try:
            action = source.parts(i, parts, gaps=True).astype(numpy.float64)
            state = source.parts(i, states, gaps=True).astype(numpy.float64) if states else action[:, :0]
            read = source.columns(i, columns, gaps=True)
            first = max(0, (len(action) - most) // 2)
            rows = [*range(first, min(len(action), first + most))]
            pictures = {camera: source.frames(i, camera, rows, fit=fit).numpy().mean(axis=0) for camera in cameras}
        except DataError:
            continue
        if numpy.isfinite(action).all() and numpy.isfinite(state).all() and len(action) > 1:
            flat = {name: values.reshape(len(action)).astype(numpy.float64) for name, values in read.items()}
            time = flat.pop("timestamp", None)
            found.append(CheckedEpisode(source.name(i), time, action, state, flat, first, pictures))
    return found


def small_grey(film_3_F_H_W: Tensor) -> Floats:
    """[F, SIDE, SIDE], 0 to 255."""
    return numpy.asarray(stretch(film_3_F_H_W, (SIDE, SIDE)).double().mean(dim=0).numpy())


def action_choices(info: Info) -> list[list[Part]]:
    """The action that training takes by itself, or each column that may be it where the user must choose."""
    try:
        return [choose_action(info)]
    except ConfigError:
        return [[Part(key)] for key in info.features if "action" in key and _width(info, key)]


def state_parts(info: Info) -> list[Part]:
    return [Part(key) for key in info.features if key.startswith(STATE) and _width(info, key)]


def motion(pictures_F_H_W: Floats) -> Floats:
    """[F - 1, 4]: motion to the right and downwards between pictures, twice.

    First the change of the first moments of brightness, which is linear in the way of a small thing. Then the flow by
    gradients (Lucas and Kanade), for pictures that move as a whole. A mirrored picture has the first and the third
    number with the other sign, one that is upside down the second and the fourth.
    """
    change, mean = numpy.diff(pictures_F_H_W, axis=0), (pictures_F_H_W[1:] + pictures_F_H_W[:-1]) / 2
    place = numpy.linspace(-1, 1, SIDE)
    down, right = numpy.gradient(mean, axis=(1, 2))
    products = (change * place, change * place[:, None], right**2, down**2, right * down, right * change, down * change)
    to_right, to_down, xx, yy, xy, xt, yt = (values.mean(axis=(1, 2)) for values in products)
    volume = xx * yy - xy**2 + 1.0  # where a picture is flat nothing moves
    return numpy.stack([to_right, to_down, (xy * yt - yy * xt) / volume, (xy * xt - xx * yt) / volume], axis=1)


def _width(info: Info, name: str) -> int:
    """Numbers of a column in each row; 0 where it holds no vector of numbers."""
    is_numbers = str(info.features[name].get("dtype", "")).startswith(("float", "int", "uint", "bool"))
    try:
        return part_width(info, Part(name)) if is_numbers else 0
    except DataError:
        return 0
