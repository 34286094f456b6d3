# SPDX-License-Identifier: Apache-2.0
"""A model that imagines the toy world: how whole episodes end (`measure`), and three futures of one first picture
(`imagine_futures`). Nothing here is chosen after training: episodes and noise follow from a seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.callbacks.draw_samples import side_by_side
from cosmos_predict2.data.video import media
from cosmos_predict2.evaluation.metrics.imagined_episodes import (
    HEADER,
    WEAK_DRIVER,
    EndsAgreement,
    agreement,
    held_out_episodes,
    imagined,
    pictures,
)
from cosmos_predict2.pipelines.video2world_action import Video2WorldActionConditionedPipeline
from cosmos_predict2.toy_world.episodes import Episodes, Mix
from cosmos_predict2.toy_world.physics import (
    GRIPPER,
    Floats,
    action_layout,
    find_setting,
    find_tasks,
    object_position,
    simulate,
)
from cosmos_predict2.toy_world.rendering import render
from cosmos_predict2.world_model.world_model import SamplingOptions

MIXTURE, WEAK = "held-out mixture", "weak driver"
DRIVERS: dict[str, str | Mix] = {MIXTURE: "mixed", WEAK: WEAK_DRIVER}
# Each sequence's direction, in degrees off the line from the gripper to the puck, and its speed at the start.
WAYS = {"straight at the puck": (0.0, 1.0), "to one side of it": (30.0, 1.0), "away from it": (180.0, 0.4)}
NUM_TABLES = 256  # held-out first pictures, of which one is shown
MARGIN = 7.0  # pixels to the walls that every centre keeps


@dataclass(frozen=True)
class ImaginedFigures:
    """The ends of whole episodes, by who drives: imagined ones, and what the detector says of the true pictures."""

    ends: Mapping[str, EndsAgreement]
    detector: Mapping[str, EndsAgreement]
    num_steps: int

    def as_text(self) -> str:
        rows = [f"{'whole episodes':<31} {HEADER}"]
        for name, ends in self.ends.items():
            rows.append(f"{name:<31} {ends.as_row()}")
            rows.append(f"{name + ', true pictures':<31} {self.detector[name].as_row()}")
        return "\n".join(rows)


def measure(
    pipe: Video2WorldActionConditionedPipeline,
    *,
    num_episodes: int = 400,
    setting: str = "default",
    size: int | None = None,
    tasks: Sequence[str] = ("push_puck",),
    num_steps: int = 1,
    seed: int = 0,
) -> ImaginedFigures:
    """The ends that a model imagines of held-out episodes of the toy world."""
    world: dict[str, Any] = dict(seed=seed, setting=setting, size=size, tasks=tasks, action_dim=pipe.transform.dim)
    driven = {name: held_out_episodes(num_episodes, mix=mix, **world) for name, mix in DRIVERS.items()}

    def whole(e: Episodes) -> Tensor:  # imagined from the picture that each begins with
        return imagined(pipe.imagination, pictures(e.states[:, :1], e.size), torch.from_numpy(e.actions), num_steps)

    return ImaginedFigures(
        ends={name: agreement(e, whole(e)) for name, e in driven.items()},
        detector={name: agreement(e, pictures(e.states[:, [0, -1]], e.size)) for name, e in driven.items()},
        num_steps=num_steps,
    )


# --- futures of one picture


@dataclass(frozen=True)
class Futures:
    """Videos of each sequence of actions, uint8 [K, 3, 1 + L, H, W], from one first frame."""

    names: list[str]
    simulated: Tensor
    imagined: Tensor

    def error(self) -> float:
        """Root mean square difference of what was imagined from what was simulated, of 255, after the first frame."""
        difference = (self.imagined[:, :, 1:].float() - self.simulated[:, :, 1:].float()).square().mean()
        return float(difference.sqrt())

    def apart(self) -> float:
        """The same between what two sequences make: the mean over the pairs."""
        pairs = torch.combinations(torch.arange(len(self.imagined)))
        frames = self.imagined[:, :, 1:].float()
        return float((frames[pairs[:, 0]] - frames[pairs[:, 1]]).square().flatten(1).mean(1).sqrt().mean())

    def sheet(self) -> Tensor:
        clips, labels = [], []
        for name, true, made in zip(self.names, self.simulated, self.imagined):
            clips += [true, made]
            labels += [f"{name}:\nsimulated", "imagined"]
        return media.contact_sheet(clips, labels, columns=9, side=96)

    def video(self) -> Tensor:
        """The simulator's futures above the imagined ones, a column for each sequence."""
        return side_by_side([list(self.simulated), list(self.imagined)], self.names)


def imagine_futures(
    pipe: Video2WorldActionConditionedPipeline,
    *,
    setting: str = "default",
    size: int | None = None,
    task: str = "push_puck",
    num_steps: int = 35,
    seed: int = 0,
) -> Futures:
    """The futures of a held-out table on which all three sequences have room, and the task's object goes two ways."""
    constants, size = find_setting(setting, size)
    target = find_tasks([task])[0].target
    length = 2 * pipe.config.chunk_size
    tables = held_out_episodes(NUM_TABLES, seed, mix="expert", setting=setting, size=size, tasks=(task,), length=1)
    first = tables.states[:, 0]
    actions = [_held(first, target, *way, length, pipe.transform.dim) for way in WAYS.values()]
    paths = [simulate(first, commanded, constants, size) for commanded in actions]
    chosen = _clearest(numpy.stack(paths), target, size)
    simulated = torch.from_numpy(render(numpy.stack([path[chosen] for path in paths]), size)).permute(0, 4, 1, 2, 3)
    imagined = pipe.rollout(
        simulated[:, :, :1].contiguous(),
        pipe.transformed(numpy.stack([rows[chosen] for rows in actions]).astype(numpy.float32)),
        [seed] * len(WAYS),  # the noise is the same: what differs, the actions have done
        SamplingOptions(num_steps=num_steps),
    )
    names = [name.replace("puck", ("puck", "box")[target]) for name in WAYS]
    return Futures(names, simulated.contiguous(), imagined.cpu())


def _held(states: Floats, target: int, degrees: float, speed: float, length: int, dim: int) -> Floats:
    """Actions [N, L, d] in one direction, slower and slower."""
    towards = states[:, object_position(target)] - states[:, GRIPPER]
    angle = numpy.arctan2(towards[:, 1], towards[:, 0]) + numpy.deg2rad(degrees)
    direction = numpy.stack([numpy.cos(angle), numpy.sin(angle)], -1)
    actions = numpy.zeros((len(states), length, dim))
    slowing = speed * (1 - numpy.arange(length) / length)
    actions[..., action_layout(dim)[:2]] = slowing[None, :, None] * direction[:, None]
    return numpy.rint(actions * 1024) / 1024


def _clearest(path_K_N_F_S: Floats, target: int, size: int) -> int:
    """The table on which nothing comes to a wall, and the first two ways move the object far and far apart."""
    thing, gripper = path_K_N_F_S[..., object_position(target)], path_K_N_F_S[..., GRIPPER]
    places = numpy.stack([thing, gripper])
    inside = ((places > MARGIN) & (places < size - MARGIN)).all(axis=(0, 1, 3, 4))
    moved = numpy.hypot(*numpy.moveaxis(thing[:, :, -1] - thing[:, :, 0], -1, 0))  # [K, N]
    apart = numpy.hypot(*numpy.moveaxis(thing[0, :, -1] - thing[1, :, -1], -1, 0))
    return int(numpy.where(inside, numpy.minimum(moved[:2].min(axis=0), apart), -1.0).argmax())
