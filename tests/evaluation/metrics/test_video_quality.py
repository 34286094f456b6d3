# SPDX-License-Identifier: Apache-2.0
"""Figures of likeness: against formulas written out once more, and by what they must say."""

import math

import numpy
import pytest
import torch
from torch import Tensor

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
    return torch.from_numpy(numpy.stack([episodes.render(i, 0, frames) for i in range(num)])).permute(0, 4, 1, 2, 3)


def noisy(video: Tensor, amount: float) -> Tensor:
    noise = torch.randn(video.shape, generator=torch.Generator().manual_seed(0))
    return (video + amount * noise).round().clamp(0, 255).to(torch.uint8)


def blurred(video: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(video.float(), (1, 1, 1, 1, 0, 0), mode="replicate")
    return torch.nn.functional.avg_pool3d(padded, (1, 3, 3), stride=1)


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
    place = numpy.arange(11) - 5
    window = numpy.exp(-(place[:, None] ** 2 + place[None] ** 2) / (2 * 1.5**2))
    window /= window.sum()
    x, y = (part[0, 0, 0].double().numpy() for part in (video, truth))
    found = []
    for top in range(3):
        for left in range(2):
            a, b = (part[top : top + 11, left : left + 11] for part in (x, y))
            a_mean, b_mean = (window * a).sum(), (window * b).sum()
            a_variance, b_variance = ((window * (a - a_mean) ** 2).sum(), (window * (b - b_mean) ** 2).sum())
            covariance = (window * (a - a_mean) * (b - b_mean)).sum()
            c1, c2 = 2.55**2, 7.65**2
            found.append(
                (2 * a_mean * b_mean + c1)
                * (2 * covariance + c2)
                / ((a_mean**2 + b_mean**2 + c1) * (a_variance + b_variance + c2))
            )
    assert float(ssim(video, truth)[0]) == pytest.approx(float(numpy.mean(found)), abs=1e-5)


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
