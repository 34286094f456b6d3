# SPDX-License-Identifier: Apache-2.0
"""A text encoder without weights: every byte of a prompt becomes a token of pseudo-random signs.

It stands in for the real encoders where there is no download and no accelerator. A network can learn from it because
equal things get equal codes: a token is half the sum of four codes of +-1, for its byte, its word, the three bytes
around it, and its position. All are integer hashes, so the same prompt gives the same numbers on every machine.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from imaginaire.errors import ConfigError, DataError

log = logging.getLogger(__name__)

VERSION = "v1"  # part of the name: raise it with any change of the numbers
_MASK = 2**64 - 1


class BytesEncoder:
    """Prompts to [B, num_tokens, width]: the bytes of each, one end token, then zeros.

    Of a prompt with more than num_tokens - 1 bytes the end token holds a hash of what was cut off, so different prompts
    still differ, but a network can learn nothing from the rest.
    """

    def __init__(self, num_tokens: int = 512, width: int = 1024, device: torch.device | str = "cpu") -> None:
        if num_tokens < 1 or width < 1:
            raise ConfigError(
                f"The bytes encoder needs num_tokens and width of 1 or more; found {num_tokens}, {width}."
            )
        self.num_tokens = num_tokens
        self.width = width
        self.name = f"bytes-{VERSION}-{num_tokens}x{width}"
        self._device = torch.device(device)
        self._has_warned = False

    @classmethod
    def declared_width(cls, *, width: int = 1024, **_: Any) -> int:
        """The width of an encoder with these arguments, before it is built."""
        return width

    def encode(self, prompts: str | Sequence[str]) -> Tensor:
        """[len(prompts), num_tokens, width] float32; every element is one of 0, +-1, +-2."""
        batch = prompt_list(prompts)
        embeddings = np.zeros((len(batch), self.num_tokens, self.width), dtype=np.float32)
        for row, prompt in zip(embeddings, batch):
            tokens = self._tokens(prompt)
            row[: len(tokens)] = tokens
        return torch.from_numpy(embeddings).to(self._device)

    def to(self, device: torch.device | str) -> "BytesEncoder":
        self._device = torch.device(device)
        return self

    def _tokens(self, prompt: str) -> npt.NDArray[np.float32]:
        content = prompt.encode("utf-8", errors="surrogatepass")
        kept, rest = content[: self.num_tokens - 1], content[self.num_tokens - 1 :]
        if rest and not self._has_warned:
            self._has_warned = True
            log.warning(
                "a prompt of %d bytes does not fit the %d tokens of the bytes encoder: the rest counts as one token "
                "(more tokens: num_tokens; logged once)",
                len(content),
                self.num_tokens,
            )
        keys = [
            [
                _key("byte", content[i : i + 1]),
                _key("word", word),
                _key("three", content[max(i - 1, 0) : i + 2]),
                _key("position", str(i).encode()),
            ]
            for i, word in zip(range(len(kept)), _word_of_each_byte(content))
        ]
        end = _key("end", rest)
        keys.append([end, _key("end2", rest), _key("end3", rest), _key("end4", rest)])
        return _signs(np.array(keys, dtype=np.uint64), self.width).sum(axis=1, dtype=np.float32) / 2


def prompt_list(prompts: str | Sequence[str]) -> list[str]:
    """The prompts of a batch, which every encoder takes; a string is a batch of one."""
    batch = [prompts] if isinstance(prompts, str) else list(prompts)
    if not batch:
        raise DataError("There are no prompts to encode: give one or more strings (an empty string is a prompt).")
    if wrong := [prompt for prompt in batch if not isinstance(prompt, str)]:
        raise DataError(f"A prompt is a string; found {type(wrong[0]).__name__} ({wrong[0]!r}).")
    return batch


def _word_of_each_byte(content: bytes) -> Iterable[bytes]:
    """The word of each byte, in lower case without punctuation at its ends; of a space the space."""
    for i, word in enumerate(content.split(b" ")):
        if i > 0:
            yield b" "
        plain = word.lower().strip(b".,;:!?\"'()") or word
        yield from [plain] * len(word)


def _key(kind: str, content: bytes) -> int:
    """A 64-bit FNV-1a hash."""
    value = 0xCBF29CE484222325
    for byte in kind.encode() + b"\0" + content:
        value = ((value ^ byte) * 0x100000001B3) & _MASK
    return value


def _signs(keys: npt.NDArray[np.uint64], width: int) -> npt.NDArray[np.int8]:
    """``width`` signs for each key: the bits of SplitMix64 numbers that start from it."""
    count = -(-width // 64)
    numbers = keys[..., None] + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers = numbers ^ (numbers >> np.uint64(31))
    bits = (numbers[..., None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    return (bits.reshape(*keys.shape, count * 64)[..., :width].astype(np.int8) * 2 - 1).astype(np.int8)
