# SPDX-License-Identifier: Apache-2.0
"""The multi-view network of Cosmos-Predict2: several cameras of one scene, each with positions and a text of its own.

    net = MultiViewDiT(view_ids=(4, 5, 0, 1, 2), model_channels=2048, num_blocks=28, num_heads=16, ...)
    velocity = net(x, timesteps, text, condition_mask_B_1_T_H_W=mask)

Outside, views lie below each other as everywhere here (`data.views`): latents are [B, C, T, V * H, W], the text is
[B, V * S, E]. Inside they follow each other in time, the first view's frames before the second's, as released weights
saw them. So what is outside of it cuts each view: conditioning frames, and the parts of context parallelism.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from cosmos_predict2.nn.blocks import AttentionChoice, AttentionOp, Rope
from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.nn.layers import PatchEmbed, Start


class MultiViewDiT(Video2WorldDiT):
    """``view_ids``: the camera that each view is, by its row of ``n_cameras_emb`` learned ones; empty: all of them.

    The row is written into ``view_condition_dim`` channels behind the masks. Self-attention sees all views, and
    cross-attention of a view its own part of the text. Positions in time are seconds times 24 whatever a published
    configuration says: its embedder never received ``rope_enable_fps_modulation``. ``state_t`` is of these, too.
    """

    def __init__(
        self,
        *,
        view_ids: Sequence[int] = (),
        n_cameras_emb: int = 7,
        view_condition_dim: int = 7,
        concat_view_embedding: bool = True,
        state_t: int | None = None,
        rope_enable_fps_modulation: bool = True,
        **network: Any,
    ) -> None:
        super().__init__(rope_enable_fps_modulation=True, **network)
        self.view_ids = tuple(int(i) for i in view_ids) or tuple(range(n_cameras_emb))
        if unknown := [i for i in self.view_ids if not 0 <= i < n_cameras_emb]:
            raise ValueError(f"view_ids={list(self.view_ids)}: {unknown} are none of 0 ... {n_cameras_emb - 1}.")
        if not concat_view_embedding or self.patch_temporal != 1 or self.extra_pos_embedder is not None:
            raise ValueError(
                "A multi-view network has concat_view_embedding=True, patch_temporal=1 and no extra positions."
            )
        self.num_views = len(self.view_ids)
        channels = self.in_channels + 1 + self.concat_padding_mask + view_condition_dim
        self.x_embedder = PatchEmbed(channels, self.model_channels, self.patch_spatial, self.patch_temporal)
        self.view_embeddings = ViewEmbeddings(n_cameras_emb, view_condition_dim)
        # Released files hold the buffers of positions once for each number of cameras. All are alike, so that one
        # serves: by a name that is no module's, which the state dict must not have.
        positions = self.pos_embedder
        del self.pos_embedder
        names = [f"n_cameras_{number}" for number in range(1, n_cameras_emb + 1)]
        self.pos_embedder_options = nn.ModuleDict({name: copy.deepcopy(positions) for name in names})
        self.__dict__["pos_embedder"] = self.pos_embedder_options[names[0]]
        self.init_weights()

    @property
    def front(self) -> int:
        """The view of the front camera, which is 0; the first where there is none."""
        return self.view_ids.index(0) if 0 in self.view_ids else 0

    def choose_attention(
        self, name: str | None = None, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> AttentionChoice:
        choice = super().choose_attention(name, device, dtype)
        for block in self._blocks():
            block.cross_attn.attention = partial(_within_views, choice.op, self.num_views)
        return choice

    def be_causal(self) -> None:
        raise ValueError("A multi-view network has no causal form: choose one of a single view.")

    def forward(
        self, x_B_C_T_H_W: Tensor, timesteps_B_T: Tensor, crossattn_emb_B_S_E: Tensor | None, **inputs: Any
    ) -> Tensor:
        """As of any `DiT`; timesteps may also be (B, V * T), one per latent frame of each view."""
        if timesteps_B_T.shape[1:] == x_B_C_T_H_W.shape[2:3]:
            timesteps_B_T = timesteps_B_T.repeat(1, self.num_views)
        velocity = super().forward(x_B_C_T_H_W, timesteps_B_T, crossattn_emb_B_S_E, **inputs)
        stacked: Tensor = rearrange(velocity, "b c (v t) h w -> b c t (v h) w", v=self.num_views)
        return stacked

    def _with_masks(
        self,
        x_B_C_T_H_W: Tensor,
        condition_mask_B_1_T_H_W: Tensor | None,
        padding_mask_B_1_H_W: Tensor | None,
        is_image: bool,
    ) -> Tensor:
        """View after view along time, with the channels that name the view."""
        x = super()._with_masks(x_B_C_T_H_W, condition_mask_B_1_T_H_W, padding_mask_B_1_H_W, is_image)
        frames = x.shape[2]
        x = rearrange(x, "b c t (v h) w -> b c (v t) h w", v=self.num_views)
        rows = self.view_embeddings.weight  # by single rows: a list as an index would be copied to the GPU at each step
        of_views_D_V = torch.stack([rows[i] for i in self.view_ids], dim=1).to(x.dtype)
        of_frames_1_D_T_1_1 = of_views_D_V.repeat_interleave(frames, dim=1)[None, :, :, None, None]
        return torch.cat([x, of_frames_1_D_T_1_1.expand(x.shape[0], -1, -1, *x.shape[3:])], dim=1)

    def _positions(self, size: tuple[int, int, int], fps_B: Tensor | None) -> tuple[Rope, Tensor | None]:
        """The same for each view, from its first frame on."""
        (cos_L_K, sin_L_K), _ = super()._positions(size, fps_B)
        return (cos_L_K.repeat(self.num_views, 1), sin_L_K.repeat(self.num_views, 1)), None

    def _text(self, crossattn_emb_B_S_E: Tensor | None) -> Tensor | None:
        if crossattn_emb_B_S_E is not None and crossattn_emb_B_S_E.shape[1] % self.num_views:
            raise ValueError(
                f"The text has {crossattn_emb_B_S_E.shape[1]} tokens, which are not as many for each of"
                f" {self.num_views} views: give each view a text, or zeros."
            )
        return super()._text(crossattn_emb_B_S_E)

    def _check_inputs(self, x_B_C_T_H_W: Tensor, timesteps_B_T: Tensor) -> tuple[int, int, int]:
        frames = x_B_C_T_H_W.shape[2]
        is_of_each_view = timesteps_B_T.shape[1:] == (self.num_views * frames,)
        return super()._check_inputs(x_B_C_T_H_W, timesteps_B_T[:, :frames] if is_of_each_view else timesteps_B_T)

    def _size(self, latent_shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Tokens of each view."""
        t, height, w = latent_shape
        if height % self.num_views:
            raise ValueError(f"Latents that are {height} high do not hold {self.num_views} views of one height.")
        return super()._size((t, height // self.num_views, w))


class ViewEmbeddings(nn.Embedding):
    """A row of numbers for each camera."""

    def starts(self) -> dict[str, Start]:
        return {"weight": Start(std=1.0)}


def _within_views(op: AttentionOp, num_views: int, *qkv_B_L_N_K: Tensor) -> Tensor:
    """Attention within each of several views, whose tokens follow each other."""
    of_views = (x_B_L_N_K.unflatten(1, (num_views, -1)).flatten(0, 1) for x_B_L_N_K in qkv_B_L_N_K)
    out: Tensor = op(*of_views).unflatten(0, (-1, num_views)).flatten(1, 2)
    return out
