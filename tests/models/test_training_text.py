# SPDX-License-Identifier: Apache-2.0
"""The text of a training batch: encoded from captions, the same for all, or of the data."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from cosmos_predict2.conditioner import TEXT_KEY
from cosmos_predict2.models.text import (
    TrainingText,
    TrainingTextConfig,
    check_text,
    encoder_text_width,
    text_of_config,
)
from cosmos_predict2.pipelines.recorded_run import follow_text
from cosmos_predict2.text.bytes_encoder import BytesEncoder
from cosmos_predict2.text.reason1 import Reason1Encoder, Strategy, combine
from cosmos_predict2.text.tiny_reason1 import TINY, write_tiny_reason1
from imaginaire.checkpoint import weights
from imaginaire.config.lazy_config import LazyCall as L
from imaginaire.errors import ConfigError, DataError
from tests.text.folders import reason1_folder

CPU = torch.device("cpu")


def added(config: TrainingTextConfig, batch: dict[str, Any], size: int = 2) -> Any:
    return TrainingText(config).added_to(batch, size, CPU)[TEXT_KEY]


def test_one_embedding_is_that_of_every_sample_whatever_the_data_carry(tmp_path: Path) -> None:
    embedding = torch.randn(1, 5, 6).bfloat16()
    torch.save(embedding, tmp_path / "empty.pt")
    text = added(TrainingTextConfig(constant_path=str(tmp_path / "empty.pt")), {TEXT_KEY: torch.zeros(3, 1, 1)}, 3)
    assert torch.equal(text, embedding.expand(3, 5, 6)) and text.dtype == torch.bfloat16 and text.stride(0) == 0


def test_an_encoder_replaces_what_the_data_carry() -> None:
    config = TrainingTextConfig(encoder=L(BytesEncoder)(num_tokens=8, width=4))
    text = added(config, {TEXT_KEY: torch.zeros(2, 1, 1), "ai_caption": ["push", ""]})
    assert torch.equal(text, BytesEncoder(8, 4).encode(["push", ""]))


def test_the_real_encoder_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason1_folder(tmp_path)
    passes: list[int] = []
    from cosmos_predict2.text import reason1

    embed = reason1.embed
    monkeypatch.setattr(reason1, "embed", lambda *arguments: passes.append(1) or embed(*arguments))
    text = TrainingText(TrainingTextConfig(encoder=L(Reason1Encoder)(path=str(tmp_path), max_length=160)))
    batch = {"ai_caption": ["push the box"] * 3}
    first = text.added_to(batch, 3, CPU)[TEXT_KEY]
    assert first.shape == (3, 160, 96) and torch.equal(first, text.added_to(batch, 3, CPU)[TEXT_KEY])
    assert len(passes) == 1


def test_the_tiny_twin_is_the_folder_that_it_writes_in_the_public_layout(tmp_path: Path) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    write_tiny_reason1(tmp_path)
    names = set(weights.read(str(tmp_path)))
    assert {"model.layers.1.mlp.up_proj.weight", "visual.patch_embed.proj.weight", "lm_head.weight"} <= names
    whole = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path).eval()
    twin, read = (Reason1Encoder(path, max_length=160) for path in (TINY, str(tmp_path)))
    assert twin.name == read.name and twin.width == Reason1Encoder.declared_width(TINY) == 64
    ids = torch.tensor([twin.token_ids("push the red puck")])
    with torch.no_grad():
        states = whole(input_ids=ids, output_hidden_states=True).hidden_states[1:]
    torch.testing.assert_close(twin.encode("push the red puck"), combine(states, "full_concat"), rtol=1e-4, atol=1e-4)
    text = TrainingText(TrainingTextConfig(encoder=L(Reason1Encoder)(path=TINY, max_length=160)))
    batch = {"ai_caption": ["push the red puck", "push the blue puck"]}
    first, second = text.added_to(batch, 2, CPU)[TEXT_KEY]
    assert torch.equal(first, twin.encode("push the red puck")[0]) and not torch.equal(first, second)


def test_a_run_of_the_tiny_twin_is_followed_at_inference() -> None:
    node = L(Reason1Encoder)(path=TINY, max_length=160)
    made = text_of_config(TrainingTextConfig(encoder=node))
    assert made is not None and (made.encoder, made.num_tokens, made.width) == ("reason1", 160, 64)
    config = SimpleNamespace(text_encoder=L(BytesEncoder)(num_tokens=64, width=64))
    recorded = {**node, "_target_": "cosmos_predict2.text.reason1.Reason1Encoder"}  # as a config.yaml has it
    follow_text(config, made, "a run", recorded)
    assert (config.text_encoder["path"], config.text_encoder["max_length"]) == (TINY, 160)


@pytest.mark.parametrize("captions", [None, "push", ["push"]])
def test_captions_that_are_not_one_a_sample_are_an_error_of_the_data(captions: Any) -> None:
    config = TrainingTextConfig(encoder=L(BytesEncoder)(num_tokens=8, width=4))
    with pytest.raises(DataError, match=r"a list of 2 texts"):
        added(config, {"ai_caption": captions})


def test_two_sources_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="choose one"):
        TrainingTextConfig(encoder=L(BytesEncoder)(), constant_path="x.pt")


def test_a_file_that_is_not_there_shows_before_anything_is_built() -> None:
    assert list(check_text({"constant_path": ""}, {})) == []
    (problem,) = check_text({"constant_path": "no/such.pt"}, {})
    assert str(problem).startswith("model.config.text.constant_path: no/such.pt does not exist")


def test_an_encoder_tells_its_width_before_it_is_built(tmp_path: Path) -> None:
    assert encoder_text_width(L(BytesEncoder)()) == BytesEncoder().width
    assert encoder_text_width(L(BytesEncoder)(width=4)) == 4
    reason1_folder(tmp_path)
    assert encoder_text_width(L(Reason1Encoder)(path=str(tmp_path / "none"))) is None
    for strategy in get_args(Strategy):
        node = L(Reason1Encoder)(path=str(tmp_path), strategy=strategy, n_layers_per_group=2)
        assert encoder_text_width(node) == Reason1Encoder(str(tmp_path), strategy=strategy, n_layers_per_group=2).width
