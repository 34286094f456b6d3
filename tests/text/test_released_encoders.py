# SPDX-License-Identifier: Apache-2.0
"""The encoders T5 and Reason1 from folders in the public layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.text import reason1
from cosmos_predict2.text.pretrained import EightBitLinear, quantized
from cosmos_predict2.text.reason1 import Reason1Encoder
from cosmos_predict2.text.t5 import T5Encoder, load_t5
from cosmos_predict2.text.trained_text import is_same_encoder
from imaginaire.errors import CheckpointError, ConfigError
from tests.text.folders import reason1_folder, t5_folder, write_weights

PROMPTS = ["the red puck moves", "", "push the box " * 20]
LENGTH = 160  # of Reason1, whose template alone takes most of it with so small a vocabulary
CLASSES: dict[str, Any] = {"t5": T5Encoder, "reason1": Reason1Encoder}
MAKE = {"t5": t5_folder, "reason1": reason1_folder}
LENGTHS = {"t5": 16, "reason1": LENGTH}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {kind: tmp_path_factory.mktemp(kind) for kind in MAKE}
    for kind, path in paths.items():
        MAKE[kind](path)
    return paths


@pytest.fixture(scope="module")
def t5(folders: dict[str, Path]) -> T5Encoder:
    return T5Encoder(str(folders["t5"]), max_length=16)


@pytest.fixture(scope="module")
def big(folders: dict[str, Path]) -> Reason1Encoder:
    return Reason1Encoder(str(folders["reason1"]), max_length=LENGTH)


@pytest.mark.parametrize(("kind", "width"), [("t5", 32), ("reason1", 96)])
def test_it_is_a_text_encoder_in_the_asked_dtype(kind: str, width: int, folders: dict[str, Path]) -> None:
    encoder = CLASSES[kind](str(folders[kind]), max_length=LENGTHS[kind], dtype="bfloat16")
    assert isinstance(encoder, TextEncoder)
    assert encoder._model.dtype == torch.bfloat16 and encoder.name.endswith("-bfloat16")
    embeddings = encoder.encode(PROMPTS)
    assert embeddings.shape == (3, LENGTHS[kind], width) == (3, encoder.num_tokens, encoder.width)
    assert embeddings.dtype == torch.float32
    assert not torch.equal(embeddings[0], embeddings[2])


@pytest.mark.parametrize(
    ("kind", "layout", "names"),
    [("t5", "sharded_bin", ()), ("reason1", "sharded", ("public",)), ("reason1", "bin", ("transformers",))],
)
def test_every_layout_and_naming_gives_the_same(
    kind: str, layout: str, names: tuple[str, ...], t5: T5Encoder, big: Reason1Encoder, tmp_path: Path
) -> None:
    MAKE[kind](tmp_path, layout, *names)
    encoder = {"t5": t5, "reason1": big}[kind]
    other = CLASSES[kind](str(tmp_path), max_length=LENGTHS[kind])
    assert other.name == encoder.name
    assert torch.equal(other.encode(PROMPTS[:1]), encoder.encode(PROMPTS[:1]))


@pytest.mark.parametrize(
    ("kind", "lost", "more"),
    [
        ("t5", "encoder.block.1.layer.1.DenseReluDense.wo.weight", "encoder.more.weight"),
        ("reason1", "model.language_model.layers.1.mlp.up_proj.weight", "model.more.weight"),
    ],
)
def test_weights_that_lack_a_name_or_have_one_too_many_are_refused(
    kind: str, lost: str, more: str, tmp_path: Path
) -> None:
    model = t5_folder(tmp_path) if kind == "t5" else reason1_folder(tmp_path, names="transformers")
    tensors = dict(model.state_dict())
    write_weights(tmp_path, {name: tensor for name, tensor in tensors.items() if name != lost}, "single")
    with pytest.raises(CheckpointError, match=r"(block\.1\.layer\.1\.DenseReluDense\.wo|layers\.1\.mlp\.up_proj\.w)"):
        CLASSES[kind](str(tmp_path))
    write_weights(tmp_path, {**tensors, more: torch.zeros(2)}, "single")
    with pytest.raises(CheckpointError, match=r"more\.weight"):
        CLASSES[kind](str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("t5", {"dtype": "float16"}, "float16"),
        ("t5", {"dtype": "half"}, "'half'"),
        ("t5", {"dtype": "int4"}, "'int4'.*int8"),
        ("t5", {"max_length": 0}, "max_length"),
        ("reason1", {"strategy": "full_cat"}, "'full_cat'"),
        ("reason1", {"n_layers_per_group": 0}, "at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    kind: str, options: dict[str, Any], message: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        CLASSES[kind](str(folders[kind]), **options)


def test_a_folder_that_is_not_there_or_not_complete_names_the_cure(tmp_path: Path) -> None:
    for kind, cure in (("t5", "hf download google-t5/t5-11b"), ("reason1", "--revision 3210bec")):
        with pytest.raises(CheckpointError, match=f"nowhere does not exist.*{cure}"):
            CLASSES[kind](str(tmp_path / "nowhere"))
    t5_folder(tmp_path / "a")
    (tmp_path / "a" / "spiece.model").unlink()
    with pytest.raises(CheckpointError, match=r"\(tokenizer\.json"):
        T5Encoder(str(tmp_path / "a"))
    (tmp_path / "a" / "config.json").unlink()
    (tmp_path / "a" / "model.safetensors").unlink()
    problems = T5Encoder.problems(str(tmp_path / "a"))
    assert len(problems) == 3 and all("--local-dir" in problem for problem in problems)


@pytest.mark.parametrize("kind", ["t5", "reason1"])
def test_eight_bits_are_near_float32_and_a_quarter_of_the_bytes(kind: str, folders: dict[str, Path]) -> None:
    """The tolerance, that of bfloat16 elsewhere, was set before the measurement (1.0 % of both)."""
    exact, small = (CLASSES[kind](str(folders[kind]), max_length=LENGTHS[kind], dtype=d) for d in ("float32", "int8"))
    expected, found = exact.encode(PROMPTS), small.encode(PROMPTS)
    assert float((found - expected).norm() / expected.norm()) < 2e-2
    assert not torch.equal(found, expected)
    assert small.name.endswith("-int8") and is_same_encoder(small.name, exact.name)
    linears = {name: module for name, module in exact._model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linears
    for name, linear in linears.items():
        layer = small._model.get_submodule(name)
        assert isinstance(layer, EightBitLinear) and layer.weight.dtype == torch.int8
        error = layer.weight.float() * layer.scale[:, None] - linear.weight
        assert (error.abs() <= 0.5001 * layer.scale[:, None]).all()  # rounded, not cut
        assert layer.bias is None or torch.equal(layer.bias, linear.bias)
    meta = small.to("meta")  # as an offloaded encoder moves, with all its parts
    assert all(parameter.is_meta for parameter in meta._model.parameters())


def test_eight_bits_of_rows_of_zeros_and_of_small_numbers() -> None:
    weight = torch.tensor([[0.0, 0.0], [1.2e-20, -2e-20], [3.0, -254.0]])
    integers, scale = quantized(weight)
    torch.testing.assert_close(integers.float() * scale[:, None], weight, rtol=0, atol=1.0)
    assert integers.tolist() == [[0, 0], [76, -127], [2, -127]] and scale.isfinite().all()


# T5 -------------------------------------------------------------------------------------------------------------------


def test_zeros_stand_behind_each_prompt(t5: T5Encoder) -> None:
    used = (t5.encode(PROMPTS) != 0).any(dim=-1)
    assert used[1].tolist() == [True] + [False] * 15  # an empty prompt is its end token
    assert used[2].all()  # cut to 16
    assert 1 < used[0].sum() < 16


def test_t5_equals_the_package_on_the_same_folder(t5: T5Encoder, folders: dict[str, Path]) -> None:
    from transformers import T5EncoderModel, T5TokenizerFast

    tokens = T5TokenizerFast.from_pretrained(folders["t5"])(
        PROMPTS, padding="max_length", truncation=True, max_length=16, return_tensors="pt"
    )
    model = T5EncoderModel.from_pretrained(folders["t5"]).eval()
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    expected = hidden * tokens["attention_mask"][:, :, None]
    torch.testing.assert_close(t5.encode(PROMPTS), expected, rtol=1e-5, atol=1e-5)


def test_equal_prompts_are_one_pass_and_a_string_is_a_batch_of_one(t5: T5Encoder, monkeypatch) -> None:
    rows = []
    forward = t5._model.forward
    monkeypatch.setattr(t5._model, "forward", lambda **kw: rows.append(len(kw["input_ids"])) or forward(**kw))
    together = t5.encode([PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    assert rows == [2]
    assert torch.equal(together[0], together[2])
    torch.testing.assert_close(t5.encode(PROMPTS[0])[0], together[0])


@pytest.mark.parametrize("left_out", ["shared.weight", "encoder.embed_tokens.weight"])
def test_the_table_of_tokens_may_have_either_name_and_the_dtype_is_the_file_s(left_out: str, tmp_path: Path) -> None:
    model = t5_folder(tmp_path).bfloat16()
    write_weights(tmp_path, {name: t for name, t in model.state_dict().items() if name != left_out}, "single")
    loaded = load_t5(str(tmp_path))
    assert loaded.dtype == torch.bfloat16 and torch.equal(loaded.shared.weight, model.shared.weight)
    assert loaded.encoder.embed_tokens.weight.data_ptr() == loaded.shared.weight.data_ptr()


# Reason1 --------------------------------------------------------------------------------------------------------------


def test_reason1_equals_the_package_on_the_same_folder(big: Reason1Encoder, folders: dict[str, Path]) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folders["reason1"]).eval()
    ids = torch.tensor([big.token_ids(PROMPTS[0])])
    with torch.no_grad():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states[1:]
    expected = torch.cat([(h - h.mean(-1, keepdim=True)) / (h.std(-1, keepdim=True) + 1e-8) for h in states], dim=-1)
    torch.testing.assert_close(big.encode(PROMPTS[0]), expected, rtol=1e-4, atol=1e-4)


def test_ids_are_the_template_padded_on_the_right(big: Reason1Encoder) -> None:
    ids = big.token_ids(PROMPTS[0])
    assert len(ids) == LENGTH
    text = big._tokenizer.decode([i for i in ids if i != big._tokenizer.pad_token_id])
    assert text.replace(" ", "") == (
        "<|im_start|>system\nYou are a helpful assistant who will provide prompts to an image generator.<|im_end|>\n"
        "<|im_start|>user\nthe red puck moves<|im_end|>\n"
    ).replace(" ", "")
    assert ids[-1] == big._tokenizer.pad_token_id and ids[0] != big._tokenizer.pad_token_id
    assert len(big.token_ids("push " * 200)) == LENGTH
    assert big._tokenizer.pad_token_id not in big.token_ids("push " * 200)


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


def test_every_layer_is_normalised(big: Reason1Encoder) -> None:
    layers = big.encode(PROMPTS).unflatten(-1, (3, 32))
    torch.testing.assert_close(layers.mean(dim=-1), torch.zeros(3, LENGTH, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(layers.std(dim=-1), torch.ones(3, LENGTH, 3), rtol=0, atol=1e-4)


def test_half_precision_weights_keep_exact_rotary_tables(folders: dict[str, Path], big: Reason1Encoder) -> None:
    half = Reason1Encoder(str(folders["reason1"]), max_length=LENGTH, dtype="bfloat16")
    assert torch.equal(half._model.rotary_emb.inv_freq, big._model.rotary_emb.inv_freq)
    torch.testing.assert_close(half.encode("push"), big.encode("push"), rtol=0, atol=0.3)
