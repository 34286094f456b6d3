# SPDX-License-Identifier: Apache-2.0
"""The cache gives what the encoder gives and asks it once."""

import pytest
import torch

from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.embeddings.encode import EmbeddingCache
from tests.text.folders import Counting


def test_it_is_a_text_encoder_that_equals_its_encoder() -> None:
    encoder = Counting()
    cache = EmbeddingCache(encoder)
    assert isinstance(cache, TextEncoder) and cache.name == encoder.name
    prompts = ["a", "b", "a", ""]
    assert torch.equal(cache.encode(prompts), BytesEncoder(64, 32).encode(prompts))
    assert torch.equal(cache.encode("b"), BytesEncoder(64, 32).encode("b"))
    assert encoder.asked == ["a", "b", ""]


def test_memory_keeps_its_limit_and_lets_the_longest_unused_go() -> None:
    encoder = Counting(num_tokens=8, width=16)  # one byte and its end: 64 bytes
    cache = EmbeddingCache(encoder, memory_bytes=2 * 64)
    cache.encode("a")
    cache.encode("b")
    cache.encode("a")
    cache.encode("c")  # b leaves
    assert encoder.asked == ["a", "b", "c"]
    cache.encode("a")
    cache.encode("b")
    assert encoder.asked == ["a", "b", "c", "b"]
    assert cache._used_bytes == sum(row.nbytes for row in cache._memory.values()) <= 2 * 64


@pytest.mark.parametrize(("factor", "dtype"), [(1.0, torch.bfloat16), (1 / 3, torch.float32)])  # its numbers for 1
def test_it_keeps_bfloat16_where_that_rounds_nothing(factor: float, dtype: torch.dtype) -> None:
    expected = Counting(factor=factor).encode(["a", "bc"])
    cache = EmbeddingCache(Counting(factor=factor))
    first = cache.encode(["a", "bc"])
    assert {row.dtype for row in cache._memory.values()} == {dtype}
    for found in (first, cache.encode(["a", "bc"])):
        assert found.dtype == torch.float32 and torch.equal(found, expected)
