# SPDX-License-Identifier: Apache-2.0
"""The tiny tokenizer that ships: fitted to toy-world episodes and to made-up textures, without a photograph.

Toy-world episodes for the test lie at another place of the series.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cosmos_predict2.tokenizers.tiny import TinyAutoencoder, sizes_of
from cosmos_predict2.tokenizers.tiny_fit import (
    BATCH,
    Length,
    Share,
    packed,
    psnr,
    set_scale,
    start_from_components,
    train,
)
from cosmos_predict2.toy_world import make_episodes, render
from cosmos_predict2.toy_world.physics import TASKS

NUM_EPISODES = 3000
EPISODE_STEPS = 24
SIZES = (48, 64)  # of the toy world's two settings
TURNS = (48, 48, 64)  # steps of the default size are more, as it is harder: the things fill more of its table
TEXTURE_SHARE = 0.3  # of the loss in every other step; textures are harder, and must not use up the codes
NUM_TEXTURES = 160
TEXTURE_SIDE = 192


def fit_to_toy_world(seconds: float, seed: int, width: int, num_blocks: int) -> tuple[TinyAutoencoder, int]:
    """The tokenizer and the number of steps that were taken in the time; with no time principal components alone."""
    torch.manual_seed(seed)
    draws = np.random.default_rng(seed)
    worlds = {size: ToyFrames.make(size, seed) for size in SIZES}
    textures = make_textures(draws)
    net = TinyAutoencoder(width, num_blocks)
    components(net, worlds, textures, draws)

    def turn(step: int, num_frames: int) -> list[Share]:
        world = worlds[TURNS[step % len(TURNS)]]
        kinds = [(world.batch(BATCH, num_frames, draws), 1.0)]
        if step % 2 == 0:
            pictures = texture_batch(textures, BATCH // 2, num_frames, world.size, draws)
            kinds.append((pictures, TEXTURE_SHARE))
        return kinds

    def report(step: int, part: float, decibels: list[float]) -> None:
        names = ("toy frame", "texture frame", "toy group", "texture group")
        print(f"step {step:5d} {part:4.0%} ", *(f"{n} {v:.1f}" for n, v in zip(names, decibels)), flush=True)

    steps = train(net, turn, worlds[SIZES[0]], draws, Length(seconds=seconds), report) if seconds else 0
    set_scale(net, worlds[SIZES[0]], draws)
    return net, steps


def components(
    net: TinyAutoencoder, worlds: dict[int, "ToyFrames"], textures: Tensor, draws: np.random.Generator, num: int = 256
) -> None:
    """Principal components of patches, half toy world and half textures."""
    start_from_components(
        net,
        lambda num_frames: (
            [world.batch(num, num_frames, draws) for world in worlds.values()],
            [texture_batch(textures, 2 * num, num_frames, 64, draws)],
        ),
    )


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
        frames = render(states.reshape(num * num_frames, -1), self.size)
        return packed(frames.reshape(num, num_frames, self.size, self.size, 3))


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


def psnr_of_fresh_clips(net: TinyAutoencoder, size: int) -> float:
    """Mean decibels over clips of 13 frames from episodes that were not trained on."""
    saved = TinyAutoencoder(**sizes_of(net.state_dict()))
    saved.load_state_dict({name: tensor.half().float() for name, tensor in net.state_dict().items()})
    frames = ToyFrames.make(size, seed=0, first=10**6, num=64).batch(64, 13, np.random.default_rng(0))
    video = frames.unflatten(1, (13, 3)).transpose(1, 2)
    return psnr(saved, video)
