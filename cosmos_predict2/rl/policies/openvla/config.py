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
        return cls(
            image_size=int(size),
            dinov2=towers[0],
            siglip=towers[1],
            text=text,
            vocabulary=int(text["vocab_size"]) - int(config.get("pad_to_multiple_of", 64)),
            bins=int(config.get("n_action_bins", 256)),
            stop_id=int(config.get("stop_token_id", text.get("eos_token_id", 2))),
            pad_id=int(text["pad_token_id"]),
        )


def _tower(config: Mapping[str, Any], name: str, timm: str, source: str) -> Tower:
    if name in config:
        return Tower(**config[name])
    backbone = config.get("vision_backbone_id", "")
    ids = config.get("timm_model_ids") or ([*TIMM] if backbone == "dinosiglip-vit-so-224px" else [])
    if timm not in ids:
        found = ", ".join(ids) or f"vision_backbone_id {backbone!r}"
        raise CheckpointError(f"{source}: of its vision towers ({found}) none is {timm}.{near(timm, ids)}")
    return Tower(**TIMM[timm])
