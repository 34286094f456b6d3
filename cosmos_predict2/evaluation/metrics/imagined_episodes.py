# SPDX-License-Identifier: Apache-2.0
"""PSNR of imagined pictures of the toy world to the simulator's, frame by frame after the first.

A model is compared with two baselines. One repeats the first frame. The other repeats the last motion: every thing goes
on as it moved from the frame before to the first, stopped by walls only, drawn by the simulator itself from the true
places. Episodes are held out: they belong to a split of the series that training never draws from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from cosmos_predict2.data.toy.videos import SPLITS
from cosmos_predict2.evaluation.metrics.held_out import MOVES
from cosmos_predict2.toy_world.episodes import Episodes, Mix, make_episodes
from cosmos_predict2.toy_world.rendering import render
from cosmos_predict2.toy_world.scene import (
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
from cosmos_predict2.world_model.sampling import to_uint8
from cosmos_predict2.world_model.world_model import WorldModel

CHUNK = 12  # actions of a window
BATCH = 50  # divides the usual numbers of episodes: some kernels are made anew for each batch size

EDGE = 1.0  # pixels around an object that belong to it: its edge is soft

# uint8 first frames [B, 3, 1, H, W] and actions [B, A, d] -> uint8 video [B, 3, 1 + A, H, W]
Imagine = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Windows:
    """Parts of episodes: ``states`` begin one frame before the first of ``video``."""

    video_B_C_F_H_W: Tensor  # uint8, the truth
    action_B_A_D: Tensor
    states: Floats  # [B, 1 + F, 10]

    def __len__(self) -> int:
        return len(self.states)


def held_out_episodes(
    num: int = 400,
    *,
    seed: int = 0,
    mix: str | Mix = "mixed",
    setting: str = "default",
    size: int | None = None,
    tasks: Sequence[str] = ("push_puck",),
    action_dim: int = 4,
) -> Episodes:
    """Whole episodes of the validation split, every ring where the driver saw it."""
    return make_episodes(
        num,
        seed,
        mix=mix,
        setting=setting,
        size=size,
        tasks=tuple(tasks),
        action_dim=action_dim,
        ring_elsewhere=0.0,
        first=SPLITS["val"],
    )


def windows_of(episodes: Episodes, length: int = CHUNK) -> Windows:
    """One window of each episode. Their starts are spread evenly, and none is the episode's first frame."""
    spare = episodes.actions.shape[1] - length
    if spare < 1:
        raise ValueError(f"Episodes of {episodes.actions.shape[1]} actions have no windows of {length} after a frame.")
    starts = [1 + i % spare for i in range(len(episodes))]
    states = numpy.stack([episodes.states[i, start - 1 : start + length + 1] for i, start in enumerate(starts)])
    actions = numpy.stack([episodes.actions[i, start : start + length] for i, start in enumerate(starts)])
    return Windows(pictures(states[:, 1:], episodes.size), torch.from_numpy(actions), states)


def pictures(states: Floats, size: int) -> Tensor:
    """uint8 [B, 3, F, H, W] of states [B, F, 10]."""
    return torch.from_numpy(numpy.ascontiguousarray(render(states, size).transpose(0, 4, 1, 2, 3)))


def imagined(imagine: Imagine, first_B_C_1_H_W: Tensor, action_B_A_D: Tensor) -> Tensor:
    """Videos imagined from all first frames, some at a time: uint8 [B, 3, 1 + A, H, W]."""
    parts = zip(first_B_C_1_H_W.split(BATCH), action_B_A_D.split(BATCH), strict=True)
    return torch.cat([imagine(first, actions) for first, actions in parts])


def repeat_first(first_B_C_1_H_W: Tensor, action_B_A_D: Tensor) -> Tensor:
    """The first frame, again and again."""
    return first_B_C_1_H_W.expand(-1, -1, 1 + action_B_A_D.shape[1], -1, -1)


def repeat_motion(windows: Windows) -> Tensor:
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


def psnr_by_horizon(video_B_C_F_H_W: Tensor, windows: Windows) -> dict[str, list[float]]:
    """PSNR to the truth in dB of each frame after the first, by region. The pixels of all windows count alike.

    The regions: "all"; "changed", where the truth differs from the first frame; "object", where the truth has one.
    """
    truth = windows.video_B_C_F_H_W
    squared_B_F_H_W = (video_B_C_F_H_W.float() - truth.float()).square().mean(dim=1)
    regions = {
        "all": torch.ones_like(squared_B_F_H_W, dtype=torch.bool),
        "changed": (truth.float() - truth[:, :, :1].float()).abs().amax(dim=1) > MOVES,
        "object": _on_object(windows.states[:, 1:], truth.shape[-1]),
    }
    found = {}
    for name, region_B_F_H_W in regions.items():
        error = [squared_B_F_H_W[:, h][region_B_F_H_W[:, h]].double().mean() for h in range(1, truth.shape[2])]
        found[name] = [float(10 * torch.log10(255**2 / mean)) for mean in error]
    return found


def coded(video_B_C_F_H_W: Tensor, world: WorldModel) -> Tensor:
    """uint8 videos after the tokenizer, the most that a model can show. The first frame stays as it is.

    Any number of frames will do; the last one is repeated where a group is not full.
    """
    count = video_B_C_F_H_W.shape[2]
    rest = video_B_C_F_H_W[:, :, -1:].expand(-1, -1, -(count - 1) % 4, -1, -1)
    whole = torch.cat([video_B_C_F_H_W, rest], dim=2)
    parts = [to_uint8(world.decode(world.encode(part))).cpu() for part in whole.split(BATCH)]
    return torch.cat([video_B_C_F_H_W[:, :, :1], torch.cat(parts)[:, :, 1:count]], dim=2)


def horizon_table(
    windows: Windows, videos: Mapping[str, Tensor], world: WorldModel
) -> dict[str, dict[str, list[float]]]:
    """`psnr_by_horizon` of several sets of videos, of the two baselines that need no model, and of the truth as far as
    the tokenizer shows it. All that a model imagines is coded, so the last motion is listed coded, too."""
    motion = repeat_motion(windows)
    every = {
        **videos,
        "repeat first frame": repeat_first(windows.video_B_C_F_H_W[:, :, :1], windows.action_B_A_D),
        "repeat last motion": motion,
        "repeat last motion, coded": coded(motion, world),
        "truth, coded": coded(windows.video_B_C_F_H_W, world),
    }
    return {name: psnr_by_horizon(video, windows) for name, video in every.items()}


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
