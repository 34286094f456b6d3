# SPDX-License-Identifier: Apache-2.0
"""Judges in their public layouts, with a few thousand random numbers in place of billions."""

import json
from pathlib import Path
from typing import Any

import torch

from cosmos_predict2.rl.interfaces import Clips

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
REWARD_TOKENS = ["<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"]
STATISTICS = {"VQ_mean": 0.5, "VQ_std": 2.0, "MQ_mean": -0.25, "MQ_std": 0.5, "TA_mean": 1.0, "TA_std": 4.0}
TEXT = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48,
    bos_token_id=None, eos_token_id=None,
    rope_parameters=dict(rope_type="default", mrope_section=[2, 3, 3], rope_theta=1e6),
)  # fmt: skip


def clips_of_noise(*prompts: str, frames: int, size: tuple[int, int], fps: float) -> Any:
    draws = torch.Generator().manual_seed(1)
    video = torch.randint(0, 255, (len(prompts), 3, frames, *size), dtype=torch.uint8, generator=draws)
    return Clips(None, video, list(prompts), fps)


def tokenizer_of_bytes(special: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only)
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


def _ids(tokenizer: Any) -> dict[str, Any]:
    names = dict(video_token_id="video_pad", vision_start_token_id="vision_start", vision_end_token_id="vision_end")
    return {name: tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}


def make_reason1(folder: Path) -> None:
    """Config, tokenizer and weights of Cosmos-Reason1-Reward as on the hub."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = tokenizer_of_bytes(SPECIAL)
    tokenizer.save_pretrained(folder)
    vision = dict(
        depth=2, hidden_size=32, num_heads=2, intermediate_size=48, out_hidden_size=32, fullatt_block_indexes=[1],
        window_size=56,
    )  # fmt: skip
    text = dict(TEXT, vocab_size=len(tokenizer))
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_ids(tokenizer))
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)


def make_video_align(folder: Path) -> Any:
    """VideoReward as on the hub, and ``folder/base`` with the config of its base; gives the network as peft has it.

    The names in ``model.pth`` are of the transformers that it was trained with, its adapters beside their bases.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    checkpoint = folder / "checkpoint-7"
    tokenizer = tokenizer_of_bytes(SPECIAL + REWARD_TOKENS)
    tokenizer.save_pretrained(checkpoint / "tokenizer")
    vision = dict(depth=2, embed_dim=32, num_heads=2, mlp_ratio=2, hidden_size=32)
    text = dict(TEXT, vocab_size=len(tokenizer) + 5)
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **_ids(tokenizer))
    config.save_pretrained(folder / "base")
    torch.manual_seed(0)
    network: Any = Qwen2VLForConditionalGeneration(config)
    network.resize_token_embeddings(len(tokenizer))
    network.rm_head = torch.nn.Linear(32, 1, bias=False)
    layers = [
        name
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear) and not any(part in name for part in ("lm_head", "rm_head", "visual"))
    ]
    adapted: Any = get_peft_model(network, LoraConfig(target_modules=layers, r=4, lora_alpha=8, lora_dropout=0.05))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    state = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor.bfloat16()
        for name, tensor in adapted.state_dict().items()
    }
    torch.save(state, checkpoint / "model.pth")
    for parameter in adapted.parameters():
        parameter.data = parameter.data.bfloat16().float()
    settings = {
        "data_config": {"fps": 2.0, "max_frame_pixels": 200704, "num_frames": None, "sample_type": "uniform"},
        "model_config": {"output_dim": 1, "use_special_tokens": True, "reward_token": "special"},
        "peft_lora_config": {"lora_enable": True, "lora_r": 4, "lora_alpha": 8, "use_rslora": False},
        "inference_config": STATISTICS,
    }
    (folder / "model_config.json").write_text(json.dumps(settings))
    return adapted.eval()


def make_qwen3(folder: Path) -> Any:
    """Qwen3-VL as on the hub; gives the network."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    tokenizer = tokenizer_of_bytes([*SPECIAL, "<|image_pad|>"])
    tokenizer.save_pretrained(folder)
    text = dict(TEXT, vocab_size=len(tokenizer) + 5, head_dim=16, tie_word_embeddings=False)
    vision = dict(
        depth=2, hidden_size=32, num_heads=2, intermediate_size=48, out_hidden_size=32, deepstack_visual_indexes=[0],
        num_position_embeddings=64,
    )  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **_ids(tokenizer),
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
    )  # fmt: skip
    torch.manual_seed(0)
    network = Qwen3VLForConditionalGeneration(config).eval()
    network.save_pretrained(folder)
    return network


def make_robometer(folder: Path) -> tuple[Any, Any]:
    """Robometer in LeRobot's layout, ``folder/base`` with its tokenizer; gives the network and the heads."""
    from safetensors.torch import save_file
    from torch import nn

    network = make_qwen3(folder / "base")
    heads = nn.ModuleDict(
        {
            f"{name}_head": nn.Sequential(
                nn.Linear(32, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, outputs)
            )
            for name, outputs in (("progress", 10), ("preference", 1), ("success", 1))
        }
    ).eval()
    state = {f"model.{name}": tensor for name, tensor in network.state_dict().items()}
    state |= dict(heads.state_dict()) | {"frame_pool_attn.weight": torch.zeros(1, 32)}
    save_file({name: tensor.clone().contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    settings = dict(
        type="robometer", use_multi_image=True, use_per_frame_progress_token=True, progress_loss_type="discrete",
        progress_discrete_bins=10, vlm_config=network.config.to_dict(),
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    return network, heads
