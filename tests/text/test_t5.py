# SPDX-License-Identifier: Apache-2.0
"""The T5 encoder from folders in the public layout."""

from pathlib import Path

import pytest
import torch

from cosmos_predict2.interfaces import TextEncoder
from cosmos_predict2.text.t5 import T5Encoder, load_t5
from imaginaire.errors import CheckpointError, ConfigError
from tests.text.folders import t5_folder, write_weights

PROMPTS = ["the red puck moves", "", "push the box " * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("t5")
    t5_folder(path)
    return path


@pytest.fixture(scope="module")
def encoder(folder: Path) -> T5Encoder:
    return T5Encoder(str(folder), max_length=16)


def test_it_is_a_text_encoder_with_zeros_behind_each_prompt(encoder: T5Encoder) -> None:
    assert isinstance(encoder, TextEncoder)
    embeddings = encoder.encode(PROMPTS)
    assert embeddings.shape == (3, 16, 32) == (3, encoder.num_tokens, encoder.width)
    assert embeddings.dtype == torch.float32
    used = (embeddings != 0).any(dim=-1)
    assert used[1].tolist() == [True] + [False] * 15  # an empty prompt is its end token
    assert used[2].all()  # cut to 16
    assert 1 < used[0].sum() < 16


def test_it_equals_the_package_on_the_same_folder(encoder: T5Encoder, folder: Path) -> None:
    from transformers import T5EncoderModel, T5TokenizerFast

    tokens = T5TokenizerFast.from_pretrained(folder)(
        PROMPTS, padding="max_length", truncation=True, max_length=16, return_tensors="pt"
    )
    model = T5EncoderModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(**tokens).last_hidden_state
    expected = hidden * tokens["attention_mask"][:, :, None]
    torch.testing.assert_close(encoder.encode(PROMPTS), expected, rtol=1e-5, atol=1e-5)


def test_equal_prompts_are_one_pass_and_a_string_is_a_batch_of_one(encoder: T5Encoder, monkeypatch) -> None:
    rows = []
    forward = encoder._model.forward
    monkeypatch.setattr(encoder._model, "forward", lambda **kw: rows.append(len(kw["input_ids"])) or forward(**kw))
    together = encoder.encode([PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    assert rows == [2]
    assert torch.equal(together[0], together[2])
    torch.testing.assert_close(encoder.encode(PROMPTS[0])[0], together[0])


def test_weights_in_shards_give_the_same(encoder: T5Encoder, tmp_path: Path) -> None:
    t5_folder(tmp_path, "sharded_bin")
    other = T5Encoder(str(tmp_path), max_length=16)
    assert other.name == encoder.name
    assert torch.equal(other.encode(PROMPTS), encoder.encode(PROMPTS))


@pytest.mark.parametrize("left_out", ["shared.weight", "encoder.embed_tokens.weight"])
def test_the_table_of_tokens_may_have_either_name(left_out: str, folder: Path, tmp_path: Path) -> None:
    model = t5_folder(tmp_path)
    write_weights(tmp_path, {name: t for name, t in model.state_dict().items() if name != left_out}, "single")
    loaded = load_t5(str(tmp_path))
    assert torch.equal(loaded.shared.weight, model.shared.weight)
    assert loaded.encoder.embed_tokens.weight.data_ptr() == loaded.shared.weight.data_ptr()


def test_weights_that_lack_a_name_or_have_one_too_many_are_refused(tmp_path: Path) -> None:
    tensors = dict(t5_folder(tmp_path).state_dict())
    lost = "encoder.block.1.layer.1.DenseReluDense.wo.weight"
    kept = {name: tensor for name, tensor in tensors.items() if name != lost}
    write_weights(tmp_path, kept, "single")
    with pytest.raises(CheckpointError, match=r"block\.1\.layer\.1\.DenseReluDense\.wo"):
        T5Encoder(str(tmp_path))
    write_weights(tmp_path, {**tensors, "encoder.more.weight": torch.zeros(2)}, "single")
    with pytest.raises(CheckpointError, match=r"encoder\.more\.weight"):
        T5Encoder(str(tmp_path))


def test_dtype_is_that_of_the_checkpoint_or_as_asked(folder: Path, tmp_path: Path) -> None:
    model = t5_folder(tmp_path)
    write_weights(tmp_path, {name: t.bfloat16() for name, t in model.state_dict().items()}, "single")
    assert load_t5(str(tmp_path)).dtype == torch.bfloat16
    asked = T5Encoder(str(folder), max_length=8, dtype="bfloat16")
    assert asked._model.dtype == torch.bfloat16 and asked.name.endswith("-bfloat16")
    assert asked.encode("a").dtype == torch.float32


def test_a_folder_that_is_not_there_or_not_complete_names_the_cure(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere does not exist.*hf download google-t5/t5-11b"):
        T5Encoder(str(tmp_path / "nowhere"))
    t5_folder(tmp_path / "a")
    (tmp_path / "a" / "spiece.model").unlink()
    with pytest.raises(CheckpointError, match=r"\(tokenizer\.json"):
        T5Encoder(str(tmp_path / "a"))
    (tmp_path / "a" / "config.json").unlink()
    (tmp_path / "a" / "model.safetensors").unlink()
    problems = T5Encoder.problems(str(tmp_path / "a"))
    assert len(problems) == 3 and all("--local-dir" in problem for problem in problems)


def test_settings_that_cannot_work_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="float16"):
        T5Encoder(str(folder), dtype="float16")
    with pytest.raises(ConfigError, match="'half'"):
        T5Encoder(str(folder), dtype="half")
    with pytest.raises(ConfigError, match="max_length"):
        T5Encoder(str(folder), max_length=0)
