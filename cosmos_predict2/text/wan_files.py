# SPDX-License-Identifier: Apache-2.0
"""UMT5 and CLIP in the files of Wan2.1's own repository: their tensors by the names of transformers, and settings.

The files have no config.json: sizes are read from the shapes, the rest is that of the released encoders.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cosmos_predict2.text.qwen_vl import MEAN, STD
from imaginaire import storage
from imaginaire.checkpoint import weights
from imaginaire.checkpoint.weight_files import names_at, shape_of
from imaginaire.errors import CheckpointError

UMT5, CLIP = "models_t5_umt5-xxl", "models_clip_open-clip-xlm-roberta-large-vit-huge-14"  # how files' names begin
UMT5_TOKENIZER = "google/umt5-xxl"
HEAD_WIDTH = 80  # of ViT-H's vision half
PREPROCESSOR = dict(  # as Wan2.1 looks at a picture: squeezed to a square
    image_processor_type="CLIPImageProcessor", do_resize=True, size=dict(height=224, width=224), resample=3,
    do_center_crop=False, do_rescale=True, do_normalize=True, image_mean=list(MEAN), image_std=list(STD),
    do_convert_rgb=True,
)  # fmt: skip

# (original, transformers'), "{}" is the number of a block
_LAYER = "encoder.block.{}.layer"
_BIAS = f"{_LAYER}.0.SelfAttention.relative_attention_bias.weight"
_UMT5_NAMES = {
    "token_embedding.weight": "shared.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
    "blocks.{}.norm1.weight": f"{_LAYER}.0.layer_norm.weight",
    "blocks.{}.norm2.weight": f"{_LAYER}.1.layer_norm.weight",
    "blocks.{}.pos_embedding.embedding.weight": _BIAS,
    **{f"blocks.{{}}.attn.{name}.weight": f"{_LAYER}.0.SelfAttention.{name}.weight" for name in "qkvo"},
    **{
        f"blocks.{{}}.ffn.{ours}.weight": f"{_LAYER}.1.DenseReluDense.{theirs}.weight"
        for ours, theirs in (("gate.0", "wi_0"), ("fc1", "wi_1"), ("fc2", "wo"))
    },
}
_CLIP_LAYER = "encoder.layers.{}"
_CLIP_PARTS = {
    "pre_norm": "pre_layrnorm",
    "post_norm": "post_layernorm",
    "transformer.{}.norm1": f"{_CLIP_LAYER}.layer_norm1",
    "transformer.{}.norm2": f"{_CLIP_LAYER}.layer_norm2",
    "transformer.{}.attn.proj": f"{_CLIP_LAYER}.self_attn.out_proj",
    "transformer.{}.attn.to_qkv": f"{_CLIP_LAYER}.self_attn.{{}}_proj",  # three in one
    "transformer.{}.mlp.0": f"{_CLIP_LAYER}.mlp.fc1",
    "transformer.{}.mlp.2": f"{_CLIP_LAYER}.mlp.fc2",
}
_CLIP_NAMES = {
    "cls_embedding": "embeddings.class_embedding",
    "patch_embedding.weight": "embeddings.patch_embedding.weight",
    "pos_embedding": "embeddings.position_embedding.weight",
    **{f"{a}.{kind}": f"{b}.{kind}" for a, b in _CLIP_PARTS.items() for kind in ("weight", "bias")},
}
_VISUAL = "visual."


def file_in(folder: str, kind: str) -> str:
    """The path of a folder's file of this kind, `UMT5` or `CLIP`; empty where it has none."""
    found = [name for name in names_at(folder) if name.startswith(kind)]
    return storage.join(folder, found[0]) if found else ""


def is_original(path: str) -> bool:
    return path.rpartition("/")[2].startswith((UMT5, CLIP))


def umt5_tensors(path: str) -> Mapping[str, Tensor]:
    """The encoder's tensors; one with a name that it does not have keeps it, for the account."""
    return weights.renamed(weights.read(path), lambda name: _renamed(name, _UMT5_NAMES) or name)


def umt5_settings(path: str) -> dict[str, Any]:
    """The content of config.json of the encoder."""
    source = umt5_tensors(path)
    numbers = [i for i in range(len(source)) if _BIAS.format(i) in source]
    names = ["shared.weight", *(name.format(0) for name in (_BIAS, f"{_LAYER}.0.SelfAttention.q.weight"))]
    words, biases, queries, wide = (
        _shape(source, name, path, "UMT5") for name in (*names, f"{_LAYER}.1.DenseReluDense.wi_0.weight".format(0))
    )
    return dict(
        model_type="umt5", vocab_size=words[0], d_model=words[1], d_kv=queries[0] // biases[1], d_ff=wide[0],
        num_layers=len(numbers), num_heads=biases[1], relative_attention_num_buckets=biases[0],
        relative_attention_max_distance=128, feed_forward_proj="gated-gelu", layer_norm_epsilon=1e-6,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip


def clip_tensors(path: str) -> Mapping[str, Tensor]:
    """The tensors of the vision half. The text half, the scale and the projection between both are left out."""
    source = weights.read(path)
    found: dict[str, Tensor] = {}
    for name in source:
        if name.startswith("textual.") or name in ("log_scale", f"{_VISUAL}head"):
            continue
        inner = name.removeprefix(_VISUAL)
        new = (_renamed(inner, _CLIP_NAMES) if inner != name else None) or name
        if ".to_qkv." in name:
            found |= zip(map(new.format, "qkv"), source[name].chunk(3), strict=True)
        else:
            is_table = inner in ("cls_embedding", "pos_embedding")  # [1, 1, D] and [1, N, D], squeezed by both names
            found[new] = source[name].squeeze() if is_table else source[name]
    return found


def clip_settings(path: str) -> dict[str, Any]:
    """The content of config.json of the vision half."""
    source = weights.read(path)
    names = [f"{_VISUAL}{name}" for name in ("patch_embedding.weight", "pos_embedding", "transformer.0.mlp.0.weight")]
    patches, places, wide = (_shape(source, name, path, "CLIP") for name in names)
    layers = {name.split(".")[2] for name in source if name.startswith(f"{_VISUAL}transformer.")}
    return dict(
        model_type="clip_vision_model", hidden_size=patches[0], intermediate_size=wide[0],
        num_hidden_layers=len(layers), num_attention_heads=max(1, patches[0] // HEAD_WIDTH), patch_size=patches[2],
        image_size=math.isqrt(places[1] - 1) * patches[2], hidden_act="gelu", layer_norm_eps=1e-5,
    )  # fmt: skip


def _shape(source: Mapping[str, Tensor], name: str, path: str, what: str) -> tuple[int, ...]:
    if name not in source:
        raise CheckpointError(f"{path} is no {what} of Wan2.1: it has no {name}.")
    return shape_of(source, name)


def _renamed(name: str, table: Mapping[str, str]) -> str | None:
    """transformers' name by a table; None for a name that it does not have."""
    if (block := re.fullmatch(r"(blocks|transformer)\.(\d+)\.(.+)", name)) is None:
        return table.get(name)
    found = table.get(f"{block[1]}.{{}}.{block[3]}")
    return None if found is None else found.replace("{}", block[2], 1)
