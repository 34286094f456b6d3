# SPDX-License-Identifier: Apache-2.0
"""Rewards of world models that need no judge: generated clips against true ones, or against what physics forbids.

Each is a function of (clips, context) and gives a higher number for a better clip. Conditioning frames do not count.
``requires`` names what of the context a reward compares with: a run whose data lack it is refused before it starts.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.evaluation.metrics.video_quality import moves
from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.tokenizers.sizes import pixel_frames
from imaginaire.errors import DataError

LARGEST_DB = 60.0


class _OfPixels:
    """A reward that has its clips decoded."""

    needs_pixels = True


class LatentAgreement:
    """Minus the mean squared error of the latents: how close the clip is to the true future."""

    requires = ("true_latents",)

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Tensor:
        true, latents = _required(context, "true_latents"), _latents(clips)
        error = (latents.float() - true.float()).square()
        counts_B_T = torch.arange(error.shape[2])[None] >= torch.as_tensor(context["num_conditional_frames"])[:, None]
        per_frame = error.mean(dim=(1, 3, 4)) * counts_B_T
        return -per_frame.sum(dim=1) / counts_B_T.sum(dim=1).clamp(min=1)


class Agreement(_OfPixels):
    """PSNR to the true future in dB, over the pixels in which that differs from the last conditioning frame."""

    requires = ("true_video",)

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Mapping[str, Tensor]:
        video, true = _both(clips, context)
        moved = _moves(true, context)
        squared = (video - true).square().mean(dim=1, keepdim=True)
        moving = _mean(squared, moved)
        resting = _mean(squared, ~moved & _counted(true, context))
        return {"value": _decibels(moving), "resting_psnr": _decibels(resting).nan_to_num(LARGEST_DB)}


class StaticBackground(_OfPixels):
    """Minus the mean change, of 255, of pixels that rest in the true clip."""

    requires = ("true_video",)

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Tensor:
        video, true = _both(clips, context)
        rests = ~_moves(true, context) & _counted(true, context)
        return -_mean((video - true).abs().mean(dim=1, keepdim=True), rests)


class Smoothness(_OfPixels):
    """Minus the mean size of second differences in time that a generated frame ends: flicker, and jumps of things."""

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Tensor:
        video = _video(clips).float()
        second = video[:, :, 2:] - 2 * video[:, :, 1:-1] + video[:, :, :-2]
        return -_mean(second.abs(), _counted(video, context)[:, :, 2:])


class Motion(_OfPixels):
    """Minus how far the amount of motion is from the true one, as a share: against rewards that favour stillness."""

    requires = ("true_video",)

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Tensor:
        video, true = _both(clips, context)
        counted = _counted(true, context)[:, :, 1:]
        amounts = [_mean(clip.diff(dim=2).abs(), counted) for clip in (video, true)]
        return -(amounts[0] / amounts[1].clamp(min=1e-3) - 1).abs()


class Random:
    """Numbers that depend on nothing but the clip's latents: a control, from which nothing can be learnt."""

    def __call__(self, clips: Clips, context: Mapping[str, Any]) -> Tensor:
        mixed = (_latents(clips).double().flatten(1).sum(dim=1) * 1e6).sin() * 1e4
        return (mixed - mixed.floor()).float()


def _required(context: Mapping[str, Any], key: str) -> Tensor:
    if key not in context:
        raise DataError(f"This reward compares with '{key}', which the data of this run do not have.")
    value: Tensor = context[key]
    return value


def _latents(clips: Clips) -> Tensor:
    if clips.latents_B_C_T_H_W is None:
        raise DataError("This reward looks at latents, but the clips came as video: send latents (media=latent).")
    return clips.latents_B_C_T_H_W


def _video(clips: Clips) -> Tensor:
    if clips.video_B_C_F_H_W is None:
        raise DataError("This reward looks at pixels, but the clips were not decoded: set needs_pixels = True.")
    return clips.video_B_C_F_H_W


def _both(clips: Clips, context: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    return _video(clips).float(), _required(context, "true_video").float()


def _first_frames(context: Mapping[str, Any]) -> list[int]:
    """The first pixel frame of each clip that is generated."""
    return [pixel_frames(int(n)) if n else 0 for n in context["num_conditional_frames"]]


def _counted(true: Tensor, context: Mapping[str, Any]) -> Tensor:
    """[B, 1, F, 1, 1], true on generated frames."""
    first_B = torch.tensor(_first_frames(context))
    return (torch.arange(true.shape[2])[None] >= first_B[:, None])[:, None, :, None, None]


def _moves(true: Tensor, context: Mapping[str, Any]) -> Tensor:
    """[B, 1, F, H, W], where the true clip differs from its last conditioning frame."""
    last = [max(0, first - 1) for first in _first_frames(context)]
    reference = torch.stack([clip[:, k : k + 1] for clip, k in zip(true, last, strict=True)])
    return moves(true, reference) & _counted(true, context)


def _mean(value: Tensor, mask: Tensor) -> Tensor:
    """The mean under a mask of each clip; NaN, so that the score is invalid, where it is empty."""
    mask = mask.expand_as(value)
    return (value * mask).sum(dim=(1, 2, 3, 4)) / mask.sum(dim=(1, 2, 3, 4))


def _decibels(squared_B: Tensor) -> Tensor:
    return 10 * torch.log10(255**2 / squared_B.clamp(min=255**2 / 10 ** (LARGEST_DB / 10)))
