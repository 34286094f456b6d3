# SPDX-License-Identifier: Apache-2.0
"""The Reason1 encoder from folders in the public layout."""

from pathlib import Path

import pytest
import torch

from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.text import reason1
from cosmos_predict2.text.reason1 import Reason1Encoder
from imaginaire.errors import CheckpointError, ConfigError
from tests.text.folders import reason1_folder, write_weights

PROMPTS = ["the red puck moves", "", "push the box"]
LENGTH = 160  # the template alone takes most of it with so small a vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reason1")
    reason1_folder(path)
    return path


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Reason1Encoder:
    return Reason1Encoder(str(folder), max_length=LENGTH)


def test_it_is_a_text_encoder(encoder: Reason1Encoder) -> None:
    assert isinstance(encoder, TextEncoder)
    embeddings = encoder.encode(PROMPTS)
    assert embeddings.shape == (3, LENGTH, 96) == (3, encoder.num_tokens, encoder.width)
    assert embeddings.dtype == torch.float32
    assert not torch.equal(embeddings[0], embeddings[2])
    layers = embeddings.unflatten(-1, (3, 32))
    torch.testing.assert_close(layers.mean(dim=-1), torch.zeros(3, LENGTH, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(layers.std(dim=-1), torch.ones(3, LENGTH, 3), rtol=0, atol=1e-4)


def test_it_equals_the_package_on_the_same_folder(encoder: Reason1Encoder, folder: Path) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
    ids = torch.tensor([encoder.token_ids(PROMPTS[0])])
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states[1:]
    expected = torch.cat([(h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-8) for h in states], dim=-1)
    torch.testing.assert_close(encoder.encode(PROMPTS[0]), expected, rtol=1e-4, atol=1e-4)


def test_ids_are_the_template_padded_on_the_right(encoder: Reason1Encoder) -> None:
    ids = encoder.token_ids(PROMPTS[0])
    assert len(ids) == LENGTH
    text = encoder._tokenizer.decode([i for i in ids if i != encoder._tokenizer.pad_token_id])
    assert text.replace(" ", "") == (
        "<|im_start|>system\nYou are a helpful assistant who will provide prompts to an image generator.<|im_end|>\n"
        "<|im_start|>user\nthe red puck moves<|im_end|>\n"
    ).replace(" ", "")
    assert ids[-1] == encoder._tokenizer.pad_token_id and ids[0] != encoder._tokenizer.pad_token_id
    assert len(encoder.token_ids("push " * 200)) == LENGTH
    assert encoder._tokenizer.pad_token_id not in encoder.token_ids("push " * 200)


@pytest.mark.parametrize(("layout", "names"), [("sharded", "public"), ("bin", "transformers")])
def test_every_layout_and_naming_gives_the_same(layout: str, names: str, encoder, tmp_path: Path) -> None:
    reason1_folder(tmp_path, layout, names)
    other = Reason1Encoder(str(tmp_path), max_length=LENGTH)
    assert other.name == encoder.name
    assert torch.equal(other.encode(PROMPTS[:1]), encoder.encode(PROMPTS[:1]))


@pytest.mark.parametrize(
    ("strategy", "group", "parts"),
    [("full_concat", 5, 7), ("mean_pooling", 5, 1), ("pool_every_n_layers_and_concat", 5, 2),
     ("pool_every_n_layers_and_concat", 3, 3)],
)  # fmt: skip
def test_strategies_give_their_widths_and_means(strategy, group: int, parts: int) -> None:
    states = torch.randn(7, 2, 4, 32, dtype=torch.float64)
    combined = reason1.combine(list(states), strategy, group)
    assert combined.shape == (2, 4, parts * 32) and combined.dtype == torch.float64
    assert parts == reason1.num_parts(strategy, 7, group)
    every = reason1.combine(list(states), "full_concat").unflatten(-1, (7, 32))
    if strategy == "mean_pooling":
        torch.testing.assert_close(combined, every.mean(dim=-2))
    if strategy.startswith("pool"):
        torch.testing.assert_close(combined[..., -32:], every[..., (parts - 1) * group :, :].mean(dim=-2))


def test_released_sizes() -> None:
    assert reason1.num_parts("full_concat", 28) * 3584 == 100_352
    assert reason1.num_parts("pool_every_n_layers_and_concat", 28) * 3584 == 21_504


def test_weights_are_accounted_for(tmp_path: Path) -> None:
    tensors = dict(reason1_folder(tmp_path, names="transformers").state_dict())
    lost = "model.language_model.layers.1.mlp.up_proj.weight"
    write_weights(tmp_path, {name: tensor for name, tensor in tensors.items() if name != lost}, "single")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        Reason1Encoder(str(tmp_path))
    write_weights(tmp_path, {**tensors, "model.more.weight": torch.zeros(2)}, "single")
    with pytest.raises(CheckpointError, match=r"more\.weight"):
        Reason1Encoder(str(tmp_path))


def test_half_precision_weights_keep_exact_rotary_tables(folder: Path, encoder: Reason1Encoder) -> None:
    half = Reason1Encoder(str(folder), max_length=LENGTH, dtype="bfloat16")
    assert half._model.dtype == torch.bfloat16 and half.name.endswith("-bfloat16")
    assert torch.equal(half._model.rotary_emb.inv_freq, encoder._model.rotary_emb.inv_freq)
    torch.testing.assert_close(half.encode("push"), encoder.encode("push"), rtol=0, atol=0.3)


def test_what_cannot_be_used_is_named_with_its_cure(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist.*--revision 3210bec"):
        Reason1Encoder(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="'full_cat'"):
        Reason1Encoder(str(tmp_path), strategy="full_cat")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        Reason1Encoder(str(tmp_path), n_layers_per_group=0)
