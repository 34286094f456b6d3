# SPDX-License-Identifier: Apache-2.0
"""The rules of T5 and Reason1 embeddings against golden values."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cosmos_predict2.text.embeddings import pickles
from cosmos_predict2.text.embeddings.folder import read_embedding
from cosmos_predict2.text.reason1 import combine, load_reason1
from cosmos_predict2.text.reason1 import embed as embed_reason1
from cosmos_predict2.text.t5 import embed as embed_t5
from cosmos_predict2.text.t5 import load_t5
from tests.goldens import Golden, Value

AREA = "tokenizer"
# The folder's README: T5 1e-5, float16 one rounding; Reason1 1e-4 from ids, 1e-5 from given hidden states.
T5 = dict(atol=1e-5)
ONE_HALF_ROUNDING = dict(rtol=2**-10, atol=2**-24)
FROM_IDS = dict(atol=1e-4)
FROM_STATES = dict(atol=1e-5)


@pytest.fixture
def t5(golden: Golden, tmp_path: Path) -> tuple[Tensor, Tensor, Value]:
    """Raw hidden states, embeddings, and the file."""
    from transformers import T5Config

    _absent(golden, "t5_io.safetensors")
    T5Config(**golden.json("t5_config.json")["config"].use()).save_pretrained(tmp_path)
    save_file(golden.tensors("t5_tiny.safetensors").use(), tmp_path / "model.safetensors")
    model, file = load_t5(str(tmp_path)), golden.tensors("t5_io.safetensors")
    ids, mask = file["input_ids"].use(), file["attention_mask"].use()
    with torch.no_grad():
        raw = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return raw, embed_t5(model, ids, mask), file


def test_t5_embeddings(t5: tuple[Tensor, Tensor, Value], golden: Golden) -> None:
    raw, embedding, file = t5
    file["raw_last_hidden_state"].compare(raw, **T5)
    file["embedding"].compare(embedding, **T5)
    is_used = file["mask_bool"].use().bool()
    assert not embedding[~is_used].any()  # exact zeros
    file["mask_bool"].compare(is_used.to(torch.uint8))
    lengths = golden.json("t5_config.json")["lengths"]
    lengths.compare(is_used.sum(dim=1).tolist())
    golden.json("t5_config.json")["max_length"].compare(embedding.shape[1])
    assert torch.equal(file["attention_mask"].use().bool(), is_used)


def test_t5_pickles(t5: tuple[Tensor, Tensor, Value], golden: Golden, tmp_path: Path) -> None:
    _, embedding, file = t5
    stored = file["embedding_fp16"].use()
    file["embedding_fp16"].compare(embedding.half(), **ONE_HALF_ROUNDING)
    for i, length in enumerate(golden.json("t5_config.json")["lengths"].use()):
        array = stored[i, :length].numpy()
        for protocol in (2, 4, 5):
            (tmp_path / "public.pickle").write_bytes(pickle.dumps([array], protocol=protocol))
            found = pickles.padded(read_embedding(tmp_path / "public.pickle"), 512)
            assert found.shape == (pickles.NUM_TOKENS, array.shape[1]) and found.dtype == torch.float32
            assert torch.equal(found[:length], stored[i, :length].float()) and not found[length:].any()
        pickles.write(tmp_path / "ours.pickle", stored[i])
        (ours,) = pickle.loads((tmp_path / "ours.pickle").read_bytes())
        np.testing.assert_array_equal(ours, array)


@pytest.fixture
def reason1(golden: Golden, tmp_path: Path):
    """The language model from a folder made of the golden file, and the file with inputs and results."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLTextConfig

    _absent(golden, "reason1_io.safetensors")
    config = dict(golden.json("reason1_config.json")["config"].use())
    rope = dict(rope_type="default", rope_theta=config.pop("rope_theta"), mrope_section=config.pop("mrope_section"))
    text = Qwen2_5_VLTextConfig(**config, rope_parameters=rope)
    Qwen2_5_VLConfig(text_config=text.to_dict()).save_pretrained(tmp_path)
    save_file(golden.tensors("reason1_tiny.safetensors").use(), tmp_path / "model.safetensors")
    return load_reason1(str(tmp_path)), golden.tensors("reason1_io.safetensors")


STRATEGIES = ("full_concat", "mean_pooling", "pool_every_n_layers_and_concat")


def test_reason1_hidden_states_and_strategies(reason1, golden: Golden) -> None:
    model, file = reason1
    ids, settings = file["input_ids"].use(), golden.json("reason1_config.json")
    settings["max_length"].compare(ids.shape[1])
    states = [file[f"hidden_states.{i}"] for i in range(sum(name.startswith("hidden_states.") for name in file))]
    given = [state.use() for state in states[1:]]
    with torch.no_grad():
        found = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        assert len(found) == len(states)
        for state, golden_state in zip(found, states):
            golden_state.compare(state, **FROM_IDS)
        for name in STRATEGIES:
            group = settings["n_layers_per_group"].use()
            file[name].compare(embed_reason1(model, ids, name, group), **FROM_IDS)
            file[name].compare(combine(given, name, group), **FROM_STATES)


def test_reason1_ids_are_padded_on_the_right(golden: Golden) -> None:
    _absent(golden, "reason1_io.safetensors")
    settings = golden.json("reason1_config.json")
    ids, pad = golden.tensors("reason1_io.safetensors")["input_ids"].use(), settings["pad_id"].use()
    for row, length in zip(ids, settings["lengths"].use()):
        assert (row[length:] == pad).all()


def _absent(golden: Golden, name: str) -> None:
    if not (golden.folder / name).is_file():
        pytest.skip(f"{golden.folder} has no {name}, which is optional.")
