# SPDX-License-Identifier: Apache-2.0
"""Randomness as a function: every draw of training follows from a seed, a position and a purpose.

The position is the sample's place in the endless training stream and the purpose a name such as "crop" or "noise".
Nothing has to be saved to repeat such a draw, and any layout of processes makes the same one. Code that draws from the
global generators of Python, NumPy and torch instead is seeded by `seed_all`, and its state is saved with a checkpoint.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def derive_seed(seed: int, position: int, purpose: str) -> int:
    """A 63-bit number that depends on all three arguments and on nothing else."""
    digest = hashlib.blake2b(f"{seed}/{position}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(seed: int, position: int, purpose: str) -> torch.Generator:
    """A fresh torch generator for one purpose at one place of the training stream."""
    return torch.Generator().manual_seed(derive_seed(seed, position, purpose))


class Draws:
    """The random numbers of a batch: of each sample by its position, or of all from torch's global generator."""

    def __init__(self, size: int, positions: list[int] | None, seed: int = 0, pass_name: str = "train") -> None:
        self._size = size
        self._positions = positions
        self._seed = seed
        self._pass_name = pass_name

    def each(self, purpose: str) -> list[torch.Generator]:
        """One generator per sample; without positions torch's global one for all of them."""
        if self._positions is None:
            return [torch.default_generator] * self._size
        return [generator(self._seed, position, f"{self._pass_name}/{purpose}") for position in self._positions]

    def uniform(self, count: int, purpose: str) -> torch.Tensor:
        """[B, count] in [0, 1), float64."""
        return torch.stack([torch.rand(count, dtype=torch.float64, generator=g) for g in self.each(purpose)])

    def integers(self, low: int, high: int, purpose: str) -> torch.Tensor:
        """[B], each from low to high - 1."""
        return torch.cat([torch.randint(low, high, (1,), generator=g) for g in self.each(purpose)])

    def normal(self, shape: tuple[int, ...] | torch.Size, purpose: str) -> torch.Tensor:
        """Standard normal float32 of a shape that begins with the batch."""
        if self._positions is None:  # not the same as one after the other
            return torch.randn(shape)
        return torch.stack([torch.randn(shape[1:], generator=g) for g in self.each(purpose)])


def seed_all(seed: int, position: int, purpose: str) -> None:
    """Seed the global generators of Python, NumPy and torch, on the host and on the devices."""
    seed_host(seed, position, purpose)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(derive_seed(seed, position, purpose))


def seed_host(seed: int, position: int, purpose: str) -> None:
    """Seed the global generators of the host alone, cheap enough for every sample.

    ``torch.manual_seed`` is not: without a GPU it keeps a call and its stack for each use until there is one.
    """
    derived = derive_seed(seed, position, purpose)
    random.seed(derived)
    numpy.random.seed(derived & 0xFFFFFFFF)
    torch.default_generator.manual_seed(derived)


def get_rng_state() -> dict[str, Any]:
    """State of the global generators, made of what `torch.load(weights_only=True)` accepts."""
    state_of_numpy: Any = numpy.random.get_state()
    name, keys, position, has_gauss, cached = state_of_numpy
    state = {
        "python": random.getstate(),
        "numpy": [str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `get_rng_state` returned."""
    random.setstate(state["python"])
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def preserved() -> Iterator[None]:
    """Whatever is drawn inside leaves the global generators as they were."""
    state = get_rng_state()
    try:
        yield
    finally:
        set_rng_state(state)
