# SPDX-License-Identifier: Apache-2.0
"""PI0.5's network: a picture-and-language model whose keys and values an action expert attends to.

    cache = network.prefix(images_B_V_3_H_W, image_mask_B_V, tokens_B_L, token_mask_B_L)
    v_B_H_D, hidden_B_H_W = network.velocity(cache, x_B_H_D, t_B)

The prefix never sees the actions, so its keys and values are computed once for all steps of a decision. Modules are
named as in the public files. Letters: V pictures, L words, P places of the prefix, W width.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.rl.policies.pi05.config import GemmaSizes, Pi05Config
from cosmos_predict2.text import pretrained

_NOT_SEEN = -2.3819763e38  # as published; with -inf a row that sees nothing would be NaN
_EPS = 1e-6
_PERIODS = (4e-3, 4.0)
_NOISE_WIDTHS = (128, 64)


@dataclass(frozen=True)
class PrefixCache:
    """Keys and values of each layer, and which places hold something."""

    keys_values: list[tuple[Tensor, Tensor]]
    is_there_B_P: Tensor


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return (_normalised(x) * (1 + self.weight.float())).to(x), None


class AdaRMSNorm(nn.Module):
    """A norm whose scale and shift, and the gate of the branch that it begins, follow from the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, dim=-1)
        return (_normalised(x) * (1 + scale.float()) + shift.float()).to(x), gate.to(x)


def _normalised(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + _EPS)


class Attention(nn.Module):
    """The projections of one stream; its keys stand beside those that it is given."""

    def __init__(self, sizes: GemmaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        inner, of_keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, inner, bias=False)
        self.k_proj = nn.Linear(sizes.width, of_keys, bias=False)
        self.v_proj = nn.Linear(sizes.width, of_keys, bias=False)
        self.o_proj = nn.Linear(inner, sizes.width, bias=False)

    def keys_values(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return _turned(self._heads(self.k_proj(x)), turn), self._heads(self.v_proj(x))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """``bias`` [B, 1, 1, P] of every key. Heads that share a key are rows of one product."""
        sizes, batch, length = self.sizes, len(x), x.shape[1]
        q = _turned(self._heads(self.q_proj(x)), turn).reshape(batch, sizes.num_kv_heads, -1, sizes.head_dim)
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(sizes.head_dim) + bias
        read = torch.softmax(scores, dim=-1).to(v) @ v
        return self.o_proj(read.reshape(batch, sizes.num_heads, length, -1).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2)


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions, by transformers' own rotation."""
    from transformers.models.gemma.modeling_gemma import rotate_half

    cos, sin = (each[:, None] for each in turn)
    return x * cos + rotate_half(x) * sin


class Layer(nn.Module):
    def __init__(self, sizes: GemmaSizes, norm: type[RMSNorm] | type[AdaRMSNorm]) -> None:
        super().__init__()
        from transformers.models.gemma.modeling_gemma import GemmaMLP

        self.self_attn = Attention(sizes)
        self.mlp = GemmaMLP(gemma_config(sizes))
        self.input_layernorm = norm(sizes.width)
        self.post_attention_layernorm = norm(sizes.width)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor],
        bias: Tensor,
        condition: Tensor | None = None,
        before: tuple[Tensor, Tensor] | None = None,
        *,
        is_last_of_prefix: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The output, and this stream's keys and values; what the prefix's last layer gives is read by nobody."""
        normed, gate = self.input_layernorm(x, condition)
        own = self.self_attn.keys_values(normed, turn)
        if is_last_of_prefix:
            return x, own
        k, v = own if before is None else (torch.cat([a, b], dim=2) for a, b in zip(before, own))
        x = _added(x, self.self_attn(normed, turn, k, v, bias), gate)
        normed, gate = self.post_attention_layernorm(x, condition)
        return _added(x, self.mlp(normed), gate), own


def _added(x: Tensor, branch: Tensor, gate: Tensor | None) -> Tensor:
    return x + (branch if gate is None else gate * branch)


class Gemma(nn.Module):
    """The layers of a stream, by the names of transformers' GemmaModel."""

    def __init__(self, sizes: GemmaSizes, norm: type[RMSNorm] | type[AdaRMSNorm]) -> None:
        super().__init__()
        from transformers.models.gemma.modeling_gemma import GemmaRotaryEmbedding

        if sizes.vocab:
            self.embed_tokens = nn.Embedding(sizes.vocab, sizes.width)
            nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(sizes, norm) for _ in range(sizes.depth))
        self.norm = norm(sizes.width)
        self.rotary_emb = GemmaRotaryEmbedding(gemma_config(sizes))


