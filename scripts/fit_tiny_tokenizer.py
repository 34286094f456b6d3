# SPDX-License-Identifier: Apache-2.0
"""Fit the weights of the tiny tokenizer on the toy world and on made-up textures; needs no download and no GPU.

    python -m scripts.fit_tiny_tokenizer --out cosmos_predict2/tokenizers/tiny.safetensors --minutes 20 --seed 0

It begins with principal components (all there is with --minutes 0) and trains the rest for the given time. Toy-world
episodes for the test lie at another place of the series; no photograph is used.
"""

import argparse
import math
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor

from cosmos_predict2.tokenizers.tiny import GROUP, LATENT_CHANNELS, PatchCoder, TinyAutoencoder, sizes_of
from cosmos_predict2.toy_world import make_episodes, render
from cosmos_predict2.toy_world.tasks import TASKS
from imaginaire import storage
from imaginaire.command_line import at_least
from imaginaire.training import provenance

NUM_EPISODES = 3000
EPISODE_STEPS = 24
SIZES = (48, 64)  # of the toy world's two settings
TURNS = (48, 48, 64)  # steps of the default size are more, as it is harder: the things fill more of its table
BATCH = 32
LEARNING_RATE = 3e-3
CODE_NOISE = 0.03  # of latents with unit variance: what a model generates is never exact
TEXTURE_SHARE = 0.3  # of the loss in every other step; textures are harder, and must not use up the codes
NUM_TEXTURES = 160
TEXTURE_SIDE = 192


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.fit_tiny_tokenizer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", required=True, help="file to write (.safetensors)")
    parser.add_argument(
        "--minutes", type=float, default=20, help="of training (default: 20); 0: principal components only"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="of data and start (default: 0)")
    parser.add_argument("--width", type=at_least(1), default=80, help="of the hidden layers (default: 80)")
    parser.add_argument("--num_blocks", type=at_least(1), default=2, help="blocks of each coder (default: 2)")
    arguments = parser.parse_args()
    if not 0 <= arguments.minutes < math.inf:
        parser.error(f"--minutes {arguments.minutes:g}: a number of at least 0")

    git = provenance.git_state(provenance.root())
    torch.manual_seed(arguments.seed)
    draws = np.random.default_rng(arguments.seed)
    worlds = {size: ToyFrames.make(size, arguments.seed) for size in SIZES}
    textures = make_textures(draws)
    net = TinyAutoencoder(arguments.width, arguments.num_blocks)
    start_from_components(net, worlds, textures, draws)
    steps = train(net, worlds, textures, draws, arguments.minutes * 60) if arguments.minutes else 0
    set_scale(net, worlds, draws)

    state = {name: tensor.half().contiguous() for name, tensor in net.state_dict().items()}
    figures = {f"psnr_toy_world_{size}": f"{psnr_of_fresh_clips(net, size):.1f}" for size in SIZES}
    metadata = {
        "command": shlex.join(["python", "-m", "scripts.fit_tiny_tokenizer", *sys.argv[1:]]),
        "seed": str(arguments.seed),
        "commit": "unknown" if git is None else git["commit"][:12],
        "steps": str(steps),
        **figures,
    }
    storage.write_atomically(arguments.out, lambda file: file.write(save(state, metadata)))
    print(f"{arguments.out}: {Path(arguments.out).stat().st_size / 1e3:.0f} kB, {metadata}")


