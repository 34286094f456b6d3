# SPDX-License-Identifier: Apache-2.0
"""Guardrails in their public layouts below a folder of checkpoints, with a few thousand random numbers each."""

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
from torch import nn

from cosmos_predict2.guardrail.face_blur import RetinaFace
from tests.rl.rewards.tiny_judges import tokenizer_of_bytes

CHAT = (
    "{{ '<|begin_of_text|>Is this unsafe?\n' }}{% for turn in messages %}{{ turn['content'] | trim }}"
    "{% endfor %}{{ '<|end_header_id|>' }}"
)


def guard(name: str, method: str, answer: Any) -> Any:
    """A guardrail of one method, which gives the answer, or raises it."""
    return type("Guard", (), {"name": name, method: Mock(side_effect=itertools.repeat(answer))})()


def make_llama_guard(root: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = root / "meta-llama" / "Llama-Guard-3-8B"
    tokenizer = tokenizer_of_bytes(["<|begin_of_text|>", "<|end_header_id|>", "<|eot_id|>"])
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    rope = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=64)  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(tokenizer), bos_token_id=256, eos_token_id=258, pad_token_id=258, rope_parameters=rope,
        max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_video_filter(root: Path) -> tuple[Path, Any, nn.Sequential]:
    """The folder, the whole SigLIP in it, and the classifier."""
    from transformers import SiglipConfig, SiglipModel

    folder = root / "nvidia" / "Cosmos-Guardrail1" / "video_content_safety_filter"
    cached = folder / "models--google--siglip-so400m-patch14-384"
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    torch.manual_seed(0)
    config = SiglipConfig(
        vision_config=dict(sizes, image_size=28, patch_size=14),
        text_config=dict(sizes, vocab_size=20, bos_token_id=1, eos_token_id=2, pad_token_id=0),
    )
    whole = SiglipModel(config).eval()
    whole.save_pretrained(cached / "snapshots" / "abc")
    layers = nn.Sequential(
        nn.Linear(16, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(),
        nn.Linear(8, 7),
    ).eval()  # fmt: skip
    write_classifier(folder, layers)
    return folder, whole, layers


def write_classifier(folder: Path, layers: nn.Sequential) -> None:
    torch.save(
        {"model": {f"network.layers.{name}": tensor for name, tensor in layers.state_dict().items()}},
        folder / "safety_filter.pt",
    )


def make_face_blur(root: Path, prefix: str = "module.") -> tuple[Path, RetinaFace]:
    folder = root / "nvidia" / "Cosmos-Guardrail1" / "face_blur_filter"
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    network = RetinaFace(4, 8).eval()
    torch.save(
        {f"{prefix}{name}": tensor for name, tensor in network.state_dict().items()}, folder / "Resnet50_Final.pth"
    )
    return folder, network
