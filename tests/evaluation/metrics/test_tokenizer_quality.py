# SPDX-License-Identifier: Apache-2.0
"""Figures of a tokenizer on recordings: what is lost is found, and the verdict says so."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cosmos_predict2.data.action_conditioned.recorded_episodes import EpisodeWindows
from cosmos_predict2.evaluation.metrics.tokenizer_quality import measure_tokenizer


class Shuffled:
    """A tokenizer that folds pixels into channels, scaled to deviation 1, and may lose something on the way."""

    dtype = torch.float32

    def __init__(self, offset: float = 0.0, coarse: int = 1, still: bool = False) -> None:
        self.offset, self.coarse, self.still = offset, coarse, still

    def encode(self, video_B_C_F_H_W: Tensor) -> Tensor:
        video = video_B_C_F_H_W[:, :, :1].expand_as(video_B_C_F_H_W) if self.still else video_B_C_F_H_W
        small = functional.avg_pool3d(video, (1, self.coarse, self.coarse))
        return (small - MEAN) / DEVIATION + self.offset

    def decode(self, latent_B_C_T_H_W: Tensor) -> Tensor:
        video = (latent_B_C_T_H_W - self.offset) * DEVIATION + MEAN
        return video.repeat_interleave(self.coarse, 3).repeat_interleave(self.coarse, 4)


def _windows(num: int, seed: int) -> EpisodeWindows:
    """A white square goes right and down by its actions."""
    draws = np.random.default_rng(seed)
    actions = draws.integers(-2, 3, (num, 8, 2)).astype(np.float64)
    places = 16 + np.clip(np.concatenate([np.zeros((num, 1, 2)), actions.cumsum(1)], axis=1), -12, 12)
    pictures = np.zeros((num, 9, 32, 32, 3), np.uint8)
    for clip, way in zip(pictures, places.astype(int), strict=True):
        for frame, (y, x) in zip(clip, way, strict=True):
            frame[y - 3 : y + 3, x - 3 : x + 3] = 255
    return EpisodeWindows(pictures, np.diff(places, axis=1), list(range(num)))


LEARNT, HELD = _windows(40, 0), _windows(16, 1)
PIXELS = torch.from_numpy(HELD.pictures).float() / 127.5 - 1
MEAN, DEVIATION = float(PIXELS.mean()), float(PIXELS.std())


def test_a_tokenizer_that_loses_nothing_is_good() -> None:
    figures = measure_tokenizer(Shuffled(), HELD, LEARNT)  # type: ignore[arg-type]
    assert figures.verdict == "good" and figures.psnr > 50 and math.isnan(figures.value_correlation)
    assert replace(figures, psnr=25.0, standstill=27.0).verdict == "doubtful"  # less than what moves
    assert replace(figures, psnr=28.0, standstill=27.0).verdict == "good"
    assert figures.action_r2 > 0.5 and figures.share_of_actions == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("tokenizer", "verdict", "named"),
    [
        (Shuffled(offset=6.0), "bad", "channel of mean +6.0"),
        (Shuffled(coarse=8), "bad", "dB"),
        (Shuffled(still=True), "bad", "actions are read"),
    ],
)
def test_what_is_lost_is_named_with_a_cure(tokenizer: Shuffled, verdict: str, named: str) -> None:
    figures = measure_tokenizer(tokenizer, HELD, LEARNT)  # type: ignore[arg-type]
    assert figures.verdict == verdict and named in figures.as_text()
    assert figures.as_dict()["cures"]


def test_what_a_reward_sees_is_compared_on_the_last_picture() -> None:
    def height(pictures_N_H_W_C: Tensor) -> Tensor:
        return (pictures_N_H_W_C[..., 0].float().sum(2) * torch.arange(32)).sum(1)

    kept = measure_tokenizer(Shuffled(), HELD, LEARNT, value=height)  # type: ignore[arg-type]
    lost = measure_tokenizer(Shuffled(still=True), HELD, LEARNT, value=height)  # type: ignore[arg-type]
    assert kept.value_correlation > 0.99 and not lost.value_correlation > 0.9