@dataclass
class ToyFrames:
    """Compact states of many episodes, drawn as pictures when they are wanted."""

    states: np.ndarray  # [episodes, steps + 1, columns]
    size: int

    @classmethod
    def make(cls, size: int, seed: int, first: int = 0, num: int = NUM_EPISODES) -> "ToyFrames":
        halves = [
            make_episodes(num // 2, seed, mix=mix, length=EPISODE_STEPS, size=size, tasks=tuple(TASKS), first=first)
            for mix in ("mixed", "expert")
        ]
        return cls(np.concatenate([half.states for half in halves]), size)

    def batch(self, num: int, num_frames: int, draws: np.random.Generator) -> Tensor:
        """[num, num_frames * 3, size, size] in [-1, 1]: consecutive frames from anywhere."""
        episodes = draws.integers(len(self.states), size=num)
        starts = draws.integers(self.states.shape[1] - num_frames + 1, size=num)
        states = self.states[episodes[:, None], starts[:, None] + np.arange(num_frames)]
        frames = torch.from_numpy(render(states.reshape(num * num_frames, -1), self.size))
        frames = frames.reshape(num, num_frames, self.size, self.size, 3).permute(0, 1, 4, 2, 3)
        return frames.flatten(1, 2).float().div_(127.5).sub_(1)


# ---- textures --------------------------------------------------------------------------------------------------------


def make_textures(draws: np.random.Generator, num: int = NUM_TEXTURES) -> Tensor:
    """[N, 3, S, S] in [-1, 1]: overlapping leaves of all sizes with grain, whose statistics are much like a photo's."""
    return torch.stack([torch.from_numpy(_leaves(draws)) for _ in range(num)]).float()


def _leaves(draws: np.random.Generator) -> np.ndarray:
    side = TEXTURE_SIDE
    rows, columns = np.mgrid[:side, :side].astype(np.float32)
    # Few directions of colour, as in a scene under one light.
    tint, light = draws.normal(0, 0.25, 3), draws.uniform(-0.4, 0.4)
    picture = np.empty((3, side, side), np.float32)
    picture[:] = _colour(draws, tint, light)[:, None, None]
    for _ in range(int(draws.integers(40, 160))):
        radius = min(80.0, 3.0 * draws.pareto(1.2) + 3.0)
        y, x = draws.uniform(0, side, 2)
        angle, stretch = draws.uniform(0, math.pi), draws.uniform(0.3, 1)
        along = (columns - x) * math.cos(angle) + (rows - y) * math.sin(angle)
        across = (rows - y) * math.cos(angle) - (columns - x) * math.sin(angle)
        power = draws.choice([2, 2, 8])  # ellipses, and rounded rectangles
        far = (np.abs(along / radius) ** power + np.abs(across / (radius * stretch)) ** power) ** (1 / power)
        cover = np.clip((1 - far) * radius / draws.uniform(0.7, 3) + 0.5, 0, 1)
        shade = 1 + 0.5 * draws.normal() * np.clip(along / radius, -1, 1)
        colour = _colour(draws, tint, light)[:, None, None] * shade
        picture += cover * (colour - picture)
    picture += draws.uniform(0, 0.12) * _grain(draws, side)
    return np.clip(picture, -1, 1)


def _colour(draws: np.random.Generator, tint: np.ndarray, light: float) -> np.ndarray:
    return np.clip(light + draws.normal(0, 0.45) + tint * draws.normal() + draws.normal(0, 0.12, 3), -1, 1)


def _grain(draws: np.random.Generator, side: int) -> np.ndarray:
    """Noise of unit deviation whose amplitude falls with the frequency, grey for the most part."""
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None])
    filtered = np.fft.irfft2(np.fft.rfft2(draws.normal(size=(side, side))) / np.maximum(frequency, 1 / side))
    return (filtered / filtered.std()).astype(np.float32)


def texture_batch(textures: Tensor, num: int, num_frames: int, size: int, draws: np.random.Generator) -> Tensor:
    """[num, num_frames * 3, size, size]: a camera that pans over a texture and zooms a little."""
    chosen = textures[torch.from_numpy(draws.integers(len(textures), size=num))]
    zoom = np.exp(draws.uniform(-0.7, 0.4, (num, 1)) + draws.normal(0, 0.01, (num, 1)) * np.arange(num_frames))
    half = np.minimum(size / TEXTURE_SIDE * zoom, 0.95)
    speed = draws.normal(0, 1.2, (num, 1, 2)) * 2 / TEXTURE_SIDE * (draws.random((num, 1, 1)) < 0.9)
    centre = draws.uniform(-1, 1, (num, 1, 2)) * (1 - half[:, :1, None]) + speed * np.arange(num_frames)[:, None]
    matrix = np.zeros((num, num_frames, 2, 3), np.float32)
    matrix[..., 0, 0] = matrix[..., 1, 1] = half
    matrix[..., 2] = centre
    repeated = chosen.repeat_interleave(num_frames, 0)
    flat = torch.from_numpy(matrix).flatten(0, 1)
    grid = F.affine_grid(flat, [num * num_frames, 3, size, size], align_corners=False)
    views = F.grid_sample(repeated, grid, padding_mode="reflection", align_corners=False)
    return views.unflatten(0, (num, num_frames)).flatten(1, 2)


# ---- fitting ---------------------------------------------------------------------------------------------------------


