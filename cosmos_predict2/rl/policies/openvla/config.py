# SPDX-License-Identifier: Apache-2.0
"""Sizes of OpenVLA as its config.json records them: by names of timm's models, or a tiny twin's by numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from imaginaire.errors import CheckpointError, near

MODEL_TYPE = "openvla"
DINOV2, SIGLIP = "dinov2", "siglip"
TIMM: dict[str, dict[str, Any]] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": dict(embed_dim=1024, depth=24, num_heads=16, reg_tokens=4, patch=14),
    "vit_so400m_patch14_siglip_224": dict(embed_dim=1152, depth=27, num_heads=16, mlp_ratio=3.7362, patch=14),
}
TOWERS = tuple(zip((DINOV2, SIGLIP), TIMM))  # in the order of the channels


@dataclass(frozen=True)
class Tower:
    """A vision transformer; of its blocks the last is not used."""

    embed_dim: int
    depth: int
    num_heads: int
    patch: int
    mlp_ratio: float = 4.0
    reg_tokens: int = 0

    @property
    def mlp_dim(self) -> int:
        return int(self.embed_dim * self.mlp_ratio)


@dataclass(frozen=True)
class OpenVLASizes:
    """All that the modules are built from."""

    image_size: int
    dinov2: Tower
    siglip: Tower
    text: Mapping[str, Any]  # of transformers' LlamaConfig
    vocabulary: int  # ids that mean something; the rest is padding
    bins: int
    stop_id: int
    pad_id: int

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> "OpenVLASizes":
        text = {**config.get("text_config", {})}
        text.pop("model_type", None)
        text.pop("torch_dtype", None)
        text.setdefault("vocab_size", 32064)
        text.setdefault("pad_token_id", config.get("pad_token_id", 32000))
        towers = [_tower(config, name, timm, source) for name, timm in TOWERS]
        size = config["image_size"] if "image_size" in config else config.get("image_sizes", [224])[0]
        for name in _OF_TEXT & text.keys():
            whole(text[name], name, source)
        if text.get("hidden_size", 0) % text.get("num_attention_heads", 1):
            raise CheckpointError(
                f"{source}/config.json: hidden_size {text['hidden_size']} is no multiple of num_attention_heads"
                f" {text['num_attention_heads']}."
            )
        sizes = cls(
            image_size=whole(size, "image_size", source),
            dinov2=towers[0],
            siglip=towers[1],
            text=text,
            vocabulary=text["vocab_size"] - whole(config.get("pad_to_multiple_of", 64), "pad_to_multiple_of", source),
            bins=whole(config.get("n_action_bins", 256), "n_action_bins", source),
            stop_id=whole(config.get("stop_token_id", text.get("eos_token_id", 2)), "stop_token_id", source, least=0),
            pad_id=whole(text["pad_token_id"], "pad_token_id", source, least=0),
        )
        if sizes.bins > sizes.vocabulary:
            raise CheckpointError(f"{source}/config.json: {sizes.bins} action bins, but {sizes.vocabulary} words.")
        return sizes


_OF_TEXT = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings"),
}


def whole(value: Any, name: str, source: str, least: int = 1) -> int:
    """A whole number of a config.json."""
    if type(value) is not int or value < least:
        raise CheckpointError(f"{source}/config.json: {name} is {value!r}; a whole number above {least - 1} is needed.")
    return value


def _tower(config: Mapping[str, Any], name: str, timm: str, source: str) -> Tower:
    if name in config:
        try:
            tower = Tower(**config[name])
        except TypeError as error:
            raise CheckpointError(f"{source}/config.json: {name}: {error}.") from error
        for size in ("embed_dim", "depth", "num_heads", "patch"):
            whole(getattr(tower, size), f"{name}.{size}", source)
        if type(tower.mlp_ratio) not in (int, float) or not 0 < tower.mlp_ratio <= 64:
            raise CheckpointError(
                f"{source}/config.json: {name}.mlp_ratio is {tower.mlp_ratio!r}; expected is about 4."
            )
        whole(tower.reg_tokens, f"{name}.reg_tokens", source, least=0)
        return tower
    backbone = config.get("vision_backbone_id", "")
    ids = config.get("timm_model_ids") or ([*TIMM] if backbone == "dinosiglip-vit-so-224px" else [])
    if timm not in ids:
        found = ", ".join(ids) or f"vision_backbone_id {backbone!r}"
        raise CheckpointError(f"{source}: of its vision towers ({found}) none is {timm}.{near(timm, ids)}")
    return Tower(**TIMM[timm])
