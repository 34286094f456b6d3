# SPDX-License-Identifier: Apache-2.0
"""The judge of plausibility, with tiny random weights in its public layout."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards import wire
from cosmos_predict2.rl.rewards.judges.qwen_video import patches_of, size_within
from cosmos_predict2.rl.rewards.registry import REWARDS, build
from cosmos_predict2.rl.rewards.service.scoring import Scorer
from imaginaire.errors import CheckpointError

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config, tokenizer and weights as on the hub, a few thousand numbers in place of 7 billion."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    path = tmp_path_factory.mktemp("judge")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.save_pretrained(path)
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    text = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48,
        vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=None,
        rope_parameters=dict(rope_type="default", mrope_section=[2, 3, 3], rope_theta=1e6),
    )  # fmt: skip
    vision = dict(
        depth=2, hidden_size=32, num_heads=2, intermediate_size=48, out_hidden_size=32, fullatt_block_indexes=[1],
        window_size=56,
    )  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"],
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(path)
    return path


def clips(*prompts: str, frames: int = 9) -> Clips:
    draws = torch.Generator().manual_seed(1)
    video = torch.randint(0, 255, (len(prompts), 3, frames, 40, 60), dtype=torch.uint8, generator=draws)
    return Clips(None, video, list(prompts), 16.0)


def test_a_verdict_and_its_logits(folder: Path) -> None:
    judge: Any = build(REWARDS["cosmos_reason1"], model_path=str(folder), device="cpu")
    found = judge(clips("a", "b"), {})
    for k in range(2):
        yes, no = float(found["yes_logit"][k]), float(found["no_logit"][k])
        assert float(found["no_score"][k]) == pytest.approx(math.exp(no) / (math.exp(yes) + math.exp(no)), abs=1e-6)
        assert found["prediction"][k] == ("Bad" if yes > no else "Good")
    assert found["yes_logit"][0] != found["yes_logit"][1]  # it sees the video
    again = judge(clips("c", "d"), {})
    assert torch.equal(found["value"], again["value"])  # and asks its question, whatever the caption
    asking: Any = build(REWARDS["cosmos_reason1"], {"asks_caption": True}, model_path=str(folder), device="cpu")
    captions = ["a", "<|video_pad|>"]
    assert torch.isfinite(asking(clips(*captions), {})["value"]).all()
    assert not torch.equal(asking(clips("a", "b"), {})["value"], asking(clips("c", "d"), {})["value"])


def test_it_answers_through_the_service_with_the_published_keys(folder: Path) -> None:
    judge = build(REWARDS["cosmos_reason1"], model_path=str(folder), device="cpu")
    body = wire.encode(clips("a"), {"cosmos_reason1": 1.0}, media="video")
    (found,) = Scorer("cosmos_reason1", judge, lambda: None).score([body])  # type: ignore[arg-type, return-value]
    assert isinstance(found, dict)
    assert set(found["scores"]) == {"cosmos_reason1", "no_score", "yes_logit", "no_logit", "prediction"}


def test_weights_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        build(REWARDS["cosmos_reason1"], model_path=str(tmp_path))


def test_patches_hold_all_pixels_in_blocks_of_tokens() -> None:
    video = torch.zeros(3, 4, 224, 336, dtype=torch.uint8)
    video[:, 2:, 14:28, 28:42] = 255  # second frames; third patch of the second token
    found = patches_of(video, 8.0, max_frames=160, max_tokens=9216)
    assert found.grid == (2, 16, 24) and found.values.shape == (2 * 16 * 24, 3 * 2 * 14 * 14)
    assert found.seconds == 0.25 and found.num_tokens == 2 * 8 * 12
    bright = (found.values.amax(dim=1) > 1).nonzero().flatten().tolist()
    assert bright == [16 * 24 + 4 + 2]


@pytest.mark.parametrize(("frames", "kept"), [(1, 1), (5, 2), (93, 46), (161, 40), (400, 67)])
def test_frames_are_even_and_limited(frames: int, kept: int) -> None:
    video = torch.zeros(3, frames, 28, 28, dtype=torch.uint8)
    found = patches_of(video, 16.0, max_frames=160, max_tokens=9216)
    assert found.grid[0] == kept and found.num_tokens <= 9216


def test_sides_are_multiples_of_28_within_the_limits() -> None:
    assert size_within(480, 832, 25_088, 10**6) == (476, 840)
    height, width = size_within(1080, 1920, 25_088, 300_000)
    assert height % 28 == width % 28 == 0 and height * width <= 300_000
    height, width = size_within(40, 60, 25_088, 10**6)
    assert height * width >= 25_088
