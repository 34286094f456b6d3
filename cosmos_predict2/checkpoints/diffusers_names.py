# SPDX-License-Identifier: Apache-2.0
"""Our network in diffusers' layout (``CosmosTransformer3DModel``) and back: names and configuration.

No tensor is transposed or reordered, so the map of names is all. It is a bijection on the parameters; what released
files hold besides has no name there.
"""

import re
from collections.abc import Mapping
from inspect import signature
from typing import Any

from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.nn.layers import BASE_FPS
from imaginaire.checkpoint.weights import is_extra
from imaginaire.errors import CheckpointError

CLASS_NAME = "CosmosTransformer3DModel"
_FPS_KEY = "_rope_enable_fps_modulation"  # in config.json for us alone: diffusers passes over what begins with "_"

# (ours, theirs); "{}" is a block's number. Whole names only.
_ATTENTION = {
    "q_proj": "to_q",
    "k_proj": "to_k",
    "v_proj": "to_v",
    "output_proj": "to_out.0",
    "q_norm": "norm_q",
    "k_norm": "norm_k",
}
_MODULATION = {"self_attn": "norm1", "cross_attn": "norm2", "mlp": "norm3"}
_PAIRS = [
    ("x_embedder.proj.1.weight", "patch_embed.proj.weight"),
    ("t_embedder.1.linear_1.weight", "time_embed.t_embedder.linear_1.weight"),
    ("t_embedder.1.linear_2.weight", "time_embed.t_embedder.linear_2.weight"),
    ("t_embedding_norm.weight", "time_embed.norm.weight"),
    *(
        (f"blocks.{{}}.{ours}.{inner}.weight", f"transformer_blocks.{{}}.{theirs}.{other}.weight")
        for ours, theirs in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for inner, other in _ATTENTION.items()
    ),
    *(
        (f"blocks.{{}}.adaln_modulation_{part}.{i}.weight", f"transformer_blocks.{{}}.{norm}.linear_{i}.weight")
        for part, norm in _MODULATION.items()
        for i in (1, 2)
    ),
    ("blocks.{}.mlp.layer1.weight", "transformer_blocks.{}.ff.net.0.proj.weight"),
    ("blocks.{}.mlp.layer2.weight", "transformer_blocks.{}.ff.net.2.weight"),
    ("final_layer.adaln_modulation.1.weight", "norm_out.linear_1.weight"),
    ("final_layer.adaln_modulation.2.weight", "norm_out.linear_2.weight"),
    ("final_layer.linear.weight", "proj_out.weight"),
    ("crossattn_proj.0.weight", "crossattn_proj.0.weight"),
    ("crossattn_proj.0.bias", "crossattn_proj.0.bias"),
    *((f"extra_pos_embedder.pos_emb_{axis}", f"learnable_pos_embed.pos_emb_{axis}") for axis in "thw"),
]
_TO_DIFFUSERS = dict(_PAIRS)
_FROM_DIFFUSERS = {theirs: ours for ours, theirs in _PAIRS}
_BLOCK = re.compile(r"((?:transformer_)?blocks)\.(\d+)\.(.+)")

# What the released family has and diffusers' class does not, by how its names begin.
_NO_CLASS = {"action_embedder": "action-conditioned", "view_embeddings": "multiview"}


def to_diffusers_name(name: str) -> str | None:
    """diffusers' name of a parameter of ours (without ``net.``); None for what it has no place for: released extras."""
    found = mapped(name, _TO_DIFFUSERS)
    if found is not None or is_extra(name):
        return found
    for start, kind in _NO_CLASS.items():
        if name.startswith(start):
            raise CheckpointError(f"'{name}' belongs to {kind} networks, which diffusers has no class for.")
    if ".lora_" in name or ".base_layer." in name:
        raise CheckpointError(f"'{name}' is part of a LoRA adapter: merge it into the weights first (--merge-lora).")
    if name.startswith("t_embedder.1.") and name.endswith(".bias"):
        raise CheckpointError(f"'{name}' exists only without AdaLN-LoRA, which diffusers' {CLASS_NAME} cannot express.")
    raise CheckpointError(f"'{name}' is not a name of the Video2World network, so it has no name in diffusers.")


def from_diffusers_name(name: str) -> str | None:
    """Our name of a parameter in diffusers' layout; None for a name that the layout does not have."""
    return mapped(name, _FROM_DIFFUSERS)


def mapped(name: str, table: Mapping[str, str]) -> str | None:
    """The entry of a table in which "{}" is a block's number."""
    if (block := _BLOCK.fullmatch(name)) is None:
        return table.get(name)
    found = table.get(f"{block[1]}.{{}}.{block[3]}")
    return None if found is None else found.format(block[2])


# The configuration ----------------------------------------------------------------------------------------------------


