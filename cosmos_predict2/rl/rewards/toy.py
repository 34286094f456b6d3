# SPDX-License-Identifier: Apache-2.0
"""Rewards of the toy world, where the detector sees exactly where things are."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.verifiable import _first_frames, _OfPixels, _required, _video
from cosmos_predict2.toy_world.physics import GRIPPER_RADIUS, PUCK_RADIUS, SETTINGS
from cosmos_predict2.toy_world.rendering import THINGS, Detection, detect

CONTACT_PX = GRIPPER_RADIUS + PUCK_RADIUS
BLUR_PX = 0.25  # of the detector, on true pictures
AWAY_PX = 2.0  # a gripper further from the puck's edge does not touch it
LOST_PX = 12.0  # the distance that counts where a thing is not seen


class Positions(_OfPixels):
    """Minus the mean distance in pixels of puck and gripper from where they truly are."""

    requires = ("true_video",)

    def __init__(self, things: tuple[str, ...] = ("puck", "gripper")) -> None:
        self.things = tuple(things)

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Tensor]:
        video = _video(clips)
        found, wanted = seen(video, self.things), _seen_truly(context, self.things)
        counted = _counted_frames(video, context)
        parts = {}
        for thing in self.things:
            distance = numpy.linalg.norm(found.position[thing] - wanted.position[thing], axis=-1)
            is_there = counted & ~numpy.isnan(wanted.position[thing][..., 0])
            distance = numpy.where(is_there, numpy.nan_to_num(distance, nan=LOST_PX), 0.0)
            parts[f"{thing}_px"] = torch.from_numpy(distance.sum(axis=1) / numpy.maximum(is_there.sum(axis=1), 1))
        return {"value": -torch.stack(list(parts.values())).mean(dim=0), **parts}


class CommandedPath(_OfPixels):
    """Minus the mean distance in pixels of the gripper from where its actions lead it, at this many pixels a step at
    full action. It needs no true clip; only walls stop a gripper."""

    requires = ("actions",)

    def __init__(self, speed: float = SETTINGS["default"].speed) -> None:
        self.speed = speed

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Tensor:
        video, motion = _video(clips), self.speed * _required(context, "actions")[..., :2].double().numpy()
        gripper, counted = seen(video, ("gripper",)).position["gripper"], _counted_frames(video, context)
        counted[:, 0] = False  # where a path begins
        wanted, (height, width) = gripper.copy(), video.shape[-2:]
        for k in range(1, gripper.shape[1]):
            led = numpy.where(counted[:, k - 1, None], wanted[:, k - 1], gripper[:, k - 1]) + motion[:, k - 1]
            wanted[:, k] = numpy.clip(led, GRIPPER_RADIUS, (width - GRIPPER_RADIUS, height - GRIPPER_RADIUS))
        distance = numpy.nan_to_num(numpy.linalg.norm(gripper - wanted, axis=-1), nan=LOST_PX)
        return -torch.from_numpy((distance * counted).sum(axis=1) / counted.sum(axis=1))


class Permanence(_OfPixels):
    """The share of generated frames in which everything is seen that the true frame shows."""

    requires = ("true_video",)

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Tensor:
        video = _video(clips)
        found, wanted, counted = seen(video), _seen_truly(context), _counted_frames(video, context)
        is_kept = numpy.ones(counted.shape, dtype=bool)
        for thing in wanted.position:
            gone = numpy.isnan(found.position[thing][..., 0]) & ~numpy.isnan(wanted.position[thing][..., 0])
            is_kept &= ~gone
        return torch.from_numpy((is_kept & counted).sum(axis=1) / counted.sum(axis=1))


class Contact(_OfPixels):
    """Minus how far the gripper is inside the puck, and how far the puck moves untouched, in pixels of a frame's mean.

    True clips have 0. It needs no true clip, and no gradient reaches it.
    """

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Tensor]:
        video = _video(clips)
        overlap, untouched = contact(seen(video, ("gripper", "puck")), _counted_frames(video, context))
        return {
            "value": torch.from_numpy(-overlap - untouched),
            "overlap_px": torch.from_numpy(overlap),
            "untouched_px": torch.from_numpy(untouched),
        }


def contact(found: Detection, counted_B_F: Any) -> tuple[Any, Any]:
    """For each clip the mean depth of the gripper in the puck, and the mean motion of the puck while it is away, over
    the frames that count, but the first."""
    gripper, puck = found.position["gripper"], found.position["puck"]
    distance = numpy.linalg.norm(puck - gripper, axis=-1)
    moved = numpy.linalg.norm(numpy.diff(puck, axis=1), axis=-1)
    is_away = numpy.minimum(distance[:, 1:], distance[:, :-1]) > CONTACT_PX + AWAY_PX
    overlap = numpy.nan_to_num(numpy.maximum(0.0, CONTACT_PX - BLUR_PX - distance[:, 1:]), nan=LOST_PX)
    untouched = numpy.nan_to_num(moved, nan=LOST_PX) * is_away
    counted = counted_B_F[:, 1:]
    return tuple((amount * counted).sum(axis=1) / counted.sum(axis=1) for amount in (overlap, untouched))


class PuckNearRing(_OfPixels):
    """Minus the distance between puck and ring at the end: what a task wants, and what a world model must not learn to
    imagine. For experiments on reward hacking."""

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Tensor:
        found = seen(_video(clips)[:, :, -1:], ("puck", "ring"))
        distance = numpy.linalg.norm(found.position["puck"] - found.position["ring"], axis=-1)[:, 0]
        return -torch.from_numpy(numpy.nan_to_num(distance, nan=LOST_PX))


def seen(video_B_C_F_H_W: Tensor, things: Sequence[str] = THINGS) -> Detection:
    pictures = video_B_C_F_H_W
    if pictures.is_floating_point():
        pictures = pictures.round().clamp(0, 255).to(torch.uint8)
    return detect(numpy.ascontiguousarray(pictures.permute(0, 2, 3, 4, 1).numpy()), things)


def _seen_truly(context: Mapping[str, Any], things: Sequence[str] = THINGS) -> Detection:
    """The objects that true clips show. Clips of a group follow each other and share one, which is read once."""
    true, rows = torch.unique_consecutive(_required(context, "true_video"), dim=0, return_inverse=True)
    found = seen(true, things)
    position = {thing: where[rows.numpy()] for thing, where in found.position.items()}
    return Detection(position, found.is_closed[rows.numpy()])


def _counted_frames(video: Tensor, context: Mapping[str, Any]) -> Any:
    first_B = numpy.array(_first_frames(context))
    return numpy.arange(video.shape[2])[None] >= first_B[:, None]
