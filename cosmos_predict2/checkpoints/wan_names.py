# SPDX-License-Identifier: Apache-2.0
"""The Wan2.1 network in diffusers' layout (``WanTransformer3DModel``) and back: names and configuration.

Our names are those of the original repository. No tensor is transposed. The norms of a block have other numbers there:
the one with gain and bias, before cross-attention, is ``norm3`` here and ``norm2`` in diffusers.
"""

from collections.abc import Mapping
from typing import Any

from cosmos_predict2.checkpoints.diffusers_names import mapped
from imaginaire.errors import CheckpointError

CLASS_NAME, ORIGINAL = CLASS_NAMES = "WanTransformer3DModel", "WanModel"
IGNORED = "attn2.norm_added_q.weight"  # in older image-to-video files of diffusers; nothing reads it

# (ours, theirs), of parts; "{}" is a block's number.
_EMBEDDER = "condition_embedder"
_PARTS = {
    "patch_embedding": "patch_embedding",
    "time_embedding.0": f"{_EMBEDDER}.time_embedder.linear_1",
    "time_embedding.2": f"{_EMBEDDER}.time_embedder.linear_2",
    "time_projection.1": f"{_EMBEDDER}.time_proj",
    "text_embedding.0": f"{_EMBEDDER}.text_embedder.linear_1",
    "text_embedding.2": f"{_EMBEDDER}.text_embedder.linear_2",
    "img_emb.proj.0": f"{_EMBEDDER}.image_embedder.norm1",
    "img_emb.proj.1": f"{_EMBEDDER}.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": f"{_EMBEDDER}.image_embedder.ff.net.2",
    "img_emb.proj.4": f"{_EMBEDDER}.image_embedder.norm2",
    "blocks.{}.norm3": "blocks.{}.norm2",
    "blocks.{}.ffn.0": "blocks.{}.ffn.net.0.proj",
    "blocks.{}.ffn.2": "blocks.{}.ffn.net.2",
    "head.head": "proj_out",
}
_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
_OF_IMAGE = {"k_img": "add_k_proj", "v_img": "add_v_proj", "norm_k_img": "norm_added_k"}
for _ours, _theirs, _layers in (("self_attn", "attn1", _ATTENTION), ("cross_attn", "attn2", _ATTENTION | _OF_IMAGE)):
    _PARTS |= {f"blocks.{{}}.{_ours}.{a}": f"blocks.{{}}.{_theirs}.{b}" for a, b in _layers.items()}
_TABLES = {"head.modulation": "scale_shift_table", "blocks.{}.modulation": "blocks.{}.scale_shift_table"}
_TO_DIFFUSERS = _TABLES | {f"{a}.{kind}": f"{b}.{kind}" for a, b in _PARTS.items() for kind in ("weight", "bias")}
_FROM_DIFFUSERS = {theirs: ours for ours, theirs in _TO_DIFFUSERS.items()}


def to_diffusers_name(name: str) -> str | None:
    """diffusers' name of a parameter; None for a name that the network does not have."""
    return mapped(name, _TO_DIFFUSERS)


def from_diffusers_name(name: str) -> str | None:
    """Our name of a parameter in diffusers' layout; None for a name that the layout does not have."""
    return mapped(name, _FROM_DIFFUSERS)


# The configuration ----------------------------------------------------------------------------------------------------


_SIZES = {  # ours, theirs
    "num_blocks": "num_layers",
    "num_heads": "num_attention_heads",
    "ffn_channels": "ffn_dim",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "crossattn_emb_channels": "text_dim",
    "time_channels": "freq_dim",
    "image_channels": "image_dim",
}
_FIXED: dict[str, Any] = {  # of every Wan2.1 network: another value is another network
    "patch_size": [1, 2, 2],
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
    "pos_embed_seq_len": None,
}


_ORIGINAL = {  # ours, of the original repository
    "model_channels": "dim",
    "num_blocks": "num_layers",
    "num_heads": "num_heads",
    "ffn_channels": "ffn_dim",
    "in_channels": "in_dim",
    "out_channels": "out_dim",
    "time_channels": "freq_dim",
}


def net_kwargs(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `WanDiT` for a config.json of diffusers, or those that the original one has."""
    if config.get("_class_name") == ORIGINAL:
        return {ours: config[theirs] for ours, theirs in _ORIGINAL.items()}
    for name, value in _FIXED.items():
        found = config.get(name, value)
        if (list(found) if isinstance(found, tuple) else found) != value:
            raise CheckpointError(
                f"config.json has {name}={found}, where Wan2.1 has {value}: it is of another network."
            )
    width = config["num_attention_heads"] * config["attention_head_dim"]
    if config.get("added_kv_proj_dim") not in (None, width):
        raise CheckpointError(f"config.json has added_kv_proj_dim={config['added_kv_proj_dim']}, where it is {width}.")
    return {ours: config.get(theirs) for ours, theirs in _SIZES.items()} | {"model_channels": width}


def diffusers_config(net: Mapping[str, Any]) -> dict[str, Any]:
    """``transformer/config.json`` of a network, given all the arguments that it was built with."""
    sizes = {theirs: net[ours] for ours, theirs in _SIZES.items()}
    head_dim = net["model_channels"] // net["num_heads"]
    added = None if net["image_channels"] is None else net["model_channels"]
    return {"_class_name": CLASS_NAME, **_FIXED, **sizes, "attention_head_dim": head_dim, "added_kv_proj_dim": added}


def original_config(net: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` beside the weights in the original repository's layout."""
    sizes = {theirs: net[ours] for ours, theirs in _ORIGINAL.items()}
    kind = "t2v" if net["image_channels"] is None else "i2v"
    return {"_class_name": ORIGINAL, "model_type": kind, "text_len": 512, "eps": 1e-6, **sizes}
