# SPDX-License-Identifier: Apache-2.0
"""The two vision towers of OpenVLA, of transformers' modules, without what nothing reads: the last block, final norms
and the attention pooling of the public files."""

from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.rl.policies.openvla.config import OpenVLASizes, Tower
from cosmos_predict2.text.pretrained import transformers

_EPSILON = 1e-6


class DinoTower(nn.Module):
    """Patches of a picture before the last block, without class and register tokens."""

    def __init__(self, tower: Tower, image_size: int, attention: str) -> None:
        super().__init__()
        package = transformers()
        config = package.Dinov2WithRegistersConfig(
            hidden_size=tower.embed_dim,
            num_hidden_layers=tower.depth - 1,
            num_attention_heads=tower.num_heads,
            mlp_ratio=round(tower.mlp_ratio),
            image_size=image_size,
            patch_size=tower.patch,
            num_register_tokens=tower.reg_tokens,
            layer_norm_eps=_EPSILON,
            hidden_act="gelu",
            attn_implementation=attention,
        )
        model: Any = package.Dinov2WithRegistersModel(config)
        self.embeddings, self.encoder = model.embeddings, model.encoder
        self.embeddings.mask_token.requires_grad_(False)  # nothing is masked
        self.first = 1 + tower.reg_tokens

    def forward(self, pixels_B_C_H_W: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(self.embeddings(pixels_B_C_H_W)).last_hidden_state
        return hidden[:, self.first :]


class SiglipTower(nn.Module):
    """Patches of a picture before the last block."""

    def __init__(self, tower: Tower, image_size: int, attention: str) -> None:
        super().__init__()
        package = transformers()
        config = package.SiglipVisionConfig(
            hidden_size=tower.embed_dim,
            num_hidden_layers=tower.depth - 1,
            num_attention_heads=tower.num_heads,
            intermediate_size=tower.mlp_dim,
            image_size=image_size,
            patch_size=tower.patch,
            layer_norm_eps=_EPSILON,
            hidden_act="gelu",  # the published tower is exact, transformers' default is not
            vision_use_head=False,
            attn_implementation=attention,
        )
        model: Any = package.SiglipVisionModel(config)
        model = getattr(model, "vision_model", model)  # older releases have a level more
        self.embeddings, self.encoder = model.embeddings, model.encoder

    def forward(self, pixels_B_C_H_W: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(inputs_embeds=self.embeddings(pixels_B_C_H_W)).last_hidden_state
        return hidden


class VisionBackbone(nn.Module):
    """Both towers' features of every view, one view after the other."""

    def __init__(self, sizes: OpenVLASizes, attention: str) -> None:
        super().__init__()
        self.featurizer = DinoTower(sizes.dinov2, sizes.image_size, attention)
        self.fused_featurizer = SiglipTower(sizes.siglip, sizes.image_size, attention)
        self.width = sizes.dinov2.embed_dim + sizes.siglip.embed_dim

    def forward(self, pixels_B_6V_H_W: Tensor) -> Tensor:
        """[B, V * patches, width]."""
        views = pixels_B_6V_H_W.unflatten(1, (-1, 6))
        flat = views.flatten(0, 1)
        features = torch.cat([self.featurizer(flat[:, :3]), self.fused_featurizer(flat[:, 3:])], dim=-1)
        return features.unflatten(0, views.shape[:2]).flatten(1, 2)
