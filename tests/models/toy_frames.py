# SPDX-License-Identifier: Apache-2.0
"""Windows of episodes of the toy world, and the PSNR of imagined ones, frame by frame, beside two baselines.

One repeats the first frame. The other repeats the last motion: every thing goes on as it moved from the frame before to
the first, stopped by walls only, drawn by the simulator itself from the true places.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from cosmos_predict2.evaluation.metrics.imagined_episodes import BATCH, pictures
from cosmos_predict2.evaluation.metrics.video_quality import moves
from cosmos_predict2.toy_world.episodes import Episodes
from cosmos_predict2.toy_world.physics import (
    BOX_HALF_SIDE,
    GRIPPER,
    GRIPPER_RADIUS,
    OBJECT_RADII,
    OBJECTS,
    PARKED,
    PUCK_RADIUS,
    Floats,
    object_position,
)
from cosmos_predict2.world_model.world_model import WorldModel, to_uint8

EDGE = 1.0  # pixels around an object that belong to it: its edge is soft


@dataclass(frozen=True)
class EpisodeParts:
    """Parts of episodes: ``states`` begin one frame before the first of ``video``."""

    video_B_C_F_H_W: Tensor  # uint8, the truth
    action_B_A_D: Tensor
    states: Floats  # [B, 1 + F, 10]


def windows_of(episodes: Episodes, length: int) -> EpisodeParts:
    """One window of each episode. Their starts are spread evenly, and none is the episode's first frame."""
    spare = episodes.actions.shape[1] - length
    starts = [1 + i % spare for i in range(len(episodes))]
    states = numpy.stack([episodes.states[i, start - 1 : start + length + 1] for i, start in enumerate(starts)])
    actions = numpy.stack([episodes.actions[i, start : start + length] for i, start in enumerate(starts)])
    return EpisodeParts(pictures(states[:, 1:], episodes.size), torch.from_numpy(actions), states)


def horizon_table(
    windows: EpisodeParts, videos: Mapping[str, Tensor], world: WorldModel
) -> dict[str, dict[str, list[float]]]:
    """`psnr_by_horizon` of several sets of videos, of the two baselines that need no model, and of the truth as far as
    the tokenizer shows it. All that a model imagines is coded, so the last motion is listed coded, too."""
    motion = repeat_motion(windows)
    every = {
        **videos,
        "repeat first frame": windows.video_B_C_F_H_W[:, :, :1].expand_as(windows.video_B_C_F_H_W),
        "repeat last motion": motion,
        "repeat last motion, coded": coded(motion, world),
        "truth, coded": coded(windows.video_B_C_F_H_W, world),
    }
    return {name: psnr_by_horizon(video, windows) for name, video in every.items()}


def coded(video_B_C_F_H_W: Tensor, world: WorldModel) -> Tensor:
    """uint8 videos after the tokenizer, the most that a model can show. The first frame stays as it is.

    Any number of frames will do; the last one is repeated where a group is not full.
    """
    count = video_B_C_F_H_W.shape[2]
    rest = video_B_C_F_H_W[:, :, -1:].expand(-1, -1, -(count - 1) % 4, -1, -1)
    whole = torch.cat([video_B_C_F_H_W, rest], dim=2)
    parts = [to_uint8(world.decode(world.encode(part))).cpu() for part in whole.split(BATCH)]
    return torch.cat([video_B_C_F_H_W[:, :, :1], torch.cat(parts)[:, :, 1:count]], dim=2)


def repeat_motion(windows: EpisodeParts) -> Tensor:
    """Every thing goes on as it moved from the frame before the window to its first, until it is at a wall."""
    size, count = windows.video_B_C_F_H_W.shape[-1], windows.video_B_C_F_H_W.shape[2]
    before, first = windows.states[:, 0], windows.states[:, 1]
    states = numpy.repeat(first[:, None], count, axis=1)
    things = [(GRIPPER, GRIPPER_RADIUS), *((object_position(k), OBJECT_RADII[k]) for k in range(len(OBJECTS)))]
    for columns, radius in things:
        steps = numpy.arange(count)[None, :, None] * (first - before)[:, None, columns]
        place = numpy.clip(first[:, None, columns] + steps, radius, size - radius)
        states[:, :, columns] = numpy.where(states[:, :, columns] > PARKED / 2, place, PARKED)
    return pictures(states, size)


def psnr_by_horizon(video_B_C_F_H_W: Tensor, windows: EpisodeParts) -> dict[str, list[float]]:
    """PSNR to the truth in dB of each frame after the first, by region. The pixels of all windows count alike.

    The regions: "all"; "changed", where the truth differs from the first frame; "object", where the truth has one.
    """
    truth = windows.video_B_C_F_H_W
    squared_B_F_H_W = (video_B_C_F_H_W.float() - truth.float()).square().mean(dim=1)
    regions = {
        "all": torch.ones_like(squared_B_F_H_W, dtype=torch.bool),
        "changed": moves(truth, truth[:, :, :1])[:, 0],
        "object": _on_object(windows.states[:, 1:], truth.shape[-1]),
    }
    found = {}
    for name, region_B_F_H_W in regions.items():
        error = [squared_B_F_H_W[:, h][region_B_F_H_W[:, h]].double().mean() for h in range(1, truth.shape[2])]
        found[name] = [float(10 * torch.log10(255**2 / mean)) for mean in error]
    return found


def _on_object(states: Floats, size: int) -> Tensor:
    """[B, F, H, W], true on the pixels of puck and box with their edges."""
    centres = numpy.arange(size) + 0.5
    found = numpy.zeros((*states.shape[:2], size, size), dtype=bool)
    for k in range(len(OBJECTS)):
        place = states[..., object_position(k)]
        dx = centres[None, None, None, :] - place[..., 0, None, None]
        dy = centres[None, None, :, None] - place[..., 1, None, None]
        if k == 0:
            found |= dx**2 + dy**2 < (PUCK_RADIUS + EDGE) ** 2
        else:
            found |= numpy.maximum(abs(dx), abs(dy)) < BOX_HALF_SIDE + EDGE
    return torch.from_numpy(found)
