# SPDX-License-Identifier: Apache-2.0
"""Embeddings in files, and the command that writes them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.prompt_embeddings import (
    constant_embedding_shape,
    read_constant_embedding,
    read_prompt_embeddings,
    write_prompt_embeddings,
)
from imaginaire.errors import DataError
from scripts import encode_prompts
from tests.programs import call
from tests.text.folders import Letters, reason1_folder, t5_folder

ENCODER = BytesEncoder(32, 16)


def test_a_file_stands_in_for_the_encoder(tmp_path: Path) -> None:
    path = tmp_path / "some.safetensors"
    written = write_prompt_embeddings(path, ENCODER, ["a cup", "a car", "a cup"], negative_prompt="ugly")
    found = read_prompt_embeddings(path)
    assert isinstance(found, TextEncoder)
    assert found.name == ENCODER.name == written.name and (found.num_tokens, found.width) == (32, 16)
    assert found.prompts == ("a cup", "a car") and found.negative_prompt == "ugly"
    batch = ["a car", "ugly", "a car"]
    assert torch.equal(found.encode(batch), ENCODER.encode(batch))
    assert set(found) == {"a cup", "a car", "ugly"} and torch.equal(dict(found)["ugly"], ENCODER.encode("ugly")[0])
    assert sum(tensor.shape[0] for tensor in load_file(path).values()) < 3 * 32  # zeros at the ends are not stored


def test_an_unknown_prompt_names_a_near_one_and_the_command(tmp_path: Path) -> None:
    found = write_prompt_embeddings(tmp_path / "a.safetensors", ENCODER, ["a red cup on a table"])
    with pytest.raises(DataError, match=r"a\.safetensors"):
        found.encode(["a red cup on a tabel"])
    with pytest.raises(KeyError):
        found["a red cup"]
    assert found.get("a red cup") is None


ABOUT = {"format": "prompt-embeddings-1", "encoder": "e", "num_tokens": "1", "width": "2"}


@pytest.mark.parametrize(
    ("about", "words"),
    [
        (None, "cannot be read as safetensors"),
        ({}, "of another kind"),
        (ABOUT | {"prompts": '["a", "b"]', "negative_prompt": "null"}, "names 2 prompts and holds 1"),
        (ABOUT | {"prompts": "[]"}, "damaged"),
        (ABOUT | {"prompts": "["}, "damaged"),
    ],
)
def test_another_file_is_refused_by_name(about: dict[str, str] | None, words: str, tmp_path: Path) -> None:
    save_file({"embedding.0": torch.zeros(1, 2)}, tmp_path / "other.safetensors", about)
    if about is None:
        (tmp_path / "other.safetensors").write_bytes(b"no safetensors at all")
    with pytest.raises(DataError, match=words) as caught:
        read_prompt_embeddings(tmp_path / "other.safetensors")
    assert "other.safetensors" in str(caught.value) and "scripts.encode_prompts" in str(caught.value)


# One embedding for all -----------------------------------------------------------------------------------------------


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


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_writes_prompts_of_line_and_file(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("a car\n\n  a bus \n", encoding="utf-8")
    out = tmp_path / "deep" / "out.safetensors"
    flags = ["--prompt", "a cup", "--prompts_file", tmp_path / "more.txt", "--text_encoder", "bytes"]
    assert call(encode_prompts, *flags, "--out", out) == 0
    found = read_prompt_embeddings(out)
    assert found.prompts == ("a cup", "a car", "a bus") and found.negative_prompt == ""
    assert found.name == "bytes-v1-64x64"
    assert torch.equal(found.encode("a bus"), BytesEncoder(64, 64).encode("a bus"))


@pytest.mark.parametrize(("kind", "make"), [("t5", t5_folder), ("reason1", reason1_folder)])
def test_the_command_runs_the_real_encoders(kind: str, make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "encoder")
    monkeypatch.setattr(encode_prompts, "DEFAULT_NEGATIVE_PROMPT", "ugly")
    out = tmp_path / "out.safetensors"
    arguments = ["--text_encoder", kind, "--encoder_path", tmp_path / "encoder", "--num_tokens", 16, "--out", out]
    assert call(encode_prompts, "--prompt", "a cup", "--dtype", "bfloat16", *arguments) == 0
    found = read_prompt_embeddings(out)
    assert found.name.startswith(f"{kind}-") and found.name.endswith("bfloat16")
    assert found.negative_prompt == "ugly"
    assert found.encode(["a cup", "ugly"]).shape == (2, 16, found.width)
    assert call(encode_prompts, "--prompt", "a cup", "--no_negative_prompt", *arguments) == 0
    assert read_prompt_embeddings(out).negative_prompt is None


def test_the_command_takes_an_encoder_of_ones_own(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    flags = ("--prompt", "ab", "--text_encoder", f"{Letters.__module__}:Letters", "--text_width", 2, "--out", out)
    assert call(encode_prompts, *flags) == 0
    found = read_prompt_embeddings(out)
    assert found.name == "letters-v1-3x2" and found.encode(["ab"]).tolist() == [[[97, 97], [98, 98], [0, 0]]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to encode"),
        (["--prompts_file", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--prompt", "a", "--out", "x.pt"], "ends in .safetensors"),
        (["--prompt", "a", "--out", "/proc/nowhere/x.safetensors"], "Choose another --out"),
        (["--prompt", "a", "--text_encoder", "bytes", "--device", "meta"], "--device meta"),
        (["--prompt", "a", "--width", "8"], "--text_width has no meaning for --text_encoder t5"),
        (["--prompt", "a", "--text_encoder", "bytes", "--encoder_path", "x"], "--encoder_path has no meaning"),
        (["--prompt", "a", "--text_encoder", "byte"], "Did you mean bytes"),
        (["--prompt", "a", "--device", "gpu"], "--device gpu"),
        (["--prompt", "a", "--checkpoint_dir", "nowhere"], "nowhere/google-t5/t5-11b does not exist"),
        (["--prompt", "a", "--text_encoder", "umt5"], "checkpoints/Wan-AI/Wan2.1-T2V-1.3B-Diffusers/text_encoder does"),
        (["--prompt", "a", "--text_encoder", "reason1"], "does not exist. Fetch it with: hf download"),
    ],
)
def test_the_command_explains_what_is_wrong(arguments, words, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(encode_prompts, "--out", tmp_path / "out.safetensors", *arguments) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
