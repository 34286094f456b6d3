# SPDX-License-Identifier: Apache-2.0
"""Networks whose first weights are replaced: built without drawing them, and torch's generator is afterwards where it
would be, so that whatever is drawn next (starts of adapters) is what it always was.

    with SkippedDraws():
        network = Network(sizes)  # what it would have drawn is left as memory was
    load(network)

torch's generator on the CPU is a Mersenne Twister: 2^19937 - 1 states, each a linear function over GF(2) of the first.
So n steps are a polynomial, x^n modulo that of one step. On a CPU's core that takes 0.3 s for 15e9 numbers, which a
network of 7.5 B draws in minutes.
"""

import functools
import sys
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

WORDS, MIDDLE, DEGREE = 624, 397, 19937  # of the twister
FEW = 2**24  # numbers that are drawn sooner than skipped
VECTOR = 16  # normal numbers are drawn by as many, fewer one by one in another way
_STATE = numpy.dtype(  # of torch's generator, as get_rng_state has it
    [("seed", "u8"), ("left", "i4"), ("seeded", "i4"), ("next", "u8"), ("words", "u8", WORDS), ("normals", "u1", 40)]
)


class SkippedDraws(TorchDispatchMode):
    """Inside, float32 weights on the CPU are not drawn from the global generator; it advances as if they were."""

    def __init__(self) -> None:
        super().__init__()
        self._pending = 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._advance()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        target: Any = args[0] if args else None
        aten = torch.ops.aten
        is_plain = isinstance(target, Tensor) and target.dtype == torch.float32 and target.device.type == "cpu"
        if is_plain and target.is_contiguous() and kwargs.get("generator") is None and not _is_truncated():
            numel = target.numel()
            if func is aten.uniform_.default:
                self._pending += numel
                return target
            if func is aten.normal_.default and numel >= VECTOR:
                self._pending += numel + VECTOR * (numel % VECTOR > 0)  # it draws the last ones again
                return target
        self._advance()
        return func(*args, **kwargs)

    def _advance(self) -> None:
        pending, self._pending = self._pending, 0
        advance(pending)


def _is_truncated() -> bool:
    """Whether a truncated normal asks, which draws again what lies outside: how often follows from what it draws."""
    frame = sys._getframe(2)
    for _ in range(4):
        if frame is None or "trunc_normal" in frame.f_code.co_name:
            return frame is not None
        frame = frame.f_back  # type: ignore[assignment]
    return False


def advance(count: int) -> None:
    """Leave torch's generator on the CPU as after ``count`` numbers of 32 bits."""
    if count <= FEW:
        torch.rand(count, dtype=torch.float32, device="cpu")
        return
    raw = torch.get_rng_state()
    state = raw.numpy().view(_STATE)
    used = WORDS + 1 - int(state["left"][0])  # of the present words; when all are, the twister makes as many new ones
    twists, used_then = divmod(used + count - 1, WORDS)
    state["words"][0] = _words_after(state["words"][0].astype(numpy.uint32), WORDS * twists)
    state["left"], state["next"] = WORDS - used_then, used_then + 1
    torch.set_rng_state(raw)


def _words_after(words: Any, steps: int) -> Any:
    """The twister's words so many steps (of one word) later, at least one."""
    ahead = _sequence(words, WORDS + DEGREE + 1)
    found = numpy.zeros(WORDS, numpy.uint32)
    power = _power_of_x(steps - 1)
    for i in range(DEGREE):  # from the second word on, as the first is used by one of its bits alone
        if power >> i & 1:
            found ^= ahead[i + 1 : i + 1 + WORDS]
    return found


def _sequence(words: Any, count: int) -> Any:
    """The first ``count`` words that follow from the first 624, and these."""
    found = words.tolist()
    for k in range(count - WORDS):
        mixed = (found[k] & 0x80000000) | (found[k + 1] & 0x7FFFFFFF)
        found.append(found[k + MIDDLE] ^ (mixed >> 1) ^ (0x9908B0DF if mixed & 1 else 0))
    return numpy.array(found, numpy.uint32)


def _power_of_x(exponent: int) -> int:
    """x^exponent modulo the twister's polynomial; bit i of a polynomial is its coefficient of x^i."""
    modulus, found = _polynomial(), 1
    for bit in format(exponent, "b"):
        found = int(format(found, "b"), 4)  # the square: a zero between any two coefficients
        found <<= bit == "1"
        for i in range(found.bit_length() - 1, DEGREE - 1, -1):
            if found >> i & 1:
                found ^= modulus << (i - DEGREE)
    return found


@functools.cache
def _polynomial() -> int:
    """That of one step: the shortest recurrence of one bit of the words, by Berlekamp and Massey."""
    first = numpy.arange(1, WORDS + 1, dtype=numpy.uint32)
    bits = _sequence(first, WORDS + 2 * DEGREE)[WORDS:] & 1
    now, before, length, gap, seen = 1, 1, 0, 1, 0
    for n, bit in enumerate(bits.tolist()):
        seen = seen << 1 | bit  # bit i is that of i steps ago
        if not (now & seen).bit_count() & 1:
            gap += 1
        elif 2 * length <= n:
            now, before, length, gap = now ^ before << gap, now, n + 1 - length, 1
        else:
            now, gap = now ^ before << gap, gap + 1
    assert length == DEGREE
    return int(format(now, f"0{DEGREE + 1}b")[::-1], 2)