def start_from_components(
    net: TinyAutoencoder, worlds: dict[int, ToyFrames], textures: Tensor, draws: np.random.Generator, num: int = 256
) -> None:
    """Principal components of patches, half toy world and half textures, each kind counted by its own variance."""
    for coder, num_frames in coders(net):
        kinds = [
            *(world.batch(num, num_frames, draws) for world in worlds.values()),
            texture_batch(textures, 2 * num, num_frames, 64, draws),
        ]
        patches = [F.pixel_unshuffle(pictures, 8).permute(0, 2, 3, 1).flatten(0, 2).double() for pictures in kinds]
        mean = torch.cat([part.mean(0, keepdim=True) for part in patches[:-1]]).mean(0)
        covariance = torch.zeros(mean.shape[0], mean.shape[0], dtype=torch.float64)
        for part in patches:
            centred = part - mean
            covariance += centred.T @ centred / centred.square().sum()
        components = torch.linalg.eigh(covariance).eigenvectors[:, -LATENT_CHANNELS:].flip(1).T
        # A still group has twice the length of its frame as a vector: the gain makes both kinds of codes alike.
        coder.set_linear(mean.float(), components.float(), gain=num_frames**-0.5)


def coders(net: TinyAutoencoder) -> list[tuple[PatchCoder, int]]:
    return [(net.frame, 1), (net.group, GROUP)]


def train(
    net: TinyAutoencoder, worlds: dict[int, ToyFrames], textures: Tensor, draws: np.random.Generator, seconds: float
) -> int:
    """Number of steps taken in the time; the learning rate falls to zero at its end."""
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99))
    set_scale(net, worlds, draws)
    began, step = time.monotonic(), 0
    while (part := (time.monotonic() - began) / seconds) < 1:
        warm = min(1.0, (step + 1) / 100)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm * (0.5 + 0.5 * math.cos(math.pi * part))
        world = worlds[TURNS[step % len(TURNS)]]
        loss, report = torch.zeros(()), []
        for coder, num_frames in coders(net):
            kinds = [(world.batch(BATCH, num_frames, draws), 1.0)]
            if step % 2 == 0:
                kinds.append((texture_batch(textures, BATCH // 2, num_frames, world.size, draws), TEXTURE_SHARE))
            for pictures, share in kinds:
                codes = coder.encode(pictures)
                noisy = codes + torch.randn_like(codes) * CODE_NOISE * net.scale
                error = (coder.decode(noisy) - pictures).square().mean()
                # The logarithm weighs decibels alike, whether a kind of picture is easy or hard.
                loss = loss + share * error.log()
                report.append(10 * math.log10(4 / error.item()))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        if step % 200 == 0:
            set_scale(net, worlds, draws)
            names = ("toy frame", "texture frame", "toy group", "texture group")
            print(f"step {step:5d} {part:4.0%} ", *(f"{n} {v:.1f}" for n, v in zip(names, report)), flush=True)
        step += 1
    return step


@torch.no_grad()
def set_scale(net: TinyAutoencoder, worlds: dict[int, ToyFrames], draws: np.random.Generator) -> None:
    """Centre each channel of the codes, and give all of them together unit variance on the default toy world."""
    spreads = []
    for i, (coder, num_frames) in enumerate(coders(net)):
        codes = coder.encode(worlds[SIZES[0]].batch(256, num_frames, draws)).permute(0, 2, 3, 1).flatten(0, 2)
        net.centre[i] = codes.mean(0)
        spreads.append(codes.var(0).mean())
    net.scale.copy_(torch.stack(spreads).mean().sqrt())


@torch.no_grad()
def psnr_of_fresh_clips(net: TinyAutoencoder, size: int) -> float:
    """Mean decibels over clips of 13 frames from episodes that were not trained on."""
    saved = TinyAutoencoder(**sizes_of(net.state_dict()))
    saved.load_state_dict({name: tensor.half().float() for name, tensor in net.state_dict().items()})
    frames = ToyFrames.make(size, seed=0, first=10**6, num=64).batch(64, 13, np.random.default_rng(0))
    video = frames.unflatten(1, (13, 3)).transpose(1, 2)
    back = saved.decode(saved.encode(video)).clamp(-1, 1)
    return float((10 * torch.log10(4 / (back - video).square().mean((1, 2, 3, 4)))).mean())


if __name__ == "__main__":
    main()