def diffusers_config(net: Mapping[str, Any], *, has_condition_mask: bool = True) -> dict[str, Any]:
    """``transformer/config.json`` of a network, given the arguments that it was built with."""
    get = {**_DEFAULTS, **net}.__getitem__
    if not get("use_adaln_lora"):
        raise CheckpointError(f"A network without AdaLN-LoRA cannot be written for diffusers' {CLASS_NAME}.")
    config = dict(
        _class_name=CLASS_NAME,
        in_channels=get("in_channels") + int(has_condition_mask),
        out_channels=get("out_channels"),
        num_attention_heads=get("num_heads"),
        attention_head_dim=get("model_channels") // get("num_heads"),
        num_layers=get("num_blocks"),
        mlp_ratio=float(get("mlp_ratio")),
        text_embed_dim=get("crossattn_emb_channels"),
        adaln_lora_dim=get("adaln_lora_dim"),
        max_size=[get("max_frames"), get("max_img_h"), get("max_img_w")],
        patch_size=[get("patch_temporal"), get("patch_spatial"), get("patch_spatial")],
        rope_scale=[float(get(f"rope_{axis}_extrapolation_ratio")) for axis in "thw"],
        concat_padding_mask=get("concat_padding_mask"),
        extra_pos_embed_type="learnable" if get("extra_per_block_abs_pos_emb") else None,
    )
    width = get("crossattn_proj_in_channels")
    if width is not None and width != get("crossattn_emb_channels"):
        config |= dict(
            use_crossattn_projection=True,
            crossattn_proj_in_channels=width,
            encoder_hidden_states_channels=get("crossattn_emb_channels"),
        )
    return config | ({_FPS_KEY: True} if get("rope_enable_fps_modulation") else {})


def frame_rate_note(config: Mapping[str, Any]) -> str:
    """The ``fps`` for diffusers' pipeline with which its transformer computes the same as ours.

    Its transformer scales time by 24 / fps wherever it is given one, whether the network was trained so or not, and
    nothing in its configuration switches that off. Another ``rope_scale`` brings the default nearer at most, and would
    be wrong wherever no frame rate is given.
    """
    if config["in_channels"] == config["out_channels"]:
        return "One frame has no frame rate: nothing to set."
    scales, is_newer = bool(config.get(_FPS_KEY)), bool(config.get("use_crossattn_projection"))
    if is_newer and scales:
        return (
            f"This network scales time by the frame rate of a clip. diffusers' Cosmos2_5_PredictBasePipeline gives its"
            f" transformer none, so that every clip counts as one of {BASE_FPS} frames a second."
        )
    if is_newer:
        return "This network ignores frame rates, and diffusers' Cosmos2_5_PredictBasePipeline gives none."
    if scales:
        return (
            "This network scales time by the frame rate of a clip, as diffusers' transformer does: call its"
            " Cosmos2VideoToWorldPipeline with fps= that of the clip (the default is 16)."
        )
    return (
        "This network ignores frame rates, but diffusers' transformer scales time by them, and its"
        f" Cosmos2VideoToWorldPipeline gives fps=16 by default. Call it with fps={BASE_FPS}: time is then as in"
        " training, and the outputs are equal. (The frame rate of the file that is written is another matter.)"
    )


def net_kwargs(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of our network for a ``transformer/config.json``.

    ``in_channels`` counts latent channels alone; the condition mask is the network class's own.
    """
    if config.get("_class_name", CLASS_NAME) != CLASS_NAME:
        raise CheckpointError(f"config.json describes a {config['_class_name']}; expected {CLASS_NAME}.")
    config = {**_DIFFUSERS_DEFAULTS, **config}
    frames, height, width = config["max_size"]
    patch_temporal, patch_spatial, patch_width = config["patch_size"]
    if patch_spatial != patch_width:
        raise CheckpointError(f"config.json has patch_size {config['patch_size']}; height and width must agree.")
    out_channels = config["out_channels"]
    net = dict(
        max_img_h=height,
        max_img_w=width,
        max_frames=frames,
        in_channels=min(config["in_channels"], out_channels),
        out_channels=out_channels,
        patch_spatial=patch_spatial,
        patch_temporal=patch_temporal,
        concat_padding_mask=config["concat_padding_mask"],
        model_channels=config["num_attention_heads"] * config["attention_head_dim"],
        num_blocks=config["num_layers"],
        num_heads=config["num_attention_heads"],
        mlp_ratio=config["mlp_ratio"],
        crossattn_emb_channels=config["text_embed_dim"],
        use_adaln_lora=True,
        adaln_lora_dim=config["adaln_lora_dim"],
        extra_per_block_abs_pos_emb=config["extra_pos_embed_type"] == "learnable",
        rope_enable_fps_modulation=bool(config.get(_FPS_KEY)),
        **{f"rope_{axis}_extrapolation_ratio": ratio for axis, ratio in zip("thw", config["rope_scale"])},
    )
    if config["use_crossattn_projection"]:
        net["crossattn_emb_channels"] = config["encoder_hidden_states_channels"]
        net["crossattn_proj_in_channels"] = config["crossattn_proj_in_channels"]
    return net


_DEFAULTS = {name: each.default for name, each in signature(DiT).parameters.items() if each.default is not each.empty}
_DIFFUSERS_DEFAULTS: dict[str, Any] = dict(
    in_channels=16,
    out_channels=16,
    num_attention_heads=32,
    attention_head_dim=128,
    num_layers=28,
    mlp_ratio=4.0,
    text_embed_dim=1024,
    adaln_lora_dim=256,
    max_size=(128, 240, 240),
    patch_size=(1, 2, 2),
    rope_scale=(2.0, 1.0, 1.0),
    concat_padding_mask=True,
    extra_pos_embed_type="learnable",
    use_crossattn_projection=False,
    crossattn_proj_in_channels=1024,
    encoder_hidden_states_channels=1024,
)
