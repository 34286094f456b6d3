# SPDX-License-Identifier: Apache-2.0
"""UMT5 and CLIP of Wan2.1 on small random folders in diffusers' layout, beside the transformers package."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from cosmos_predict2.text.clip import ClipImageEncoder
from cosmos_predict2.text.t5 import T5Encoder, UMT5Encoder
from cosmos_predict2.text.trained_text import parse_name
from imaginaire.errors import CheckpointError, ConfigError
from tests.text.folders import T5_SIZES, original_clip, original_umt5, t5_folder


@pytest.mark.parametrize("cls", [T5Encoder, UMT5Encoder])
@pytest.mark.parametrize("option", [{"batch_size": 0}, {"max_length": 0}, {"dtype": "float16"}])
def test_options_that_cannot_work_are_refused_before_weights_are_looked_for(cls: Any, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"must be 1 at least|float16"):
        cls.problems("nowhere", **option)


@torch.no_grad()
def test_umt5_equals_the_package_and_pads_with_zeros(tmp_path: Path) -> None:
    from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

    t5_folder(tmp_path / "t5")
    (tmp_path / "tokenizer").mkdir()
    shutil.copy(tmp_path / "t5/spiece.model", tmp_path / "tokenizer")
    torch.manual_seed(0)
    model = UMT5EncoderModel(UMT5Config(vocab_size=200, **T5_SIZES)).eval()
    model.save_pretrained(tmp_path / "text_encoder")
    encoder = UMT5Encoder(str(tmp_path), max_length=24)
    clean = "push the blue box & the cup"
    found = encoder.encode([" push the  blue\nbox &amp;amp; the cup ", clean])
    assert torch.allclose(found[0], found[1], atol=1e-6)  # rows of a batch differ by their last bits on Intel
    tokens = T5TokenizerFast.from_pretrained(tmp_path / "tokenizer")([clean], return_tensors="pt")
    expected = model(**tokens).last_hidden_state[0]
    assert torch.allclose(found[0, : len(expected)], expected, atol=1e-5)
    assert not found[0, len(expected) :].any()
    assert (parse_name(encoder.name).kind, encoder.width) == ("umt5", 32)
    with pytest.raises(CheckpointError, match="hf download Wan-AI"):
        UMT5Encoder(str(tmp_path / "absent"))


@torch.no_grad()
def test_clip_gives_what_the_last_block_but_one_does(tmp_path: Path) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2)
    model = CLIPVisionModel(CLIPVisionConfig(image_size=28, patch_size=14, **sizes)).eval()
    model.save_pretrained(tmp_path)
    picture = torch.rand(2, 3, 28, 28) * 2 - 1
    found = ClipImageEncoder(str(tmp_path)).encode(picture)
    mean, std = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])
    pixels = (picture / 2 + 0.5 - mean[:, None, None]) / std[:, None, None]
    hidden = model(pixel_values=pixels, output_hidden_states=True).hidden_states
    assert torch.allclose(found, hidden[2], atol=1e-5) and found.shape == (2, 5, 32)
    assert ClipImageEncoder(str(tmp_path)).encode(torch.zeros(1, 3, 40, 64)).shape == (1, 5, 32)


@torch.no_grad()
def test_files_of_the_original_repository_give_what_the_folders_do(tmp_path: Path) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

    own, folder = tmp_path / "Wan2.1-I2V", tmp_path / "folder"
    t5_folder(tmp_path / "t5")
    for place in (own / "google/umt5-xxl", folder / "tokenizer"):
        place.mkdir(parents=True)
        shutil.copy(tmp_path / "t5/spiece.model", place)
    torch.manual_seed(0)
    text: Any = UMT5EncoderModel(UMT5Config(vocab_size=200, **{**T5_SIZES, "d_kv": 6}))
    sizes = dict(hidden_size=160, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, hidden_act="gelu")
    pictures: Any = CLIPVisionModel(CLIPVisionConfig(image_size=42, patch_size=14, **sizes))
    for network, name in ((text, "text_encoder"), (pictures, "image_encoder")):
        for parameter in network.parameters():
            parameter.normal_(std=0.3)
        network.save_pretrained(folder / name)
    bare = {name.removeprefix("vision_model."): tensor for name, tensor in pictures.state_dict().items()}
    torch.save(original_umt5(text.state_dict()), own / "models_t5_umt5-xxl-enc-bf16.pth")
    clip_file = own / "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
    torch.save(original_clip(bare), clip_file)
    encoders = [UMT5Encoder(str(place), max_length=24) for place in (own, folder)]
    assert encoders[0].name == encoders[1].name
    assert torch.equal(*(encoder.encode("push the blue box") for encoder in encoders))
    picture = torch.rand(2, 3, 42, 60) * 2 - 1
    places = (str(own), str(folder / "image_encoder"))
    assert torch.equal(*(ClipImageEncoder(place).encode(picture) for place in places))
    # as older versions of the package wrote it, and the public folder has it
    safetensors.torch.save_file(
        {f"vision_model.{n}": t for n, t in bare.items()}, folder / "image_encoder/model.safetensors"
    )
    assert torch.equal(*(ClipImageEncoder(place).encode(picture) for place in places))
    for name, file, read in (
        ("blocks.1.ffn.more.weight", own / "models_t5_umt5-xxl-enc-bf16.pth", UMT5Encoder),
        ("visual.more", clip_file, ClipImageEncoder),
    ):
        state = torch.load(file)
        torch.save({**state, name: torch.zeros(1)}, file)
        with pytest.raises(CheckpointError, match=re.escape(name)):
            read(str(own))
        torch.save({"x": torch.zeros(1)}, file)
        with pytest.raises(CheckpointError, match=r"is no (UMT5|CLIP) of Wan2\.1"):
            read(str(own))
    shutil.rmtree(own / "google")
    with pytest.raises(CheckpointError, match=r"google/umt5-xxl has no tokenizer"):
        UMT5Encoder(str(own))
