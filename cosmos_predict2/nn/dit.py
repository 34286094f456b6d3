# SPDX-License-Identifier: Apache-2.0
"""The diffusion transformer of Cosmos-Predict2: Text2Image, and Video2World with its condition-mask channel.

Plain single-device PyTorch with the state-dict names of the released files. Sharding, recomputation, compilation,
context parallelism and LoRA are applied from outside.

    net = Video2WorldDiT(model_channels=2048, num_blocks=28, num_heads=16, ...)
    velocity = net(x, timesteps, text, condition_mask_B_1_T_H_W=mask)
    prepared = net.prepare(text, latent_shape=x.shape[2:])            # once per sample, for many sampling steps
    velocity = net(x, timesteps, None, condition_mask_B_1_T_H_W=mask, prepared=prepared)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from cosmos_predict2.nn.blocks import (
    AttentionChoice,
    Block,
    CausalFrames,
    FinalLayer,
    FrameMemory,
    KeysValues,
    Rope,
    canonical_backend,
    choose_attention,
)
from cosmos_predict2.nn.layers import (
    HasBuffers,
    LearnedPositions,
    Linear,
    PatchEmbed,
    RMSNorm,
    RopePrecision,
    RotaryPositions,
    TimestepEmbedding,
    Timesteps,
    at_least_float32,
    starts,
)
from cosmos_predict2.nn.state_head import StateHead

TimestepPrecision = Literal["float32", "module"]
COUNTERS = {  # buffers that released files carry; training counts in them
    "accum_video_sample_counter": torch.int64,
    "accum_image_sample_counter": torch.int64,
    "accum_iteration": torch.int64,
    "accum_train_in_hours": None,
}


@dataclass(frozen=True)
class Prepared:
    """The values that all sampling steps of a sample share: positions, and keys and values of the text."""

    size: tuple[int, int, int]  # tokens along time, height, width
    rope: Rope
    extra_1_T_H_W_D: Tensor | None
    cross: tuple[KeysValues | None, ...]  # of each block; None: it has nothing to read


class DiT(nn.Module):
    """The Text2Image network; also the base of Video2World.

    ``timestep_precision`` and ``rope_precision``: "module" rounds times and angles to the dtype of the network, as the
    released weights were trained; "float32" keeps them out of bfloat16. Both agree in a float32 network.
    ``use_wan_fp32_strategy``: time embedding, modulation and final layer are float32 in half precision too, as the
    Predict2.5 weights were trained; modulations are rounded to the precision of the tokens that they act on.
    ``pos_emb_learnable``, ``pos_emb_interpolation``, ``min_fps``, ``max_fps`` and the ``extra_*_extrapolation_ratio``
    are of released configs and have no effect on rotary positions. ``sac_config`` is kept for what trains the network:
    its ``mode`` and ``every_n_blocks`` set what a backward pass recomputes. ``reads_text=False`` is for models whose
    texts are all zeros: cross-attention, which makes zeros of them, is skipped, and its weights are frozen.
    """

    has_condition_channel = False
    takes_actions = False  # see action_dit
    num_views = 1  # see multiview_dit
    extra_channels = 0  # that follow the noisy latents, and
    image_channels: int | None = None  # the width of features of a picture that cross-attention reads: see wan_dit
    begins_anew: tuple[str, ...] = ()  # patterns of parameters that the weights which training starts from may lack
    attention: AttentionChoice | None = None
    part = (0, 1)  # see see_part
    causal = False
    memory: FrameMemory | None = None  # of a causal network

    def __init__(
        self,
        *,
        max_img_h: int = 240,
        max_img_w: int = 240,
        max_frames: int = 128,
        in_channels: int = 16,
        out_channels: int = 16,
        patch_spatial: int = 2,
        patch_temporal: int = 1,
        concat_padding_mask: bool = True,
        model_channels: int,
        num_blocks: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        crossattn_emb_channels: int = 1024,
        crossattn_proj_in_channels: int | None = None,
        pos_emb_cls: str = "rope3d",
        pos_emb_learnable: bool = True,
        pos_emb_interpolation: str = "crop",
        min_fps: int = 1,
        max_fps: int = 30,
        use_adaln_lora: bool = True,
        adaln_lora_dim: int = 256,
        rope_h_extrapolation_ratio: float = 1.0,
        rope_w_extrapolation_ratio: float = 1.0,
        rope_t_extrapolation_ratio: float = 1.0,
        rope_enable_fps_modulation: bool = False,
        extra_per_block_abs_pos_emb: bool = False,
        extra_h_extrapolation_ratio: float = 1.0,
        extra_w_extrapolation_ratio: float = 1.0,
        extra_t_extrapolation_ratio: float = 1.0,
        atten_backend: str = "auto",
        rope_precision: RopePrecision = "float32",
        timestep_precision: TimestepPrecision = "module",
        use_wan_fp32_strategy: bool = False,
        sac_config: Mapping[str, Any] | None = None,
        reads_text: bool = True,
    ) -> None:
        super().__init__()
        sizes = dict(
            num_blocks=num_blocks,
            num_heads=num_heads,
            in_channels=in_channels,
            out_channels=out_channels,
            patch_spatial=patch_spatial,
            patch_temporal=patch_temporal,
            crossattn_emb_channels=crossattn_emb_channels,
            crossattn_proj_in_channels=crossattn_proj_in_channels or 1,
            adaln_lora_dim=adaln_lora_dim if use_adaln_lora else 1,
        )
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1.")
        check_heads(model_channels, num_heads)
        if not 1 <= model_channels * mlp_ratio < math.inf:
            raise ValueError(f"mlp_ratio={mlp_ratio} leaves the MLP of width {model_channels} empty.")
        if not reads_text and crossattn_proj_in_channels is not None:
            raise ValueError("reads_text=False needs crossattn_proj_in_channels=None: a projection changes zeros.")
        precisions = ("float32", "module")
        for name, value, allowed in [
            ("pos_emb_cls", pos_emb_cls, ("rope3d",)),
            ("rope_precision", rope_precision, precisions),
            ("timestep_precision", timestep_precision, precisions),
        ]:
            if value not in allowed:
                raise ValueError(f"{name}='{value}' is not built here: use {' or '.join(map(repr, allowed))}.")
        for name, size, patch in [
            ("max_img_h", max_img_h, patch_spatial),
            ("max_img_w", max_img_w, patch_spatial),
            ("max_frames", max_frames, patch_temporal),
        ]:
            if size < patch or size % patch:
                raise ValueError(f"{name}={size} is not a multiple of the patch size {patch}.")
        canonical_backend(atten_backend)
        self.in_channels = in_channels
        self.state_head: StateHead | None = None  # see action_dit
        self.out_channels = out_channels
        self.patch_spatial = patch_spatial
        self.patch_temporal = patch_temporal
        self.concat_padding_mask = concat_padding_mask
        self.model_channels = model_channels
        self.num_heads = num_heads
        self.head_dim = model_channels // num_heads
        self.text_channels = crossattn_proj_in_channels or crossattn_emb_channels
        self.atten_backend = atten_backend
        self.sac_config = dict(sac_config or {})
        self.reads_text = reads_text
        self.timestep_precision = timestep_precision
        self.use_wan_fp32_strategy = use_wan_fp32_strategy
        self.adaln_lora_dim = adaln_lora_dim if use_adaln_lora else None
        max_size = (max_frames // patch_temporal, max_img_h // patch_spatial, max_img_w // patch_spatial)
        self.max_size = max_size

        self.x_embedder = PatchEmbed(
            in_channels + self.has_condition_channel + concat_padding_mask,
            model_channels,
            patch_spatial,
            patch_temporal,
        )
        self.pos_embedder = RotaryPositions(
            self.head_dim,
            max_size=max_size,
            ratios=(rope_t_extrapolation_ratio, rope_h_extrapolation_ratio, rope_w_extrapolation_ratio),
            enable_fps_modulation=rope_enable_fps_modulation,
            precision=rope_precision,
        )
        self.extra_pos_embedder = LearnedPositions(model_channels, max_size) if extra_per_block_abs_pos_emb else None
        self.t_embedder = nn.Sequential(Timesteps(model_channels), TimestepEmbedding(model_channels, use_adaln_lora))
        self.t_embedding_norm = RMSNorm(model_channels)
        self.crossattn_proj = (
            nn.Sequential(Linear(self.text_channels, crossattn_emb_channels), nn.GELU())
            if self.text_channels != crossattn_emb_channels
            else None
        )
        self.blocks = nn.ModuleList(
            Block(model_channels, num_heads, crossattn_emb_channels, mlp_ratio, self.adaln_lora_dim)
            for _ in range(num_blocks)
        )
        if not reads_text:
            for block in self._blocks():
                block.cross_attn.requires_grad_(False)
                block.adaln_modulation_cross_attn.requires_grad_(False)
        self.final_layer = FinalLayer(
            model_channels, patch_spatial**2 * patch_temporal * out_channels, self.adaln_lora_dim
        )
        if use_wan_fp32_strategy:  # what makes and uses the modulation computes in float32, as the embedding of time
            for name, module in self.named_modules():
                is_of_time = name.startswith(("t_embedder.", "final_layer.")) or ".adaln_modulation_" in name
                if is_of_time and isinstance(module, (Linear, TimestepEmbedding)):
                    module.widens = True
        for name, dtype in COUNTERS.items():
            self.register_buffer(name, torch.zeros((), dtype=dtype))
        self.init_weights()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the network computes in."""
        return cast(nn.Linear, self.x_embedder.proj[1]).weight.dtype

    def get_block(self, i: int) -> Block:
        return cast(Block, self.blocks[i])

    @property
    def outer_modules(self) -> list[nn.Module]:
        """The modules beside the blocks that have parameters worth sharding."""
        found = [self.final_layer, self.extra_pos_embedder, self.t_embedder, self.crossattn_proj, self.state_head]
        return [module for module in found if module is not None]

    @property
    def last_layer(self) -> nn.Module:
        """The module behind the blocks."""
        return self.final_layer

    def _blocks(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))

    # ---- weights -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw fresh weights, by ``nn.start_weights``, in the order of the parameters.

        Writes the buffers too. Does nothing on the meta device.
        """
        if self.pos_embedder.seq.is_meta:
            return
        by_name = starts(self)
        for name, parameter in self.named_parameters():
            by_name[name].draw_(parameter, generator)
        self.reset_buffers()

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Write what is a function of the arguments: positions, and counters at zero. For use after ``to_empty``.

        A class with buffers of its own writes them here, too; a module in it has a method of this name.
        """
        for module in self.modules():
            if module is not self and isinstance(module, HasBuffers):
                module.reset_buffers()
        for counter in COUNTERS:
            self.get_buffer(counter).zero_()

    # ---- attention ---------------------------------------------------------------------------------------------------

    def choose_attention(
        self, name: str | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> AttentionChoice:
        """Take an operator for all blocks, by default for where the network lies; the first forward does it otherwise.

        ``name`` None: what the network was built with. Before context parallelism wraps the operators.
        """
        device = device or self.pos_embedder.seq.device
        choice = choose_attention(name or self.atten_backend, device, dtype or self.dtype, self.head_dim)
        for block in self._blocks():
            block.self_attn.attention = block.cross_attn.attention = choice.op
        self.attention = choice
        return choice

    # ---- parts of a clip ---------------------------------------------------------------------------------------------

    def see_part(self, index: int, count: int) -> None:
        """Take inputs as the ``index``-th of ``count`` equal parts of each clip along time, until the next call;
        positions and limits are those of the whole clip. (0, 1): all of it."""
        if not 0 <= index < count:
            raise ValueError(f"There is no part {index} of {count}: parts are counted from 0.")
        self.part = (index, count)

    def be_causal(self) -> None:
        """Let each latent frame attend to itself and to those before it. With a ``memory`` inputs are the frames behind
        those that it holds."""
        if self.patch_temporal != 1:
            raise ValueError(f"patch_temporal={self.patch_temporal}: a causal network has patches of one latent frame.")
        self.causal = True

    def whole(self, frames: int) -> int:
        """Frames of the whole clip so far, where the network is given so many."""
        return frames * self.part[1] if self.memory is None else self.memory.num_frames + frames

    def seen(self, whole: int) -> slice:
        """The frames that the network is given, of so many."""
        if self.memory is not None:
            return slice(self.memory.num_frames, whole)
        index, count = self.part
        return slice(index * whole // count, (index + 1) * whole // count)

    def _causal_frames(self, size: tuple[int, int, int]) -> Sequence[CausalFrames | None]:
        """For each block, the frames that frames attend to; None: all."""
        count, tokens = len(self.blocks), size[1] * size[2]
        if self.memory is None:
            return [CausalFrames(tokens) if self.causal else None] * count
        self.memory.blocks = self.memory.blocks or [CausalFrames(tokens, keeps=True) for _ in range(count)]
        return self.memory.blocks

    # ---- forward -----------------------------------------------------------------------------------------------------

    def prepare(
        self,
        crossattn_emb_B_S_E: Tensor,
        *,
        latent_shape: tuple[int, int, int],
        fps_B: Tensor | None = None,
        skip_no_text: bool = False,
        is_without_text: bool = False,
    ) -> Prepared:
        """The values that all sampling steps share, for ``forward(..., prepared=...)``.

        ``latent_shape`` is (T, H, W) in latents, of the part that the network sees. With ``skip_no_text`` a text of
        zeros is skipped where that changes nothing: values of zeros are zeros, unless a projection adds its bias.
        ``is_without_text`` states that it is one; else its values are read, which waits for a GPU.
        """
        if not is_without_text:
            self.require_readable(crossattn_emb_B_S_E)
        size = self._size(tuple(latent_shape))
        is_skipped = skip_no_text and self.crossattn_proj is None
        is_skipped = is_skipped and (is_without_text or not bool(crossattn_emb_B_S_E.any()))
        text_B_S_E = None if is_skipped else self._text(crossattn_emb_B_S_E)
        cross = [None if text_B_S_E is None else block.cross_attn.keys_values(text_B_S_E) for block in self._blocks()]
        return Prepared(size, *self._positions(size, fps_B), tuple(cross))

    def require_readable(self, crossattn_emb_B_S_E: Tensor) -> None:
        """Raise for a text that ``reads_text=False`` would not read.

        This waits for a GPU, so `forward` leaves it to its callers: once per batch, not at every pass.
        """
        if not self.reads_text and bool(crossattn_emb_B_S_E.any()):
            raise ValueError("reads_text=False: this network was built for texts of zeros, and this one is not.")

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
    ) -> Tensor:
        """The velocity (B, C, T, H, W), in the dtype of the network (float32 with ``use_wan_fp32_strategy``).

        Timesteps are flow times in [0, 1], (B,), (B, 1) or one per latent frame (B, T). The padding mask is in pixels,
        1 where padded, None for nowhere. Inputs are cast to the dtype of the network.
        """
        size = self._check_inputs(x_B_C_T_H_W, timesteps_B_T)
        if self.attention is None:
            self.choose_attention(device=x_B_C_T_H_W.device)
        x_B_T_H_W_D = self.x_embedder(
            self._with_masks(x_B_C_T_H_W.to(self.dtype), condition_mask_B_1_T_H_W, padding_mask_B_1_H_W, is_image)
        )
        emb_B_T_D, adaln_B_T_3D = self.t_embedder(self._timesteps(timesteps_B_T))
        x_B_T_H_W_D, emb_B_T_D, adaln_B_T_3D = self._with_actions(
            x_B_T_H_W_D, emb_B_T_D, adaln_B_T_3D, action_B_A_D, condition_mask_B_1_T_H_W
        )
        emb_B_T_D = self.t_embedding_norm(emb_B_T_D)
        contexts: list[Tensor | KeysValues | None]
        if prepared is None:
            rope, extra_1_T_H_W_D = self._positions(size, fps_B)
            contexts = [self._text(crossattn_emb_B_S_E)] * len(self.blocks)
        else:
            if prepared.size != size:
                raise ValueError(f"prepared holds {prepared.size} tokens along (T, H, W), x has {size}: prepare anew.")
            rope, extra_1_T_H_W_D = prepared.rope, prepared.extra_1_T_H_W_D
            contexts = list(prepared.cross)
        for block, context, causal in zip(self.blocks, contexts, self._causal_frames(size)):
            x_B_T_H_W_D = block(x_B_T_H_W_D, emb_B_T_D, adaln_B_T_3D, context, rope, extra_1_T_H_W_D, causal)
        if self.memory is not None:
            self.memory.num_frames += size[0]
        patches_B_T_H_W_M = self.final_layer(x_B_T_H_W_D, emb_B_T_D, adaln_B_T_3D)
        velocity_B_C_T_H_W: Tensor = rearrange(  # channels are fastest here, unlike in the patches that come in
            patches_B_T_H_W_M,
            "b t h w (m n r c) -> b c (t r) (h m) (w n)",
            m=self.patch_spatial,
            n=self.patch_spatial,
            r=self.patch_temporal,
        )
        return velocity_B_C_T_H_W

    def _with_actions(
        self,
        x_B_T_H_W_D: Tensor,
        emb_B_T_D: Tensor,
        adaln_B_T_3D: Tensor | None,
        action_B_A_D: Tensor | None,
        condition_mask_B_1_T_H_W: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens and time embedding as they are: this network has no actions."""
        if action_B_A_D is not None:
            raise ValueError("This network takes no actions: build one of cosmos_predict2.nn.action_dit.")
        return x_B_T_H_W_D, emb_B_T_D, adaln_B_T_3D

    def _with_masks(
        self,
        x_B_C_T_H_W: Tensor,
        condition_mask_B_1_T_H_W: Tensor | None,
        padding_mask_B_1_H_W: Tensor | None,
        is_image: bool,
    ) -> Tensor:
        """Latents, condition mask and padding mask along the channels, as far as the network has them."""
        batch, _, t, h, w = x_B_C_T_H_W.shape
        channels = [x_B_C_T_H_W]
        if self.has_condition_channel:
            if is_image:
                channels.append(x_B_C_T_H_W.new_zeros(batch, 1, t, h, w))
            elif condition_mask_B_1_T_H_W is None:
                raise ValueError("condition_mask_B_1_T_H_W is None: a video batch needs it (zeros: no frame is given).")
            else:
                channels.append(condition_mask_B_1_T_H_W.to(x_B_C_T_H_W.dtype).expand(batch, 1, t, h, w))
        if self.concat_padding_mask:
            if padding_mask_B_1_H_W is None:
                padding_mask_B_1_H_W = x_B_C_T_H_W.new_zeros(1, 1, h, w)
            resized_B_1_H_W = F.interpolate(padding_mask_B_1_H_W.to(x_B_C_T_H_W.dtype), size=(h, w), mode="nearest")
            channels.append(resized_B_1_H_W.unsqueeze(2).expand(batch, 1, t, h, w))
        return torch.cat(channels, dim=1)

    def _timesteps(self, timesteps_B_T: Tensor) -> Tensor:
        dtype = self.dtype
        if self.timestep_precision == "float32" or self.use_wan_fp32_strategy:
            dtype = torch.promote_types(dtype, torch.float32)
        timesteps_B_T = timesteps_B_T.to(dtype)
        return timesteps_B_T.unsqueeze(1) if timesteps_B_T.ndim == 1 else timesteps_B_T

    def _positions(self, size: tuple[int, int, int], fps_B: Tensor | None) -> tuple[Rope, Tensor | None]:
        """Rotary and learned positions of the part of the clip that the network sees."""
        t, h, w = size
        whole = self.whole(t)
        angles_L_K = self.pos_embedder((whole, h, w), fps_B)
        extra_1_T_H_W_D = None if self.extra_pos_embedder is None else self.extra_pos_embedder((whole, h, w))
        if whole > t:
            seen = self.seen(whole)
            angles_L_K = angles_L_K[seen.start * h * w : seen.stop * h * w]
            if extra_1_T_H_W_D is not None:
                extra_1_T_H_W_D = extra_1_T_H_W_D[:, seen]
        dtype = at_least_float32(self.dtype)  # of the tables; angles may be wider
        return (torch.cos(angles_L_K).to(dtype), torch.sin(angles_L_K).to(dtype)), extra_1_T_H_W_D

    def _text(self, crossattn_emb_B_S_E: Tensor | None) -> Tensor | None:
        """The text as the blocks attend to it; None where they attend to none."""
        if crossattn_emb_B_S_E is None:
            raise ValueError("crossattn_emb_B_S_E is None: give the text, or what prepare() made of it.")
        if crossattn_emb_B_S_E.shape[-1] != self.text_channels:
            raise ValueError(
                f"The text is {crossattn_emb_B_S_E.shape[-1]} wide, the network expects {self.text_channels}: use the "
                "text encoder that it was trained with."
            )
        if not self.reads_text:
            return None
        text_B_S_E = crossattn_emb_B_S_E.to(self.dtype)
        if self.crossattn_proj is not None:
            text_B_S_E = self.crossattn_proj(text_B_S_E)
        return text_B_S_E

    def _check_inputs(self, x_B_C_T_H_W: Tensor, timesteps_B_T: Tensor) -> tuple[int, int, int]:
        batch, channels, *latent_shape = x_B_C_T_H_W.shape
        if channels != self.in_channels:
            raise ValueError(f"x has {channels} channels, the network takes {self.in_channels}: check the tokenizer.")
        size = self._size(tuple(latent_shape))
        shape = tuple(timesteps_B_T.shape)
        allowed = [(batch,), (batch, 1)] + ([(batch, size[0])] if self.patch_temporal == 1 else [])
        if shape not in allowed:
            raise ValueError(f"timesteps have shape {shape}, expected {' or '.join(map(str, allowed))}.")
        return size

    def _size(self, latent_shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Tokens along (T, H, W), checked against what the network was built for."""
        patches = (self.patch_temporal, self.patch_spatial, self.patch_spatial)
        limits = dict(zip(("max_frames", "max_img_h", "max_img_w"), self.max_size))
        whole = (self.whole(latent_shape[0]), *latent_shape[1:])
        for (name, limit), length, of_clip, patch in zip(limits.items(), latent_shape, whole, patches):
            if length % patch:
                raise ValueError(f"The latent shape {latent_shape} (T, H, W) is not a multiple of the patch {patches}.")
            if of_clip > limit * patch:
                raise ValueError(f"The latent shape {whole} (T, H, W) is beyond {name}={limit * patch}.")
        t, h, w = (length // patch for length, patch in zip(latent_shape, patches))
        return t, h, w


class Video2WorldDiT(DiT):
    """The Video2World network: one more input channel, added inside, marks the conditioning frames."""

    has_condition_channel = True


def check_heads(model_channels: int, num_heads: int) -> None:
    """Raise for widths of heads that rotary positions of three axes do not fit."""
    if model_channels % num_heads:
        raise ValueError(f"model_channels={model_channels} is not a multiple of num_heads={num_heads}.")
    head_dim = model_channels // num_heads
    if head_dim % 2 or head_dim < 12:
        raise ValueError(f"num_heads={num_heads} makes heads {head_dim} wide: use an even width of at least 12.")
