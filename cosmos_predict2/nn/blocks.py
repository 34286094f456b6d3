# SPDX-License-Identifier: Apache-2.0
"""Transformer blocks: modulation by time, self-attention with rotary positions, cross-attention to text, MLP."""

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmos_predict2.nn.attention import AttentionOp, attend
from cosmos_predict2.nn.layers import EPS, Linear, RMSNorm, rotate

Rope: TypeAlias = tuple[Tensor, Tensor]  # cosine and sine, (L, K / 2) each
KeysValues: TypeAlias = tuple[Tensor, Tensor]  # (B, S, N, K) each


class Attention(nn.Module):
    """Multi-head attention with normalised queries and keys; to itself, or to a context of another width."""

    def __init__(self, width: int, num_heads: int, context_width: int | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = width // num_heads
        self.q_proj = Linear(width, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim)
        self.k_proj = Linear(context_width or width, width, bias=False)
        self.k_norm = RMSNorm(self.head_dim)
        self.v_proj = Linear(context_width or width, width, bias=False)
        self.output_proj = Linear(width, width, bias=False)
        self.attention: AttentionOp = attend  # context parallelism puts its exchange around this

    def keys_values(self, context_B_S_E: Tensor) -> KeysValues:
        """Keys (normalised) and values, (B, S, N, K) each."""
        k_B_S_N_K = self.k_norm(self._heads(self.k_proj(context_B_S_E)))
        return k_B_S_N_K, self._heads(self.v_proj(context_B_S_E))

    def forward(self, x_B_L_D: Tensor, context: Tensor | KeysValues | None = None, rope: Rope | None = None) -> Tensor:
        """(B, L, D). ``context`` is a text (B, S, E), or what ``keys_values`` gave for it; None: x itself."""
        q_B_L_N_K = self.q_norm(self._heads(self.q_proj(x_B_L_D)))
        if isinstance(context, tuple):
            k_B_S_N_K, v_B_S_N_K = context
        else:
            k_B_S_N_K, v_B_S_N_K = self.keys_values(x_B_L_D if context is None else context)
        if rope is not None:
            q_B_L_N_K, k_B_S_N_K = rotate(q_B_L_N_K, *rope), rotate(k_B_S_N_K, *rope)
        out: Tensor = self.output_proj(self.attention(q_B_L_N_K, k_B_S_N_K, v_B_S_N_K).flatten(2))
        return out

    def _heads(self, x_B_L_D: Tensor) -> Tensor:
        return x_B_L_D.view(*x_B_L_D.shape[:2], self.num_heads, self.head_dim)


class MLP(nn.Module):
    """Linear, GELU (exact), linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layer1 = Linear(width, hidden, bias=False)
        self.activation = nn.GELU()
        self.layer2 = Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer2(self.activation(self.layer1(x)))
        return out


def modulation(width: int, num_vectors: int, lora_dim: int | None) -> nn.Sequential:
    """SiLU and the linear map from a time embedding to shift, scale (and gate); of low rank when a rank is given."""
    if lora_dim is None:
        return nn.Sequential(nn.SiLU(), Linear(width, num_vectors * width, bias=False))
    return nn.Sequential(
        nn.SiLU(), Linear(width, lora_dim, bias=False), Linear(lora_dim, num_vectors * width, bias=False)
    )


def modulated_norm(x_B_T_H_W_D: Tensor, shift_B_T_1_1_D: Tensor, scale_B_T_1_1_D: Tensor) -> Tensor:
    """LN(x) * (1 + scale) + shift, with T rows of modulation or one."""
    normed = F.layer_norm(x_B_T_H_W_D, x_B_T_H_W_D.shape[-1:], eps=EPS)
    return multiply_add(shift_B_T_1_1_D, normed, 1 + scale_B_T_1_1_D)


def multiply_add(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """x + a * b. Half precision rounds the product too, as the networks did that released weights come from."""
    return x + a * b if x.dtype.itemsize < 4 else torch.addcmul(x, a, b)


class Block(nn.Module):
    """Self-attention, cross-attention and MLP, each modulated and gated by the time embedding."""

    def __init__(
        self, width: int, num_heads: int, context_width: int, mlp_ratio: float, adaln_lora_dim: int | None
    ) -> None:
        super().__init__()
        self.self_attn = Attention(width, num_heads)
        self.cross_attn = Attention(width, num_heads, context_width)
        self.mlp = MLP(width, int(width * mlp_ratio))
        self.adaln_modulation_self_attn = modulation(width, 3, adaln_lora_dim)
        self.adaln_modulation_cross_attn = modulation(width, 3, adaln_lora_dim)
        self.adaln_modulation_mlp = modulation(width, 3, adaln_lora_dim)

    def forward(
        self,
        x_B_T_H_W_D: Tensor,
        emb_B_T_D: Tensor,
        adaln_B_T_3D: Tensor | None,
        context: Tensor | KeysValues | None,
        rope: Rope,
        extra_1_T_H_W_D: Tensor | None = None,
    ) -> Tensor:
        """(B, T, H, W, D); ``emb`` and ``adaln`` hold one row per frame, or one for all. Context None: no text."""
        shape = x_B_T_H_W_D.shape
        x = x_B_T_H_W_D if extra_1_T_H_W_D is None else x_B_T_H_W_D + extra_1_T_H_W_D
        shift, scale, gate = _vectors(self.adaln_modulation_self_attn, emb_B_T_D, adaln_B_T_3D, x.dtype)
        y_B_L_D = self.self_attn(modulated_norm(x, shift, scale).flatten(1, 3), rope=rope)
        x = multiply_add(x, gate, y_B_L_D.view(shape))
        if context is not None:
            shift, scale, gate = _vectors(self.adaln_modulation_cross_attn, emb_B_T_D, adaln_B_T_3D, x.dtype)
            y_B_L_D = self.cross_attn(modulated_norm(x, shift, scale).flatten(1, 3), context)
            x = multiply_add(x, gate, y_B_L_D.view(shape))
        shift, scale, gate = _vectors(self.adaln_modulation_mlp, emb_B_T_D, adaln_B_T_3D, x.dtype)
        return multiply_add(x, gate, self.mlp(modulated_norm(x, shift, scale)))


def _vectors(
    layer: nn.Module, emb_B_T_D: Tensor, adaln_B_T_3D: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Shift, scale and gate, (B, T, 1, 1, D) each; computed as wide as the embedding is, and rounded once."""
    vectors_B_T_3D = layer(emb_B_T_D)
    if adaln_B_T_3D is not None:
        vectors_B_T_3D = vectors_B_T_3D + adaln_B_T_3D
    shift, scale, gate = vectors_B_T_3D.to(dtype)[:, :, None, None].chunk(3, dim=-1)
    return shift, scale, gate


class FinalLayer(nn.Module):
    """Modulated norm and linear map to the features of a patch."""

    def __init__(self, width: int, out_features: int, adaln_lora_dim: int | None) -> None:
        super().__init__()
        self.linear = Linear(width, out_features, bias=False)
        self.adaln_modulation = modulation(width, 2, adaln_lora_dim)

    def forward(self, x_B_T_H_W_D: Tensor, emb_B_T_D: Tensor, adaln_B_T_3D: Tensor | None) -> Tensor:
        """(B, T, H, W, out_features), as wide as the embedding is."""
        vectors_B_T_2D = self.adaln_modulation(emb_B_T_D)
        if adaln_B_T_3D is not None:
            vectors_B_T_2D = vectors_B_T_2D + adaln_B_T_3D[..., : vectors_B_T_2D.shape[-1]]
        shift, scale = vectors_B_T_2D[:, :, None, None].chunk(2, dim=-1)
        out: Tensor = self.linear(modulated_norm(x_B_T_H_W_D.to(emb_B_T_D.dtype), shift, scale))
        return out