def gemma_config(sizes: GemmaSizes):  # type: ignore[no-untyped-def]
    """For transformers' parts."""
    from transformers import GemmaConfig

    return GemmaConfig(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.depth,
        intermediate_size=sizes.mlp_dim,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=max(1, sizes.vocab),
        hidden_activation="gelu_pytorch_tanh",
        hidden_act="gelu_pytorch_tanh",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


class NoiseHead(nn.Module):
    """Deviation of each number of an action from its mean (flow_noise), within two standard deviations."""

    logvar_min: Tensor
    logvar_max: Tensor

    def __init__(self, width: int, action_dim: int, low: float, high: float, widths: tuple[int, ...] = _NOISE_WIDTHS):
        super().__init__()
        sizes = [width, *widths, action_dim]
        steps = [nn.ModuleDict({"linear_1": nn.Linear(a, b)}) for a, b in itertools.pairwise(sizes)]
        self.mlp_logvar = nn.ModuleDict({"moduleList": nn.ModuleList(steps)})
        self.register_buffer("logvar_min", torch.tensor([2 * math.log(low)]))
        self.register_buffer("logvar_max", torch.tensor([2 * math.log(high)]))

    def forward(self, hidden_B_H_W: Tensor) -> Tensor:
        """Standard deviations [B, H, D]."""
        x = hidden_B_H_W.to(self.mlp_logvar["moduleList"][0]["linear_1"].weight)  # type: ignore[index]
        steps = list(self.mlp_logvar["moduleList"].children())
        for i, step in enumerate(steps):
            x = step["linear_1"](x)  # type: ignore[index]
            x = torch.tanh(x) if i + 1 < len(steps) else x
        low, high = self.logvar_min.float(), self.logvar_max.float()
        return torch.exp(0.5 * (low + (high - low) * (torch.tanh(x.float()) + 1) / 2))


def time_embedding(t_B: Tensor, width: int) -> Tensor:
    """Sines and cosines of the time in float64, [B, width]."""
    fraction = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=t_B.device)
    low, high = _PERIODS
    angle = 2 * math.pi * t_B.double()[:, None] / (low * (high / low) ** fraction)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


