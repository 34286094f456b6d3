# SPDX-License-Identifier: Apache-2.0
"""Action-conditioned Video2World networks: actions enter through small MLPs beside the embedding of time.

    net = FlatActionDiT(action_dim=7, num_action_per_chunk=12, model_channels=2048, ...)    # every frame sees all
    net = ChunkActionDiT(action_dim=7, temporal_compression_ratio=4, model_channels=2048, ...)  # each frame its own
    velocity = net(x, timesteps, text, condition_mask_B_1_T_H_W=mask, action_B_A_D=actions)

Actions [B, A, d] are those between the pixel frames of the whole clip. They act through the adaptive norms; with
``action_on_tokens`` a number is also added to each token of their frame. A network that begins to learn them gives what
its base gives: the last layers start at zero.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_predict2.nn.dit import Video2WorldDiT
from cosmos_predict2.nn.layers import Linear
from cosmos_predict2.nn.state_head import StateHead


class ActionMLP(nn.Module):
    """Linear, GELU (tanh), linear."""

    def __init__(self, width_in: int, hidden: int, width_out: int) -> None:
        super().__init__()
        self.fc1 = Linear(width_in, hidden)
        self.activation = nn.GELU(approximate="tanh")
        self.fc2 = Linear(hidden, width_out)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.activation(self.fc1(x)))
        return out


class ActionDiT(Video2WorldDiT, ABC):
    """The common part of both kinds, which differ in how actions reach the frames.

    The numbers ``summed_action_dims`` of an action are replaced by ``summed_action_scale`` times their sum since the
    first frame: of small motions this makes places. With a ``state_range`` of the robot's state there is a head that
    predicts it (`state_head`).
    """

    takes_actions = True
    begins_anew = ("state_head.*",)

    def __init__(
        self,
        action_inputs: int,
        action_size: int | None,
        *,
        hidden_dim_in_action_embedder: int | None = None,
        action_on_tokens: bool = False,
        summed_action_dims: Sequence[int] = (),
        summed_action_scale: float = 1.0,
        state_range: Sequence[Sequence[float]] = (),
        **network: Any,
    ) -> None:
        """The MLPs read ``action_inputs`` numbers at once; an action has ``action_size`` (None: unknown)."""
        super().__init__(**network)
        if action_inputs < 1:
            raise ValueError(f"The MLPs for actions would read {action_inputs} numbers: one at least.")
        if self.adaln_lora_dim is None:
            raise ValueError("use_adaln_lora=False: actions act through the low-rank term of the modulation, too.")
        self.action_inputs = action_inputs
        self.summed_action_dims = [int(dim) for dim in summed_action_dims]
        self.summed_action_scale = float(summed_action_scale)
        if hidden_dim_in_action_embedder is not None and hidden_dim_in_action_embedder < 1:
            raise ValueError(f"hidden_dim_in_action_embedder={hidden_dim_in_action_embedder} must be at least 1.")
        width = self.model_channels
        hidden = hidden_dim_in_action_embedder or 4 * width
        self.action_embedder_B_D = ActionMLP(action_inputs, hidden, width)
        self.action_embedder_B_3D = ActionMLP(action_inputs, hidden, 3 * width)
        self.action_embedder_tokens = ActionMLP(action_inputs, hidden, width) if action_on_tokens else None
        if state_range:
            if action_size is None:
                raise ValueError("state_range needs the size of one action: set num_action_per_chunk, too.")
            self.state_head = StateHead(action_size, self.in_channels, state_range)
        self.init_weights()

    @property
    def outer_modules(self) -> list[nn.Module]:
        return [*super().outer_modules, *self.action_mlps()]

    def _with_actions(
        self,
        x_B_T_H_W_D: Tensor,
        emb_B_T_D: Tensor,
        adaln_B_T_3D: Tensor | None,
        action_B_A_D: Tensor | None,
        condition_mask_B_1_T_H_W: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens, time embedding and low-rank term with the actions added."""
        frames = x_B_T_H_W_D.shape[1]
        if action_B_A_D is None:
            if self.whole(frames) == 1:  # a picture: nothing has been done yet
                return x_B_T_H_W_D, emb_B_T_D, adaln_B_T_3D
            raise ValueError("action_B_A_D is None: this network needs the actions between the frames.")
        rows_B_R_I = self._rows(self._summed(action_B_A_D).to(self.dtype), self.whole(frames))
        rest_B_T_1 = None
        if condition_mask_B_1_T_H_W is not None:
            rest_B_T_1 = 1 - condition_mask_B_1_T_H_W[:, 0, :, 0, 0, None].to(self.dtype)
        assert adaln_B_T_3D is not None
        emb_B_T_D = emb_B_T_D + self._by_frame(self.action_embedder_B_D(rows_B_R_I), rest_B_T_1)
        adaln_B_T_3D = adaln_B_T_3D + self._by_frame(self.action_embedder_B_3D(rows_B_R_I), rest_B_T_1)
        if self.action_embedder_tokens is not None:
            added_B_T_D = self._by_frame(self.action_embedder_tokens(rows_B_R_I), rest_B_T_1)
            x_B_T_H_W_D = x_B_T_H_W_D + added_B_T_D[:, :, None, None]
        return x_B_T_H_W_D, emb_B_T_D, adaln_B_T_3D

    def _summed(self, action_B_A_D: Tensor) -> Tensor:
        if not self.summed_action_dims:
            return action_B_A_D
        size = action_B_A_D.shape[-1]
        if max(self.summed_action_dims) >= size or min(self.summed_action_dims) < 0:
            raise ValueError(f"summed_action_dims={self.summed_action_dims}, but an action has {size} numbers.")
        # Column by column: a list as an index would be copied to the GPU at every step, which no captured graph may do.
        summed = [
            column.cumsum(dim=1) * self.summed_action_scale if dim in self.summed_action_dims else column
            for dim, column in enumerate(action_B_A_D.unbind(dim=-1))
        ]
        return torch.stack(summed, dim=-1)

    def action_mlps(self) -> list[ActionMLP]:
        found = [self.action_embedder_B_D, self.action_embedder_B_3D, self.action_embedder_tokens]
        return [mlp for mlp in found if mlp is not None]

    @abstractmethod
    def action_rows(self, frames: int) -> int:
        """The number of vectors that the MLPs read, for a clip of so many latent frames."""

    @abstractmethod
    def _rows(self, action_B_A_D: Tensor, frames: int) -> Tensor:
        """The inputs of the MLPs, (B, R, action_inputs), for a clip of so many latent frames."""

    @abstractmethod
    def _by_frame(self, rows_B_R_D: Tensor, rest_B_T_1: Tensor | None) -> Tensor:
        """The outputs of the MLPs as (B, T, D) or (B, 1, D), for the frames that the network sees."""


