# SPDX-License-Identifier: Apache-2.0
"""Operations of a network's forward pass, as formulas of its sizes."""

from dataclasses import dataclass
from typing import cast

from torch import nn

from cosmos_predict2.nn.action_dit import ActionDiT, ChunkActionDiT
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.nn.wan_dit import WanBlock, WanDiT

IMAGE_TOKENS = 257  # of the picture, by CLIP, beside the text of Wan2.1's image to video


@dataclass(frozen=True)
class ForwardFlops:
    """Floating-point operations of one forward pass, two per multiply-add, by the part of the network."""

    self_attention: int  # the two products of queries, keys and values
    cross_attention: int  # likewise
    linear: int  # projections and MLPs of all tokens
    other: int  # text keys and values, modulation, embedding of patches, time and actions, final layer

    @property
    def total(self) -> int:
        return self.self_attention + self.cross_attention + self.linear + self.other


def forward_flops(
    net: DiT,
    latent_shape: tuple[int, int, int],
    *,
    text_tokens: int,
    timestep_rows: int = 1,
    batch_size: int = 1,
    is_prepared: bool = False,
) -> ForwardFlops:
    """Operations for latents of (T, H, W); ``timestep_rows`` is T where each frame has its own time, else 1.

    ``is_prepared``: without what ``net.prepare`` does once per sample. A training step takes about three times this.
    """
    s = Letters(net)
    t, h, w = latent_shape
    tokens = t * h * w // (net.patch_temporal * net.patch_spatial**2)
    text_tokens = text_tokens if net.reads_text else 0
    text = 4 * text_tokens * s.e * s.d * s.blocks + 2 * text_tokens * s.text_embedding
    text += s.image_tokens * (4 * s.d**2 * s.blocks + 2 * s.image_embedding)
    parts = 3 if net.reads_text else 2  # of a block: self-attention, maybe cross-attention, MLP
    rows = t if isinstance(net, ChunkActionDiT) else timestep_rows  # actions make a frame's modulation its own
    time = 2 * timestep_rows * (4 if s.rank else 2) * s.d**2
    time += 2 * rows * (s.modulation(2) + s.blocks * parts * s.modulation(3))
    if isinstance(net, WanDiT):
        time = 2 * timestep_rows * s.time_embedding
    if isinstance(net, ActionDiT):
        time += 2 * net.action_rows(t) * sum(hidden * (read + given) for read, hidden, given in s.action_mlps)
    patches = 2 * tokens * (s.features_in + s.features_out) * s.d
    return ForwardFlops(
        self_attention=batch_size * s.blocks * 4 * tokens**2 * s.d,
        cross_attention=batch_size * s.blocks * 4 * tokens * (text_tokens + s.image_tokens) * s.d // net.num_views,
        linear=batch_size * s.blocks * tokens * (4 * parts * s.d**2 + 4 * s.hidden * s.d),
        other=batch_size * (time + patches + (0 if is_prepared else text)),
    )


class Letters:
    """The letters of the formulas, read off a network (one on the meta device will do)."""

    def __init__(self, net: DiT) -> None:
        self.d = net.model_channels
        self.blocks = len(net.blocks)
        self.rank = net.adaln_lora_dim or 0
        self.features_out = net.out_channels * net.patch_spatial**2 * net.patch_temporal
        self.image_tokens = self.image_embedding = self.text_embedding = self.time_embedding = 0  # parameters of maps
        if isinstance(net, WanDiT):
            self.e = self.d
            self.hidden = cast(nn.Linear, cast(WanBlock, net.blocks[0]).ffn[0]).out_features
            self.features_in = net.patch_embedding.weight[0].numel()
            self.text_embedding = (net.text_channels + self.d) * self.d
            self.time_embedding = (2 * net.timesteps.num_frequencies + 7 * self.d) * self.d  # one for all blocks
            if net.image_channels is not None:
                self.image_tokens = IMAGE_TOKENS
                self.image_embedding = net.image_channels * (net.image_channels + self.d)
        else:
            block = net.get_block(0)
            self.e = block.cross_attn.k_proj.in_features
            self.hidden = block.mlp.layer1.out_features
            self.features_in = cast(nn.Linear, net.x_embedder.proj[1]).in_features
            if net.crossattn_proj is not None:
                self.text_embedding = net.text_channels * self.e
        mlps = net.action_mlps() if isinstance(net, ActionDiT) else []
        self.action_mlps = [(mlp.fc1.in_features, mlp.fc1.out_features, mlp.fc2.out_features) for mlp in mlps]

    def modulation(self, num_vectors: int) -> int:
        """Parameters of one modulation."""
        return self.d * num_vectors * self.d if not self.rank else self.rank * (1 + num_vectors) * self.d
