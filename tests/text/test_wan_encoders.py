# SPDX-License-Identifier: Apache-2.0
"""UMT5 and CLIP of Wan2.1 on small random folders in diffusers' layout, beside the transformers package."""

import shutil
from pathlib import Path

import pytest
import torch

from cosmos_predict2.text.clip import ClipImageEncoder
from cosmos_predict2.text.t5 import UMT5Encoder
from cosmos_predict2.text.trained_text import parse_name
from imaginaire.errors import CheckpointError
from tests.text.folders import T5_SIZES, t5_folder


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
    assert torch.equal(found[0], found[1])
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
