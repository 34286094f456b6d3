# SPDX-License-Identifier: Apache-2.0
"""A tiny twin of Cosmos-Reason1 for trials without a download: random weights, a token for each byte.

The folder has the public one's files, flat config and names of weights, so that what reads one reads the other.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cosmos_predict2.text import pretrained

TINY = "tiny"  # the path of an encoder that needs no files
SPECIAL = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad")
_IDS = {f"{name}_id": 256 + SPECIAL.index(token) for name, token in [
    ("pad_token", "endoftext"), ("eos_token", "im_end"), ("vision_start_token", "vision_start"),
    ("vision_end_token", "vision_end"), ("image_token", "image_pad"), ("video_token", "video_pad"),
]}  # fmt: skip
CONFIG: dict[str, Any] = dict(
    model_type="qwen2_5_vl", architectures=["Qwen2_5_VLForConditionalGeneration"], hidden_size=32, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=256 + len(SPECIAL), rms_norm_eps=1e-6,
    max_position_embeddings=4096, rope_theta=1e6, rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]},
    tie_word_embeddings=False, bos_token_id=256, **_IDS, vision_config=dict(
        depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, fullatt_block_indexes=[0]
    ),
)  # fmt: skip


@contextlib.contextmanager
def folder_of(path: str) -> Iterator[str]:
    """The folder at a path; of the twin a temporary one."""
    if path != TINY:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_reason1(folder)
        yield folder


def write_tiny_reason1(folder: str | Path) -> None:
    """Write config, tokenizer and weights, the same ones each time."""
    package = pretrained.transformers()
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    of_bytes.pre_tokenizer, of_bytes.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = [f"<|{name}|>" for name in SPECIAL]
    tokenizer = package.PreTrainedTokenizerFast(tokenizer_object=of_bytes, pad_token=special[0])
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    tokenizer.save_pretrained(folder)
    (folder / pretrained.CONFIG).write_text(json.dumps(CONFIG))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = package.Qwen2_5_VLForConditionalGeneration(pretrained.config_of(package.Qwen2_5_VLConfig, str(folder)))
    from safetensors.torch import save_file

    tensors = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor.contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors")