class FlatActionDiT(ActionDiT):
    """All actions of the clip in one vector, [a_0, a_1, ...], which every latent frame sees, a given one too.

    ``action_dim`` is the size of one action, of which there are ``num_action_per_chunk``; without that number, the size
    of all of them together. The ratio is of the other kind, and not looked at: a config may be merged over another.
    """

    def __init__(
        self,
        *,
        action_dim: int,
        num_action_per_chunk: int | None = None,
        temporal_compression_ratio: int | None = None,
        **network: Any,
    ) -> None:
        size = action_dim if num_action_per_chunk else None
        super().__init__(action_dim * (num_action_per_chunk or 1), size, **network)

    def action_rows(self, frames: int) -> int:
        return 1

    def be_causal(self) -> None:
        raise ValueError("Each latent frame of a flat network sees all actions of the clip: choose a chunk network.")

    def _rows(self, action_B_A_D: Tensor, frames: int) -> Tensor:
        _, count, size = action_B_A_D.shape
        if count * size != self.action_inputs:
            raise ValueError(
                f"There are {count} actions of {size} numbers, {count * size} in all, but the network reads"
                f" {self.action_inputs} (action_dim, num_action_per_chunk)."
            )
        return action_B_A_D.flatten(1).unsqueeze(1)

    def _by_frame(self, rows_B_R_D: Tensor, rest_B_T_1: Tensor | None) -> Tensor:
        return rows_B_R_D


class ChunkActionDiT(ActionDiT):
    """Each latent frame but the first sees the ``temporal_compression_ratio`` actions that lead to it; a given frame
    sees none. Fits clips of any length, so how many actions there are in one is not looked at."""

    def __init__(
        self,
        *,
        action_dim: int,
        temporal_compression_ratio: int = 4,
        num_action_per_chunk: int | None = None,
        **network: Any,
    ) -> None:
        super().__init__(action_dim * temporal_compression_ratio, action_dim, **network)
        if self.patch_temporal != 1:
            raise ValueError(f"patch_temporal={self.patch_temporal}: actions belong to single latent frames.")
        self.action_dim = action_dim
        self.temporal_compression_ratio = temporal_compression_ratio

    def action_rows(self, frames: int) -> int:
        return frames - 1

    def _rows(self, action_B_A_D: Tensor, frames: int) -> Tensor:
        batch, count, size = action_B_A_D.shape
        ratio = self.temporal_compression_ratio
        if size != self.action_dim or count != (frames - 1) * ratio:
            raise ValueError(
                f"There are {count} actions of {size} numbers, but {frames} latent frames take {(frames - 1) * ratio}"
                f" of {self.action_dim} ({ratio} for each after the first)."
            )
        return action_B_A_D.reshape(batch, frames - 1, ratio * size)

    def _by_frame(self, rows_B_R_D: Tensor, rest_B_T_1: Tensor | None) -> Tensor:
        all_B_T_D = torch.cat([torch.zeros_like(rows_B_R_D[:, :1]), rows_B_R_D], dim=1)
        part_B_T_D = all_B_T_D[:, self.seen(all_B_T_D.shape[1])]
        return part_B_T_D if rest_B_T_1 is None else part_B_T_D * rest_B_T_1
