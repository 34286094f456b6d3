# SPDX-License-Identifier: Apache-2.0
"""The one embedding of models that take no text, from the files that it comes in."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.prompt_embeddings import (
    constant_embedding_shape,
    read_constant_embedding,
    write_prompt_embeddings,
)
from imaginaire.errors import DataError


@pytest.mark.parametrize("shape", [(5, 6), (1, 5, 6)])
def test_a_saved_tensor(shape: tuple[int, ...], tmp_path: Path) -> None:
    embedding = torch.randn(shape).bfloat16()
    torch.save(embedding, tmp_path / "empty.pt")
    assert torch.equal(read_constant_embedding(tmp_path / "empty.pt"), embedding.reshape(5, 6))
    assert constant_embedding_shape(tmp_path / "empty.pt") == (5, 6)


def test_a_file_of_encode_prompts(tmp_path: Path) -> None:
    encoder = BytesEncoder(4, 8)
    for prompts, expected in ((["push", ""], ""), (["push"], "push")):
        write_prompt_embeddings(tmp_path / "p.safetensors", encoder, prompts)
        found = read_constant_embedding(tmp_path / "p.safetensors")
        assert torch.equal(found, encoder.encode([expected])[0])
        assert constant_embedding_shape(tmp_path / "p.safetensors") == found.shape


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (torch.zeros(2, 5, 6), r"a tensor \[2, 5, 6\]"),
        (torch.zeros(5, 6, dtype=torch.int64), "a tensor"),
        ({"a": torch.zeros(5, 6)}, "a dict"),
        (torch.full((5, 6), float("nan")), "not finite"),
    ],
)
def test_other_contents_are_errors_that_name_what_was_found(content: Any, words: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(DataError, match=words):
        read_constant_embedding(tmp_path / "x.pt")


def test_what_is_absent_or_unclear_is_reported_with_its_cure(tmp_path: Path) -> None:
    write_prompt_embeddings(tmp_path / "p.safetensors", BytesEncoder(4, 8), ["push", "take"])
    for read in (read_constant_embedding, constant_embedding_shape):
        with pytest.raises(DataError, match=r"scripts\.encode_prompts"):
            read(tmp_path / "none.pt")
        with pytest.raises(DataError, match="2 prompts, and none is empty"):
            read(tmp_path / "p.safetensors")
