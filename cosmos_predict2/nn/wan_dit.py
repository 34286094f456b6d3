# SPDX-License-Identifier: Apache-2.0
"""The diffusion transformer of Wan2.1, text to video and image to video, with the state-dict names of its repository.

It differs from Cosmos-Predict2's `DiT` in this: one projection of the time modulates all blocks, to which each adds a
table of its own; cross-attention is neither modulated nor gated; queries and keys are normalised over the whole width;
rotary positions turn adjacent pairs; every linear map has a bias. Times are 0 ... 1000. Texts are padded with rows of
zeros, which are attended to. The network predicts the velocity noise - x_0.

Image to video: 20 channels follow the noisy latents (`cosmos_predict2.conditioner.image_channels`), and where the
network has ``image_channels``, its cross-attention reads features of the picture beside the text.

    net = WanDiT(model_channels=1536, num_blocks=30, num_heads=12, ffn_channels=8960)
    velocity = net(x, timesteps, text)
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from cosmos_predict2.nn.blocks import (
    AttentionOp,
    KeysValues,
    Rope,
    attend,
    canonical_backend,
    modulated_norm,
    multiply_add,
)
from cosmos_predict2.nn.dit import COUNTERS, DiT, Prepared, check_heads
from cosmos_predict2.nn.layers import (
    EPS,
    Linear,
    RMSNorm,
    RotaryPositions,
    Start,
    Timesteps,
    at_least_float32,
    rotate_pairs,
)

MAX_POSITIONS = 1024  # tokens along each axis


class WanDiT(DiT):
    """The network of every size. Its methods are those of `DiT`, whose parts it replaces."""

    def __init__(
        self,
        *,
        model_channels: int,
        num_blocks: int,
        num_heads: int,
        ffn_channels: int,
        in_channels: int = 16,
        out_channels: int = 16,
        crossattn_emb_channels: int = 4096,
        time_channels: int = 256,
        image_channels: int | None = None,
        atten_backend: str = "auto",
        sac_config: Mapping[str, Any] | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not DiT's, which would build its own parts
        check_heads(model_channels, num_heads)
        canonical_backend(atten_backend)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.extra_channels = in_channels - out_channels
        self.image_channels = image_channels
        self.patch_spatial, self.patch_temporal = 2, 1
        self.model_channels, self.num_heads, self.head_dim = model_channels, num_heads, model_channels // num_heads
        self.text_channels = crossattn_emb_channels
        self.atten_backend = atten_backend
        self.sac_config = dict(sac_config or {})
        self.reads_text, self.adaln_lora_dim = True, None
        self.crossattn_proj = self.extra_pos_embedder = self.state_head = None
        self.max_size = (MAX_POSITIONS, MAX_POSITIONS, MAX_POSITIONS)

        width = model_channels
        self.patch_embedding = PatchConv(in_channels, width, kernel_size=(1, 2, 2), stride=(1, 2, 2))
        self.pos_embedder = RotaryPositions(
            self.head_dim, max_size=self.max_size, ratios=(1.0, 1.0, 1.0), precision="float64"
        )
        self.text_embedding = nn.Sequential(
            Linear(crossattn_emb_channels, width), nn.GELU(approximate="tanh"), Linear(width, width)
        )
        self.timesteps = Timesteps(time_channels)
        self.time_embedding = nn.Sequential(Linear(time_channels, width), nn.SiLU(), Linear(width, width))
        self.time_projection = nn.Sequential(nn.SiLU(), Linear(width, 6 * width))
        self.img_emb = None if image_channels is None else ImageEmbedding(image_channels, width)
        self.blocks = nn.ModuleList(
            WanBlock(width, num_heads, ffn_channels, reads_images=image_channels is not None) for _ in range(num_blocks)
        )
        self.head = WanHead(width, 4 * out_channels)
        for part in (self.time_embedding, self.time_projection, self.head):  # float32 in half precision, too
            for module in part.modules():
                if isinstance(module, Linear):
                    module.widens = True
        for name, dtype in COUNTERS.items():
            self.register_buffer(name, torch.zeros((), dtype=dtype))
        self.init_weights()

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embedding.weight.dtype

    @property
    def outer_modules(self) -> list[nn.Module]:
        found = [self.head, self.text_embedding, self.time_embedding, self.time_projection, self.img_emb]
        return [module for module in found if module is not None]

    @property
    def last_layer(self) -> nn.Module:
        return self.head

    def be_causal(self) -> None:
        raise ValueError("A Wan2.1 network has no causal form here: distil one of Cosmos-Predict2.")

    def require_readable(self, crossattn_emb_B_S_E: Tensor) -> None:
        """It reads any text."""

    def prepare(
        self,
        crossattn_emb_B_S_E: Tensor,
        *,
        latent_shape: tuple[int, int, int],
        fps_B: Tensor | None = None,
        skip_no_text: bool = False,
        is_without_text: bool = False,
        image_B_S_E: Tensor | None = None,
    ) -> Prepared:
        """The values that all sampling steps share. A text of zeros is read as any other: its rows become biases."""
        size = self._size(tuple(latent_shape))
        text_B_S_D, image_B_S_D = self._text(crossattn_emb_B_S_E), self._image(image_B_S_E)
        blocks = cast("list[WanBlock]", list(self.blocks))
        cross = tuple(block.cross_attn.keys_values(text_B_S_D, image_B_S_D) for block in blocks)
        return Prepared(size, *self._positions(size, None), cross)

    def forward(
        self,
        x_B_C_T_H_W: Tensor,
        timesteps_B_T: Tensor,
        crossattn_emb_B_S_E: Tensor | None,
        *,
        condition_mask_B_1_T_H_W: Tensor | None = None,
        padding_mask_B_1_H_W: Tensor | None = None,
        fps_B: Tensor | None = None,
        is_image: bool = False,
        prepared: Prepared | None = None,
        action_B_A_D: Tensor | None = None,
        image_B_S_E: Tensor | None = None,
    ) -> Tensor:
        """The velocity (B, C, T, H, W), float32 or better. Masks and frame rates have no effect on this network.

        Timesteps are 0 ... 1000, (B,), (B, 1) or one per latent frame (B, T).
        """
        size = self._check_inputs(x_B_C_T_H_W, timesteps_B_T)
        if self.attention is None:
            self.choose_attention(device=x_B_C_T_H_W.device)
        x_B_T_H_W_D = self.patch_embedding(x_B_C_T_H_W.to(self.dtype))
        features_B_T_K = self.timesteps(timesteps_B_T.double().reshape(len(timesteps_B_T), -1))
        emb_B_T_D = self.time_embedding(features_B_T_K.to(at_least_float32(self.dtype)))
        vectors_B_T_6_D = self.time_projection(emb_B_T_D).unflatten(-1, (6, -1))
        if prepared is None:
            rope = self._positions(size, None)[0]
            text_B_S_D, image_B_S_D = self._text(crossattn_emb_B_S_E), self._image(image_B_S_E)
            contexts: list[Any] = [text_B_S_D] * len(self.blocks)
        else:
            if prepared.size != size:
                raise ValueError(f"prepared holds {prepared.size} tokens along (T, H, W), x has {size}: prepare anew.")
            rope, image_B_S_D, contexts = prepared.rope, None, list(prepared.cross)
        for block, context in zip(self.blocks, contexts):
            x_B_T_H_W_D = block(x_B_T_H_W_D, vectors_B_T_6_D, context, image_B_S_D, rope)
        patches_B_T_H_W_M = self.head(x_B_T_H_W_D, emb_B_T_D)
        velocity_B_C_T_H_W: Tensor = rearrange(patches_B_T_H_W_M, "b t h w (m n c) -> b c t (h m) (w n)", m=2, n=2)
        return velocity_B_C_T_H_W

    def _text(self, crossattn_emb_B_S_E: Tensor | None) -> Tensor:
        text_B_S_D: Tensor = self.text_embedding(super()._text(crossattn_emb_B_S_E))
        return text_B_S_D

    def _image(self, image_B_S_E: Tensor | None) -> Tensor | None:
        if self.img_emb is None:
            return None
        if image_B_S_E is None:
            raise ValueError(
                "image_B_S_E is None: this network reads features of the picture that a video begins with."
            )
        image_B_S_D: Tensor = self.img_emb(image_B_S_E.to(self.dtype))
        return image_B_S_D


class PatchConv(nn.Conv3d):
    """A convolution whose kernels do not overlap, as one product: latents to tokens (B, T, H', W', D)."""

    def starts(self) -> dict[str, Start]:
        return {"weight": Start(std=self.weight[0].numel() ** -0.5), "bias": Start()}

    def forward(self, x_B_C_T_H_W: Tensor) -> Tensor:
        patches = rearrange(x_B_C_T_H_W, "b c t (h m) (w n) -> b t h w (c m n)", m=2, n=2)
        return F.linear(patches, self.weight.flatten(1), self.bias)


class LayerNorm(nn.LayerNorm):
    """One with gain and bias, computed in float32 at least."""

    def starts(self) -> dict[str, Start]:
        return {"weight": Start(1.0), "bias": Start()}


class ImageEmbedding(nn.Module):
    """Features of a picture to rows that cross-attention reads."""

    def __init__(self, image_channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            LayerNorm(image_channels),
            Linear(image_channels, image_channels),
            nn.GELU(),
            Linear(image_channels, width),
            LayerNorm(width),
        )

    def forward(self, image_B_S_E: Tensor) -> Tensor:
        image_B_S_D: Tensor = self.proj(image_B_S_E)
        return image_B_S_D


class WanAttention(nn.Module):
    """Multi-head attention to itself, or to text and perhaps a picture; norms lie before the cut into heads."""

    def __init__(self, width: int, num_heads: int, *, reads_images: bool = False) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (Linear(width, width) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(width), RMSNorm(width)
        self.reads_images = reads_images
        if reads_images:
            self.k_img, self.v_img, self.norm_k_img = Linear(width, width), Linear(width, width), RMSNorm(width)
        self.attention: AttentionOp = attend  # context parallelism puts its exchange around this

    def keys_values(self, text_B_S_D: Tensor, image_B_S_D: Tensor | None = None) -> KeysValues:
        """Keys and values of the text, and behind them those of the picture, (B, S, N, K) each."""
        found = [self._heads(self.norm_k(self.k(text_B_S_D))), self._heads(self.v(text_B_S_D))]
        if self.reads_images:
            assert image_B_S_D is not None
            found += [self._heads(self.norm_k_img(self.k_img(image_B_S_D))), self._heads(self.v_img(image_B_S_D))]
        return tuple(found)

    def forward(self, x_B_L_D: Tensor, context: KeysValues | None = None, rope: Rope | None = None) -> Tensor:
        """(B, L, D). ``context`` is what ``keys_values`` gave; None: x itself."""
        q_B_L_N_K = self._heads(self.norm_q(self.q(x_B_L_D)))
        k_B_S_N_K, v_B_S_N_K, *of_image = self.keys_values(x_B_L_D) if context is None else context
        if rope is not None:
            q_B_L_N_K, k_B_S_N_K = rotate_pairs(q_B_L_N_K, *rope), rotate_pairs(k_B_S_N_K, *rope)
        out_B_L_N_K = self.attention(q_B_L_N_K, k_B_S_N_K, v_B_S_N_K)
        if of_image:
            out_B_L_N_K = out_B_L_N_K + self.attention(q_B_L_N_K, *of_image)
        out: Tensor = self.o(out_B_L_N_K.flatten(2))
        return out

    def _heads(self, x_B_L_D: Tensor) -> Tensor:
        return x_B_L_D.view(*x_B_L_D.shape[:2], self.num_heads, -1)


class WanBlock(nn.Module):
    """Self-attention and MLP, modulated and gated by the time; cross-attention between them, which is neither."""

    def __init__(self, width: int, num_heads: int, ffn_channels: int, *, reads_images: bool = False) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(1, 6, width))
        self.self_attn = WanAttention(width, num_heads)
        self.cross_attn = WanAttention(width, num_heads, reads_images=reads_images)
        self.norm3 = LayerNorm(width, eps=EPS)  # before cross-attention
        self.ffn = nn.Sequential(Linear(width, ffn_channels), nn.GELU(approximate="tanh"), Linear(ffn_channels, width))

    def starts(self) -> dict[str, Start]:
        return {"modulation": Start(std=self.modulation.shape[-1] ** -0.5)}

    def forward(
        self,
        x_B_T_H_W_D: Tensor,
        vectors_B_T_6_D: Tensor,
        context: Tensor | KeysValues,
        image_B_S_D: Tensor | None,
        rope: Rope,
    ) -> Tensor:
        """(B, T, H, W, D); the vectors have one row per frame, or one for all. ``context`` is the text, or what
        ``keys_values`` of the cross-attention made of it."""
        x, shape = x_B_T_H_W_D, x_B_T_H_W_D.shape
        if isinstance(context, Tensor):
            context = self.cross_attn.keys_values(context, image_B_S_D)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = _vectors(self.modulation, vectors_B_T_6_D, x.dtype)
        x = multiply_add(x, gate, self.self_attn(modulated_norm(x, shift, scale).flatten(1, 3), rope=rope).view(shape))
        x = x + self.cross_attn(self.norm3(x).flatten(1, 3), context).view(shape)
        return multiply_add(x, ffn_gate, self.ffn(modulated_norm(x, ffn_shift, ffn_scale)))


class LastLinear(Linear):
    """One that begins at zero, so that a network begins with a velocity of zero."""

    def starts(self) -> dict[str, Start]:
        return {"weight": Start(), "bias": Start()}


class WanHead(nn.Module):
    """Modulated norm and linear map to the features of a patch, channels fastest."""

    def __init__(self, width: int, out_features: int) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(1, 2, width))
        self.head = LastLinear(width, out_features)

    def starts(self) -> dict[str, Start]:
        return {"modulation": Start(std=self.modulation.shape[-1] ** -0.5)}

    def forward(self, x_B_T_H_W_D: Tensor, emb_B_T_D: Tensor) -> Tensor:
        shift, scale = _vectors(self.modulation, emb_B_T_D[:, :, None], emb_B_T_D.dtype)
        out: Tensor = self.head(modulated_norm(x_B_T_H_W_D.to(emb_B_T_D.dtype), shift, scale))
        return out


def _vectors(table_1_M_D: Tensor, vectors_B_T_M_D: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The vectors of a modulation, (B, T, 1, 1, D) each: added as wide as the time is, and rounded once."""
    summed_B_T_M_D = (table_1_M_D.to(vectors_B_T_M_D.dtype) + vectors_B_T_M_D).to(dtype)
    return tuple(vector_B_T_D[:, :, None, None] for vector_B_T_D in summed_B_T_M_D.unbind(2))
