# SPDX-License-Identifier: Apache-2.0
"""Figures of a tokenizer on recordings, before anything is trained on its latents.

Held-out windows pass through it and back. The figures are decibels; how well the actions are still read from the
pictures, by a probe of true pictures; how much of a reward model's judgement is left; and the moments of the latents,
which world models expect to have mean 0 and deviation 1: their noise levels are in that unit.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from cosmos_predict2.data.action_conditioned.recorded_episodes import EpisodeWindows
from cosmos_predict2.evaluation.metrics.inverse_dynamics import fit_probe
from cosmos_predict2.evaluation.metrics.video_quality import clip_psnr
from cosmos_predict2.interfaces import VideoTokenizer
from cosmos_predict2.tokenizers.sizes import pixel_frames
from cosmos_predict2.world_model.world_model import to_uint8
from imaginaire.errors import DataError

NUM_FRAMES = pixel_frames(4)  # of a window, as the tiny world models take them
NUM_WINDOWS = 64  # that are held out ...
NUM_LEARNT = 128  # ... and that the probe learns from
BATCH = 16
# Bounds. A world model of MetaWorld's pictures taught a policy at 25.8 dB and not at 23.9, where a channel's mean was
# -6.4 and the deviation 1.9; the others are guesses.
FAINT, LOST = 24.0, 20.0  # decibels
FARTHEST_MEAN, LEAST_DEVIATION, MOST_DEVIATION = 2.0, 0.6, 1.6
READABLE = 0.1  # of R2: below it, true pictures do not show the actions
DOUBTFUL_SHARE, LEAST_SHARE = 0.4, 0.1  # of what true pictures show
FIT = "Fit the tiny tokenizer to the recordings: python -m scripts.fit_tiny_tokenizer --data FOLDER --out FILE"

Value = Callable[[Tensor], Tensor]  # of uint8 pictures [N, H, W, C]: a number for each


@dataclass(frozen=True)
class TokenizerFigures:
    """Figures over held-out windows; NaN: cannot be measured."""

    psnr: float  # decibels, the mean over windows
    psnr_worst: float  # of the window at the fifth percentile
    standstill: float  # decibels of the first picture in place of all: what repeating costs nothing
    action_r2: float  # of sums over four steps, read from true pictures ...
    action_r2_through: float  # ... and from those that passed the tokenizer
    value_correlation: float  # of a reward model's values on true pictures and on those that passed
    channel_mean: list[float]  # of the latents
    channel_deviation: list[float]
    deviation: float  # of all of them, about each channel's mean
    num_windows: int

    @property
    def share_of_actions(self) -> float:
        """The share left of the actions that true pictures show; NaN where they show none."""
        return self.action_r2_through / self.action_r2 if self.action_r2 > READABLE else math.nan

    def faults(self) -> list[tuple[bool, str, str]]:
        """Each figure outside its bounds: does it forbid training, the reason and the cure."""
        found = []
        farthest = max(self.channel_mean, key=abs)
        if abs(farthest) > FARTHEST_MEAN or not LEAST_DEVIATION <= self.deviation <= MOST_DEVIATION:
            moments = f"deviation {self.deviation:.2f} and a channel of mean {farthest:+.1f} (1 and 0 are right)"
            text = f"latents have {moments}"
            found.append((True, text, FIT))
        if self.psnr < (least := max(FAINT, self.standstill)):  # below a standstill it hides what moves
            text = f"pictures come back with {self.psnr:.1f} dB ({least:.1f} is enough here)"
            found.append((self.psnr < LOST, text, f"{FIT}, longer with --steps, or with a larger --video_size"))
        if self.share_of_actions < DOUBTFUL_SHARE:
            text = (
                f"actions are read from pictures that passed it with R2 {self.action_r2_through:.2f}, from true ones"
                f" with {self.action_r2:.2f}"
            )
            found.append((self.share_of_actions < LEAST_SHARE, text, "Take larger pictures (--video_size), fit longer"))
        if self.value_correlation < DOUBTFUL_SHARE:
            text = f"a reward's values there correlate with those of true pictures by {self.value_correlation:.2f} only"
            cure = "Train the reward on pictures that passed the tokenizer, too, or take larger pictures"
            found.append((self.value_correlation < LEAST_SHARE, text, cure))
        return found

    @property
    def verdict(self) -> str:
        """ "good", "doubtful" or "bad"."""
        forbids = [forbids for forbids, _, _ in self.faults()]
        return "bad" if any(forbids) else "doubtful" if forbids else "good"

    def as_text(self) -> str:
        """One or two sentences: the verdict with its figures, and the cure."""
        share = self.share_of_actions
        kept = "" if math.isnan(share) else f", {share:.0%} of the readable actions left"
        about = f"{self.psnr:.1f} dB on {self.num_windows} held-out windows (a standstill {self.standstill:.1f}){kept}"
        about += f", latents of deviation {self.deviation:.2f}"
        faults = self.faults()
        if not faults:
            return f"the tokenizer is good for these recordings: {about}."
        reasons = "; ".join(reason for _, reason, _ in faults)
        cures = ". ".join(dict.fromkeys(cure for _, _, cure in faults))
        return f"the tokenizer is {self.verdict} for these recordings ({about}): {reasons}. {cures}."

    def as_dict(self) -> dict[str, Any]:
        faults = self.faults()
        found = {**asdict(self), "share_of_actions": self.share_of_actions, "verdict": self.verdict}
        cures = list(dict.fromkeys(cure for _, _, cure in faults))
        return {**found, "reasons": [reason for _, reason, _ in faults], "cures": cures}


@torch.no_grad()
def measure_tokenizer(
    tokenizer: VideoTokenizer, held_out: EpisodeWindows, learnt: EpisodeWindows, *, value: Value | None = None
) -> TokenizerFigures:
    """Figures of ``held_out`` windows; ``learnt`` are those by which a probe learns to read actions from pictures."""
    if held_out.pictures.shape[1] < 2:
        raise DataError("A tokenizer is measured on windows of several pictures.")
    true_B_C_F_H_W = _video(held_out)
    back_B_C_F_H_W = torch.empty_like(true_B_C_F_H_W)
    latents = []
    for rows in torch.arange(len(held_out)).split(BATCH):
        video = true_B_C_F_H_W[rows].float() / 127.5 - 1
        latent = tokenizer.encode(video)
        back_B_C_F_H_W[rows] = to_uint8(tokenizer.decode(latent)).cpu()
        latents.append(latent.float().cpu())
    latent_C_L = torch.cat(latents).transpose(0, 1).flatten(1)
    decibels_B = clip_psnr(back_B_C_F_H_W, true_B_C_F_H_W)
    still_B = clip_psnr(true_B_C_F_H_W[:, :, :1].expand_as(true_B_C_F_H_W), true_B_C_F_H_W)
    r2 = through = correlation = math.nan
    action_B_A_D = torch.from_numpy(held_out.actions)
    with suppress(DataError):  # too few windows for a probe, or actions that are all the same
        probe = fit_probe(_video(learnt), torch.from_numpy(learnt.actions))
        r2, through = (probe.score(one, action_B_A_D).r2_of_sums for one in (true_B_C_F_H_W, back_B_C_F_H_W))
    if value is not None:  # of each window's last picture
        last = [video[:, :, -1].permute(0, 2, 3, 1) for video in (true_B_C_F_H_W, back_B_C_F_H_W)]
        correlation = float(torch.corrcoef(torch.stack([value(pictures).float().cpu() for pictures in last]))[0, 1])
    return TokenizerFigures(
        psnr=float(decibels_B.mean()),
        psnr_worst=float(decibels_B.quantile(0.05)),
        standstill=float(still_B.mean()),
        action_r2=r2,
        action_r2_through=through,
        value_correlation=correlation,
        channel_mean=latent_C_L.mean(dim=1).tolist(),
        channel_deviation=latent_C_L.std(dim=1).tolist(),
        deviation=float(latent_C_L.var(dim=1).mean().sqrt()),
        num_windows=len(held_out),
    )


def _video(windows: EpisodeWindows) -> Tensor:
    """uint8 [B, C, F, H, W]."""
    return torch.from_numpy(numpy.ascontiguousarray(windows.pictures.transpose(0, 4, 1, 2, 3)))