class Pi05Network(nn.Module):
    PASSES = ("prefix", "velocity")  # called from outside
    FLOAT32 = (  # what stays in float32 where the rest is bfloat16, by parts of names
        *("embeddings.patch_embedding", "embeddings.position_embedding"),
        *("input_layernorm", "post_attention_layernorm", "language_model.norm", "gemma_expert.model.norm"),
        *("action_in_proj", "action_out_proj", "time_mlp", "noise_head"),
    )

    def __init__(self, config: Pi05Config) -> None:
        super().__init__()
        pretrained.transformers()  # or an error with the cure
        self.config = config
        expert, dim = config.expert.width, config.action_dim
        paligemma = nn.ModuleDict(
            {
                "vision_tower": _vision_tower(config),
                "multi_modal_projector": nn.ModuleDict(
                    {"linear": nn.Linear(config.vision.hidden, config.vision.projection_dim)}
                ),
                "language_model": Gemma(config.vlm, RMSNorm),
            }
        )
        self.paligemma_with_expert = nn.ModuleDict(
            {
                "paligemma": nn.ModuleDict({"model": paligemma}),
                "gemma_expert": nn.ModuleDict({"model": Gemma(config.expert, AdaRMSNorm)}),
            }
        )
        self.action_in_proj, self.action_out_proj = nn.Linear(dim, expert), nn.Linear(expert, dim)
        self.time_mlp_in, self.time_mlp_out = nn.Linear(expert, expert), nn.Linear(expert, expert)
        if config.noise_method == "flow_noise":
            low, high = config.noise_logvar_range
            self.noise_head = NoiseHead(expert, dim, low, high)

    @property
    def paligemma(self) -> nn.ModuleDict:
        return self.paligemma_with_expert["paligemma"]["model"]  # type: ignore[index, return-value]

    @property
    def expert(self) -> Gemma:
        return self.paligemma_with_expert["gemma_expert"]["model"]  # type: ignore[index, return-value]

    def blocks(self) -> list[nn.Module]:
        """The blocks of all three transformers, and the noise head, which is called from outside, too."""
        tower: Any = self.paligemma["vision_tower"]
        tower = getattr(tower, "vision_model", tower)  # older releases have a level more
        language: Any = self.paligemma["language_model"]
        heads = [self.noise_head] if self.config.noise_method == "flow_noise" else []
        return [*tower.encoder.layers, *language.layers, *self.expert.layers, *heads]

    def embed(
        self, images_B_V_3_H_W: Tensor, image_mask_B_V: Tensor, tokens_B_L: Tensor, token_mask_B_L: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The prefix [B, P, W] and which of it is there. Words are scaled by the width's root, pictures are not."""
        parts = self.paligemma
        language: Gemma = parts["language_model"]  # type: ignore[assignment]
        batch, views = images_B_V_3_H_W.shape[:2]
        projector: nn.Linear = parts["multi_modal_projector"]["linear"]  # type: ignore[index]
        tower: Any = parts["vision_tower"]
        tower = getattr(tower, "vision_model", tower)  # older releases have a level more
        pictures = tower.embeddings(images_B_V_3_H_W.flatten(0, 1)).to(projector.weight.dtype)
        patches = tower.post_layernorm(tower.encoder(inputs_embeds=pictures).last_hidden_state)
        seen = projector(patches).unflatten(0, (batch, views))
        words = language.embed_tokens(tokens_B_L) * math.sqrt(self.config.vlm.width)
        is_seen = image_mask_B_V.bool()[:, :, None].expand(*seen.shape[:3]).flatten(1)
        return torch.cat([seen.flatten(1, 2), words], dim=1), torch.cat([is_seen, token_mask_B_L.bool()], dim=1)

    def prefix(self, *inputs: Tensor) -> PrefixCache:
        """Keys and values of the inputs of `embed`; without gradients where the expert alone is trained."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.config.train_expert_only):
            x, is_there = self.embed(*inputs)
            language: Gemma = self.paligemma["language_model"]  # type: ignore[assignment]
            turn = language.rotary_emb(x, is_there.long().cumsum(dim=1) - 1)
            bias, cache = _bias(is_there), []
            for i, layer in enumerate(language.layers):
                x, own = layer(x, turn, bias, is_last_of_prefix=i + 1 == len(language.layers))
                cache.append(own)
            return PrefixCache(cache, is_there)

    def velocity(self, cache: PrefixCache, x_B_H_D: Tensor, t_B: Tensor) -> tuple[Tensor, Tensor]:
        """dx/dt [B, H, D] in float32, and what it is read from, [B, H, W]."""
        outside, inside = self.action_in_proj.weight.dtype, cache.keys_values[0][0].dtype
        x = self.action_in_proj(x_B_H_D.to(outside)).to(inside)
        embedded = time_embedding(t_B, self.config.expert.width).to(outside)
        condition = nn.functional.silu(self.time_mlp_out(nn.functional.silu(self.time_mlp_in(embedded))))
        there = cache.is_there_B_P
        places = there.sum(dim=1, keepdim=True) + torch.arange(x.shape[1], device=x.device)
        turn = self.expert.rotary_emb(x, places)
        bias = _bias(torch.cat([there, there.new_ones(x.shape[:2])], dim=1))
        for layer, before in zip(self.expert.layers, cache.keys_values, strict=True):
            x, _ = layer(x, turn, bias, condition, before)
        hidden, _ = self.expert.norm(x, condition)
        return self.action_out_proj(hidden.to(outside)).float(), hidden


def _bias(is_there_B_P: Tensor) -> Tensor:
    return torch.where(is_there_B_P, 0.0, _NOT_SEEN)[:, None, None]


def _vision_tower(config: Pi05Config) -> nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    sizes = config.vision
    return SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            intermediate_size=sizes.intermediate,
            image_size=sizes.image,
            patch_size=sizes.patch,
            hidden_act=sizes.act,
            vision_use_head=False,
        )
    )
