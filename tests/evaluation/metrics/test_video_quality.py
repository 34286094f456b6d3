# SPDX-License-Identifier: Apache-2.0
"""Figures of likeness: against formulas written out once more, and by what they must say."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cosmos_predict2.data.action_conditioned.recorded_episodes import EpisodeWindows
from cosmos_predict2.evaluation.metrics.tokenizer_quality import measure_tokenizer
from cosmos_predict2.evaluation.metrics.video_quality import (
    HIGHEST_PSNR,
    gradient_similarity,
    lpips,
    psnr,
    sharpness,
    ssim,
)
from cosmos_predict2.toy_world.episodes import make_episodes
from imaginaire.errors import ConfigError


def clips(num: int = 2, frames: int = 3) -> Tensor:
    episodes = make_episodes(num, seed=3)
    return torch.from_numpy(np.stack([episodes.render(i, 0, frames) for i in range(num)])).permute(0, 4, 1, 2, 3)


def noisy(video: Tensor, amount: float) -> Tensor:
    noise = torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    return (video + amount * noise).round().clamp(0, 255).to(torch.uint8)


def blurred(video: Tensor) -> Tensor:
    padded = functional.pad(video.float(), (1, 1, 1, 1, 0, 0), mode="replicate")
    return functional.avg_pool3d(padded, (1, 3, 3), stride=1)


def test_psnr_is_of_the_error_of_all_clips_and_each_frame_by_itself() -> None:
    truth = clips()
    video = truth.float()
    video[0, :, 1] += 10.0
    video[1, :, 1] -= 20.0
    found = psnr(video, truth)
    assert found[0] == found[2] == HIGHEST_PSNR
    assert float(found[1]) == pytest.approx(10 * math.log10(255**2 / 250))


def test_ssim_is_its_formula_in_every_window() -> None:
    truth = clips(1, 1)[:, :1, :, 8:21, 10:22]
    video = noisy(truth, 30)
    place = np.arange(11) - 5
    window = np.exp(-(place[:, None] ** 2 + place[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    x, y = (part[0, 0, 0].double().numpy() for part in (video, truth))
    found = []
    for top in range(3):
        for left in range(2):
            a, b = (part[top : top + 11, left : left + 11] for part in (x, y))
            a_mean, b_mean = (window * a).sum(), (window * b).sum()
            a_variance, b_variance = (window * (a - a_mean) ** 2).sum(), (window * (b - b_mean) ** 2).sum()
            covariance = (window * (a - a_mean) * (b - b_mean)).sum()
            c1, c2 = 2.55**2, 7.65**2
            likeness = (2 * a_mean * b_mean + c1) * (2 * covariance + c2)
            found.append(likeness / ((a_mean**2 + b_mean**2 + c1) * (a_variance + b_variance + c2)))
    assert float(ssim(video, truth)[0]) == pytest.approx(float(np.mean(found)), abs=1e-5)


def test_likeness_is_one_for_equal_frames_and_falls_with_noise_and_blur() -> None:
    truth = clips()
    for likeness in (ssim, gradient_similarity):
        assert torch.allclose(likeness(truth, truth), torch.ones(3, dtype=torch.float64), atol=1e-6)
        assert torch.allclose(likeness(truth, noisy(truth, 8)), likeness(noisy(truth, 8), truth))
        by_noise = [float(likeness(noisy(truth, amount), truth).mean()) for amount in (0.0, 4.0, 16.0, 64.0)]
        assert by_noise == sorted(by_noise, reverse=True) and by_noise[-1] < 0.7
        assert float(likeness(blurred(truth), truth).mean()) < 0.99


def test_blur_takes_sharpness_away_and_a_shift_in_brightness_does_not() -> None:
    truth = clips()
    assert (sharpness(blurred(truth)) < 0.9 * sharpness(truth)).all()
    assert torch.allclose(sharpness(truth.float() + 5), sharpness(truth), rtol=1e-4)


def test_a_missing_package_for_lpips_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lpips", None)
    with pytest.raises(ConfigError, match="pip install lpips"):
        lpips(clips(), clips())


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
