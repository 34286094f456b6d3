# SPDX-License-Identifier: Apache-2.0
"""Likeness of videos to true ones, frame by frame: PSNR, SSIM, LPIPS or a stand-in for it, and sharpness.

All take uint8 [B, C, F, H, W], or floats from 0 to 255, and but for `clip_psnr` give a number for each frame [F], the
mean over the clips.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from imaginaire.errors import ConfigError, DataError

SSIM_SIDE, SSIM_SIGMA = 11, 1.5  # the Gaussian window of Wang et al. 2004
SSIM_C1, SSIM_C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
GRADIENT_C = 170.0  # of Xue et al. 2014, for pixels from 0 to 255
LUMA = (0.299, 0.587, 0.114)
HIGHEST_PSNR = 100.0  # of frames that are equal
MOVES = 32  # a pixel moves where a colour differs by more than this, of 255, from a picture before it
PIXELS_AT_ONCE = 1 << 22


def moves(video_B_C_F_H_W: Tensor, before_B_C_F_H_W: Tensor) -> Tensor:
    """[B, 1, F, H, W], true where a pixel differs from a picture before it, of each frame or of all."""
    return (video_B_C_F_H_W.float() - before_B_C_F_H_W.float()).abs().amax(dim=1, keepdim=True) > MOVES


def psnr(video_B_C_F_H_W: Tensor, truth_B_C_F_H_W: Tensor) -> Tensor:
    """The ratio of peak signal to noise in dB, of the mean squared error over all clips."""
    squared_F = _by_frame(
        lambda x, y: (x - y).square().mean(dim=(1, 2, 3), dtype=torch.float64), video_B_C_F_H_W, truth_B_C_F_H_W
    )
    return (10 * torch.log10(255**2 / squared_F)).clamp(max=HIGHEST_PSNR)


def clip_psnr(video_B_C_F_H_W: Tensor, truth_B_C_F_H_W: Tensor) -> Tensor:
    """[B], the PSNR of each clip in dB, of all its frames; equal ones have 68."""
    squared_B = (video_B_C_F_H_W.float() - truth_B_C_F_H_W.float()).square().mean(dim=(1, 2, 3, 4))
    return 10 * torch.log10(255**2 / squared_B.clamp(min=0.01))


def ssim(video_B_C_F_H_W: Tensor, truth_B_C_F_H_W: Tensor) -> Tensor:
    """Structural similarity, from -1 to 1, of each colour by itself: Gaussian windows that lie within the picture."""
    if min(video_B_C_F_H_W.shape[-2:]) < SSIM_SIDE:
        size = list(video_B_C_F_H_W.shape[-2:])
        raise DataError(f"SSIM is of windows of {SSIM_SIDE} pixels; these pictures have {size}.")
    place = torch.arange(SSIM_SIDE, dtype=torch.float64) - SSIM_SIDE // 2
    window_I = torch.exp(-(place**2) / (2 * SSIM_SIGMA**2))
    window_I = (window_I / window_I.sum()).to(video_B_C_F_H_W.device, torch.float32)

    def blurred(x_N_1_H_W: Tensor) -> Tensor:
        return functional.conv2d(functional.conv2d(x_N_1_H_W, window_I.view(1, 1, 1, -1)), window_I.view(1, 1, -1, 1))

    def measure(x_N_C_H_W: Tensor, y_N_C_H_W: Tensor) -> Tensor:
        # About the middle of the range: the differences of squares below then keep their digits.
        x, y = (part.flatten(0, 1)[:, None] - 127.5 for part in (x_N_C_H_W, y_N_C_H_W))
        x_mean, y_mean = blurred(x), blurred(y)
        x_variance, y_variance = blurred(x * x) - x_mean**2, blurred(y * y) - y_mean**2
        covariance = blurred(x * y) - x_mean * y_mean
        x_mean, y_mean = x_mean + 127.5, y_mean + 127.5
        likeness = (2 * x_mean * y_mean + SSIM_C1) * (2 * covariance + SSIM_C2)
        likeness /= (x_mean**2 + y_mean**2 + SSIM_C1) * (x_variance + y_variance + SSIM_C2)
        return likeness.mean(dim=(1, 2, 3)).view(x_N_C_H_W.shape[:2]).mean(dim=1)

    return _by_frame(measure, video_B_C_F_H_W, truth_B_C_F_H_W)


def gradient_similarity(video_B_C_F_H_W: Tensor, truth_B_C_F_H_W: Tensor) -> Tensor:
    """Mean likeness of the gradients' magnitudes, 1 for equal ones: a stand-in for LPIPS that needs no network.

    Of luminance at half the size, by the kernels of Prewitt. It sees blur and lost edges, and is no measure of what a
    person would see.
    """

    def measure(x_N_C_H_W: Tensor, y_N_C_H_W: Tensor) -> Tensor:
        x, y = (_gradient(functional.avg_pool2d(_luma(part), 2)) for part in (x_N_C_H_W, y_N_C_H_W))
        return ((2 * x * y + GRADIENT_C) / (x * x + y * y + GRADIENT_C)).mean(dim=(1, 2, 3))

    return _by_frame(measure, video_B_C_F_H_W, truth_B_C_F_H_W)


def sharpness(video_B_C_F_H_W: Tensor) -> Tensor:
    """[F], the root mean square of the gradient of luminance. Blur takes it away (its plain mean it leaves alone)."""
    return _by_frame(lambda x: _gradient(_luma(x)).square().mean(dim=(1, 2, 3)), video_B_C_F_H_W).sqrt()


def fine_detail(video_B_C_F_H_W: Tensor) -> Tensor:
    """[F], the mean square of the Laplacian of luminance: of edges alone, and lost sooner by blur than `sharpness`."""

    def measure(x_N_C_H_W: Tensor) -> Tensor:
        kernel = x_N_C_H_W.new_tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])
        return functional.conv2d(_luma(x_N_C_H_W), kernel[None, None]).square().mean(dim=(1, 2, 3))

    return _by_frame(measure, video_B_C_F_H_W)


def lpips(video_B_C_F_H_W: Tensor, truth_B_C_F_H_W: Tensor) -> Tensor:
    """Perceptual distance of the package ``lpips`` with its AlexNet, 0 for equal frames."""
    network = lpips_package().LPIPS(net="alex", verbose=False).to(video_B_C_F_H_W.device)
    with torch.no_grad():
        return _by_frame(lambda x, y: network(x / 127.5 - 1, y / 127.5 - 1).flatten(), video_B_C_F_H_W, truth_B_C_F_H_W)


def lpips_package() -> Any:
    """The package, or an error with the command that installs it."""
    try:
        import lpips as package
    except ImportError as error:
        raise ConfigError(
            "'lpips' is not installed: pip install lpips (it needs torchvision, and downloads AlexNet when first used)."
            " Without --lpips, the similarity of gradients is measured in its place."
        ) from error
    return package


def _by_frame(measure: Callable[..., Tensor], *videos: Tensor) -> Tensor:
    """[F], the mean over the clips of ``measure`` over pictures [N, C, H, W] of each video."""
    frames, height, width = videos[0].shape[2:]
    at_once = max(1, PIXELS_AT_ONCE // (height * width))
    split = (video.transpose(1, 2).flatten(0, 1).split(at_once) for video in videos)
    parts = [measure(*(part.float() for part in of_videos)) for of_videos in zip(*split)]
    return torch.cat(parts).double().view(-1, frames).mean(dim=0)


def _luma(x_N_C_H_W: Tensor) -> Tensor:
    weights = x_N_C_H_W.new_tensor(LUMA)[:, None, None]
    return (x_N_C_H_W * weights).sum(dim=1, keepdim=True)


def _gradient(x_N_1_H_W: Tensor) -> Tensor:
    """The magnitude of the gradient, where the whole kernel lies within the picture."""
    kernel = x_N_1_H_W.new_tensor([[1.0, 0.0, -1.0]] * 3) / 3
    both = functional.conv2d(x_N_1_H_W, torch.stack([kernel, kernel.T])[:, None])
    return both.square().sum(dim=1, keepdim=True).sqrt()
