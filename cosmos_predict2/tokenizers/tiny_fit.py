# SPDX-License-Identifier: Apache-2.0
"""Fitting the weights of the tiny tokenizer to pictures, from weights that are there or from principal components.

    net, steps = fit(pictures, Length(steps=400), seed=0, start=str(SHIPPED))
    write("my_tokenizer.safetensors", net, {})

Latents are centred for each channel and divided by one deviation, which is the contract of `TinyAutoencoder`.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from cosmos_predict2.tokenizers.tiny import GROUP, LATENT_CHANNELS, PATCH, PatchCoder, TinyAutoencoder, load
from imaginaire import storage

BATCH = 32
LEARNING_RATE = 3e-3
CODE_NOISE = 0.03  # of latents with unit variance: what a model generates is never exact
COMPONENTS = "components"
REPORT_EVERY = 200  # steps, after which latents are centred and scaled anew


def batch_of(pictures_N_F_H_W_C: np.ndarray, num: int, num_frames: int, draws: np.random.Generator) -> Tensor:
    """[num, num_frames * 3, H, W] in [-1, 1] of uint8 windows of recordings: consecutive frames from anywhere."""
    count, length = pictures_N_F_H_W_C.shape[:2]
    rows = draws.integers(count, size=num)
    starts = draws.integers(length - num_frames + 1, size=num)
    chosen = pictures_N_F_H_W_C[rows[:, None], starts[:, None] + np.arange(num_frames)]
    return torch.from_numpy(chosen).permute(0, 1, 4, 2, 3).flatten(1, 2).float().div_(127.5).sub_(1)


@dataclass(frozen=True)
class Length:
    """Steps, which are the same on every machine; or a time by a clock that gives seconds; neither: no training."""

    steps: int = 0
    seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def begin(self) -> Callable[[int], float]:
        """The part of the way that is done, by the number of steps that were taken."""
        if self.seconds:
            began = self.clock()
            return lambda step: (self.clock() - began) / self.seconds
        return lambda step: step / self.steps if self.steps else 1.0


def coders(net: TinyAutoencoder) -> list[tuple[PatchCoder, int]]:
    return [(net.frame, 1), (net.group, GROUP)]


@torch.no_grad()
def start_from_components(net: TinyAutoencoder, pictures_N_F_H_W_C: np.ndarray, draws: np.random.Generator) -> None:
    """Principal components of the patches of these pictures."""
    for coder, num_frames in coders(net):
        pictures_N_C_H_W = batch_of(pictures_N_F_H_W_C, 512, num_frames, draws)
        patches = F.pixel_unshuffle(pictures_N_C_H_W, PATCH).permute(0, 2, 3, 1).flatten(0, 2).double()
        mean = patches.mean(0)
        centred = patches - mean
        covariance = centred.T @ centred / centred.square().sum()
        components = torch.linalg.eigh(covariance).eigenvectors[:, -LATENT_CHANNELS:].flip(1).T
        # A still group has twice the length of its frame as a vector: the gain makes both kinds of codes alike.
        coder.set_linear(mean.float(), components.float(), gain=num_frames**-0.5)


def train(
    net: TinyAutoencoder,
    pictures_N_F_H_W_C: np.ndarray,
    draws: np.random.Generator,
    length: Length,
    report: Callable[[int, float, list[float]], None],
) -> int:
    """Number of steps taken; the learning rate falls to zero at the end.

    Now and then ``report`` gets the step, the part of the way, and decibels of single frames and of groups.
    """
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))
    set_scale(net, pictures_N_F_H_W_C, draws)
    part_of, step = length.begin(), 0
    while (part := part_of(step)) < 1:
        warm = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm * (0.5 + 0.5 * math.cos(math.pi * part))
        loss, decibels = torch.zeros((), device=net.scale.device), []
        for coder, num_frames in coders(net):
            pictures = batch_of(pictures_N_F_H_W_C, BATCH, num_frames, draws).to(net.scale.device)
            codes = coder.encode(pictures)
            noisy = codes + torch.randn_like(codes) * CODE_NOISE * net.scale
            error = (coder.decode(noisy) - pictures).square().mean()
            loss = loss + error.log()  # which weighs decibels alike, whether a kind of picture is easy or hard
            decibels.append(10 * math.log10(4 / error.item()))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        if step % REPORT_EVERY == 0:
            set_scale(net, pictures_N_F_H_W_C, draws)
            report(step, part, decibels)
        step += 1
    return step


@torch.no_grad()
def set_scale(net: TinyAutoencoder, pictures_N_F_H_W_C: np.ndarray, draws: np.random.Generator) -> None:
    """Centre each channel of the codes, and give all of them together unit variance on these pictures."""
    spreads = []
    for i, (coder, num_frames) in enumerate(coders(net)):
        pictures = batch_of(pictures_N_F_H_W_C, 256, num_frames, draws).to(net.scale.device)
        codes = coder.encode(pictures).permute(0, 2, 3, 1).flatten(0, 2)
        net.centre[i] = codes.mean(0)
        spreads.append(codes.var(0).mean())
    net.scale.copy_(torch.stack(spreads).mean().sqrt())


def write(path: str, net: TinyAutoencoder, metadata: dict[str, str]) -> None:
    """The weights in half precision, with a record of how they were made."""
    state = {name: tensor.cpu().half().contiguous() for name, tensor in net.state_dict().items()}
    storage.write_bytes(path, save(state, metadata))


def fit(
    pictures_N_F_H_W_C: np.ndarray,
    length: Length,
    *,
    seed: int,
    start: str,
    device: str = "cpu",
    report: Callable[[int, float, list[float]], None] = lambda step, part, decibels: None,
) -> tuple[TinyAutoencoder, int]:
    """The tokenizer of these pictures, and the number of steps.

    ``start`` is a file of weights, or "components": the principal components of the pictures.
    """
    draws = np.random.default_rng(seed)
    torch.manual_seed(seed)
    if start == COMPONENTS:
        net = TinyAutoencoder()
        start_from_components(net, pictures_N_F_H_W_C, draws)
    else:
        net = load(start)
    net.to(device).requires_grad_(True)
    steps = train(net, pictures_N_F_H_W_C, draws, length, report)
    set_scale(net, pictures_N_F_H_W_C, draws)
    return net.requires_grad_(False), steps
