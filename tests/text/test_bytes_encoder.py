# SPDX-License-Identifier: Apache-2.0
"""The encoder without weights: exact numbers on every machine, and codes that a network can learn from."""

import hashlib
import logging

import pytest
import torch

from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from imaginaire.errors import ConfigError, DataError

PROMPTS = ["", "a", "push the red puck to the ring", "Push the blue box.", "ünïcode 🤖"]


def test_it_is_a_text_encoder() -> None:
    encoder = BytesEncoder(64, 48)
    assert isinstance(encoder, TextEncoder)
    assert encoder.name == "bytes-v1-64x48"
    assert encoder.encode(PROMPTS).shape == (len(PROMPTS), 64, 48)
    assert encoder.encode(PROMPTS).dtype == torch.float32


def test_numbers_never_change() -> None:
    embeddings = BytesEncoder(64, 100).encode(PROMPTS)
    digest = hashlib.sha256(embeddings.to(torch.int8).numpy().tobytes()).hexdigest()
    assert torch.equal(embeddings, embeddings.to(torch.int8).float())  # so the digest sees everything
    assert digest == "2691632bcaeaeff58eb280ee5a97defc621b7735dd145148c7692e87a366736c", (
        "raise VERSION: caches and files identify embeddings by the encoder's name"
    )


def test_different_prompts_differ_also_past_the_end() -> None:
    encoder = BytesEncoder(16, 32)
    prompts = [*PROMPTS, "a ", " a", "A", "x" * 15, "x" * 16, "x" * 17, "x" * 16 + "y", "x" * 500]
    embeddings = encoder.encode(prompts)
    for i in range(len(prompts)):
        for j in range(i):
            assert not torch.equal(embeddings[i], embeddings[j]), (prompts[i], prompts[j])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_zeros_begin_after_the_end_token(prompt: str) -> None:
    embedding = BytesEncoder(64, 32).encode([prompt])[0]
    is_zero = (embedding == 0).all(dim=-1)
    assert is_zero.tolist() == [i > len(prompt.encode()) for i in range(64)]


def test_too_long_a_prompt_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    encoder = BytesEncoder(8, 16)
    with caplog.at_level(logging.WARNING):
        encoder.encode("1234567")
        assert not caplog.records
        encoder.encode(["12345678", "123456789"])
    assert len(caplog.records) == 1
    assert "8 bytes" in caplog.text and "8 tokens" in caplog.text


@pytest.mark.parametrize(("prompts", "words"), [([], "no prompts"), ([None], "NoneType"), ([b"x"], "bytes")])
def test_what_is_no_prompt_is_refused(prompts: list, words: str) -> None:
    with pytest.raises(DataError, match=words):
        BytesEncoder(8, 16).encode(prompts)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_tokens"):
        BytesEncoder(0, 16)
