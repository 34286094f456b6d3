# SPDX-License-Identifier: Apache-2.0
"""Windows of a noisy two-tone wave, and the value that comes next."""

import random

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Waves(Dataset[dict[str, Tensor]]):
    """``num_waves`` waves; each item is a random crop of one. The loader seeds `random` and `numpy` per sample."""

    def __init__(self, num_waves: int = 64, length: int = 200, window: int = 32, noise: float = 0.02) -> None:
        phase = numpy.linspace(0, 2 * numpy.pi, num_waves, endpoint=False)[:, None]
        time = numpy.arange(length)[None, :]
        self._waves = 0.6 * numpy.sin(0.21 * time + phase) + 0.4 * numpy.sin(0.057 * time - 2 * phase)
        self._window = window
        self._noise = noise

    def __len__(self) -> int:
        return len(self._waves)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        wave = self._waves[index]
        start = random.randrange(len(wave) - self._window)
        crop = torch.from_numpy(wave[start : start + self._window + 1]).float()
        noise = torch.from_numpy(self._noise * numpy.random.standard_normal(self._window)).float()
        return {"window": crop[:-1] + noise, "next": crop[-1:]}
