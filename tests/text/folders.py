# SPDX-License-Identifier: Apache-2.0
"""Folders of small random text encoders in the layout of the public ones, tokenizer included; one that counts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.text.bytes_encoder import BytesEncoder

SENTENCES = [
    "the red puck moves to the ring",
    "push the blue box to the left of the table",
    "a robot arm picks up the cup and places it on the table",
    "the camera pans over the city at night",
]
T5_SIZES = dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, relative_attention_num_buckets=8)
QWEN_SIZES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=600, max_position_embeddings=128, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=1, pad_token_id=0,
)  # fmt: skip


class Letters:
    """An encoder of one's own: each letter's byte is all numbers of its token."""

    def __init__(self, num_tokens: int = 3, width: int = 4) -> None:
        self.num_tokens, self.width = num_tokens, width
        self.name = f"letters-v1-{num_tokens}x{width}"

    def encode(self, prompts: Sequence[str]) -> Tensor:
        rows = torch.zeros(len(prompts), self.num_tokens, self.width)
        for row, prompt in zip(rows, prompts):
            row[: len(prompt)] = torch.tensor(list(prompt.encode()))[: self.num_tokens, None]
        return rows

    def to(self, device: torch.device | str) -> "Letters":
        return self


class Counting(BytesEncoder):
    """Embeddings times ``factor``, with a list of what was asked for; it may be stopped after some captions."""

    def __init__(
        self, num_tokens: int = 64, width: int = 32, factor: float = 1.0, stop_after: float = float("inf")
    ) -> None:
        super().__init__(num_tokens, width)
        self.asked: list[str] = []
        self._factor, self._stop_after = factor, stop_after

    def encode(self, prompts: str | Sequence[str]) -> Tensor:
        if len(self.asked) >= self._stop_after:
            raise KeyboardInterrupt
        self.asked += prompts
        return self._factor * super().encode(prompts)


def t5_folder(folder: Path, layout: str = "single", seed: int = 0, **sizes: int) -> Any:
    """A whole T5, decoder and all: config, SentencePiece tokenizer, weights in ``layout``; gives the full model.

    ``sizes`` are those of T5Config; ``d_model=1024`` gives embeddings as wide as T5-11B's.
    """
    import sentencepiece
    from transformers import T5Config, T5ForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    config = T5Config(vocab_size=200, **T5_SIZES | sizes)
    model = _scattered(T5ForConditionalGeneration(config).eval())
    with open(folder / "spiece.model", "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES * 5), model_writer=file, vocab_size=60, hard_vocab_limit=False,
            pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
        )  # fmt: skip
    config.save_pretrained(folder)
    write_weights(folder, dict(model.state_dict()), layout)
    return model


def reason1_folder(folder: Path, layout: str = "single", names: str = "public") -> Any:
    """A whole vision-language model with the names and flat config of the public folder; gives the full model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    flat = dict(
        model_type="qwen2_5_vl", architectures=["Qwen2_5_VLForConditionalGeneration"], rope_theta=1e6,
        rope_scaling=rope, rms_norm_eps=1e-6, **QWEN_SIZES,
        vision_config=dict(
            depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, fullatt_block_indexes=[0]
        ),
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(flat))
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig.from_pretrained(folder)).eval()
    _scattered(model)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES * 5, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|endoftext|>", padding_side="left")
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(flat))
    tensors = dict(model.state_dict())
    if names == "public":
        public = {"model.language_model.": "model.", "model.visual.": "visual."}
        for ours, theirs in public.items():
            tensors = {name.replace(ours, theirs): tensor for name, tensor in tensors.items()}
    write_weights(folder, tensors, layout)
    return model


def write_weights(folder: Path, tensors: dict[str, Tensor], layout: str) -> None:
    """All tensors in one file or two shards with an index: "single", "sharded", "bin" or "sharded_bin"."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    stem, suffix = ("pytorch_model", "bin") if layout.endswith("bin") else ("model", "safetensors")

    def write(name: str, part: dict[str, Tensor]) -> None:
        torch.save(part, folder / name) if suffix == "bin" else save_file(part, folder / name)

    if not layout.startswith("sharded"):
        write(f"{stem}.{suffix}", tensors)
        return
    names = sorted(tensors)
    places = {}
    for i, part in enumerate([names[::2], names[1::2]], start=1):
        file = f"{stem}-{i:05d}-of-00002.{suffix}"
        write(file, {name: tensors[name] for name in part})
        places.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": places}
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def _scattered(model: Any) -> Any:
    """Random where initialisation is 0 or 1 as well, so that a weight that is not loaded shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def original_umt5(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a UMT5 by the names of Wan2.1's own repository."""
    parts = {
        "shared": "token_embedding", "encoder.final_layer_norm": "norm", "encoder.block.": "blocks.",
        "layer.0.SelfAttention.relative_attention_bias": "pos_embedding.embedding", "layer.0.SelfAttention": "attn",
        "layer.0.layer_norm": "norm1", "layer.1.layer_norm": "norm2", "layer.1.DenseReluDense.wi_0": "ffn.gate.0",
        "layer.1.DenseReluDense.wi_1": "ffn.fc1", "layer.1.DenseReluDense.wo": "ffn.fc2",
    }  # fmt: skip
    return {_replaced(name, parts): state[name] for name in state if name != "encoder.embed_tokens.weight"}


def original_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same of CLIP, with the parts that nothing here reads."""
    parts = {
        "embeddings.patch_embedding": "patch_embedding", "pre_layrnorm": "pre_norm", "post_layernorm": "post_norm",
        "encoder.layers.": "transformer.", "self_attn.out_proj": "attn.proj", "layer_norm": "norm", "mlp.fc1": "mlp.0",
        "mlp.fc2": "mlp.2",
    }  # fmt: skip
    found = {f"visual.{_replaced(name, parts)}": state[name] for name in state if "embeddings" not in name}
    for name in [name for name in found if ".q_proj." in name]:
        three = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        found[name.replace("self_attn.q_proj", "attn.to_qkv")] = torch.cat(three)
    found["visual.patch_embedding.weight"] = state["embeddings.patch_embedding.weight"]
    found["visual.cls_embedding"] = state["embeddings.class_embedding"][None, None]
    found["visual.pos_embedding"] = state["embeddings.position_embedding.weight"][None]
    unread = {"visual.head": torch.zeros(8, 8), "log_scale": torch.zeros(()), "textual.norm.weight": torch.zeros(4)}
    return {**found, **unread}


def _replaced(name: str, parts: dict[str, str]) -> str:
    for theirs, original in parts.items():
        name = name.replace(theirs, original)
    return name
