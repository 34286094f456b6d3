# SPDX-License-Identifier: Apache-2.0
"""A small head beside a world model's network that predicts the robot's state; released weights do not need it.

    head = StateHead(action_dim=7, latent_channels=16, state_range=[[-1.6, 1.6], ...])    # lowest and highest of each
    states_B_A_S = head(latents_B_C_T_H_W, state_B_S, actions_B_A_D)

It reads clean latents, true ones in training and imagined ones afterwards, so that noise levels do not matter to it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cosmos_predict2.nn.layers import Linear

SIDE = 8  # of the coarse picture that is read of each latent frame
WIDTH = 256
RATIO = 4  # actions that lead to a latent frame


class StateHead(nn.Module):
    """The state moves on by the actions that lead to each latent frame, and by that frame and the one before.

    Inside, states lie in [-1, 1] where recordings lie in ``state_range``.
    """

    low: Tensor
    high: Tensor

    def __init__(self, action_dim: int, latent_channels: int, state_range: Sequence[Sequence[float]]) -> None:
        super().__init__()
        if any(len(ends) != 2 or not ends[0] <= ends[1] for ends in state_range):
            raise ValueError(f"state_range={state_range}: the lowest and the highest value of each number is needed.")
        self.state_range = [tuple(map(float, ends)) for ends in state_range]
        self.state_dim = len(self.state_range)
        self.look = Linear(latent_channels * SIDE * SIDE, WIDTH)
        self.enter = Linear(self.state_dim + 2 * WIDTH + RATIO * action_dim, WIDTH)
        self.think = Linear(WIDTH, WIDTH)
        self.leave = Linear(WIDTH, RATIO * self.state_dim)
        for name in ("low", "high"):
            self.register_buffer(name, torch.empty(self.state_dim), persistent=False)
        self.reset_buffers()

    @torch.no_grad()
    def reset_buffers(self) -> None:
        for buffer, ends in zip((self.low, self.high), zip(*self.state_range, strict=True), strict=True):
            buffer.copy_(torch.tensor(ends))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """The range stays in float32: in bfloat16 one from 1000 to 1001 is empty."""
        super()._apply(fn, recurse)
        if self.low.dtype.itemsize < torch.float32.itemsize:
            for name in ("low", "high"):
                self._buffers[name] = torch.empty_like(getattr(self, name), dtype=torch.float32)
            self.reset_buffers()
        return self

    def scaled(self, state: Tensor) -> Tensor:
        """States of recordings [..., S] in [-1, 1]; a number that never changed is 0."""
        low, high = self.low.float(), self.high.float()
        spread = high - low
        scaled = (2 * state.to(low) - low - high) / torch.where(spread > 0, spread, 1)
        return torch.where(spread > 0, scaled, 0)

    def forward(self, latents_B_C_T_H_W: Tensor, state_B_S: Tensor, actions_B_A_D: Tensor) -> Tensor:
        """States of recordings after each action, float32 [B, A, S], from that at the first frame."""
        dtype, num_frames = self.look.weight.dtype, latents_B_C_T_H_W.shape[2]
        coarse = F.adaptive_avg_pool2d(latents_B_C_T_H_W.transpose(1, 2).flatten(0, 1).float(), SIDE)
        seen_B_T_W = F.silu(self.look(coarse.flatten(1).to(dtype))).unflatten(0, (-1, num_frames))
        rows_B_T_R = actions_B_A_D.to(dtype).unflatten(1, (num_frames - 1, RATIO)).flatten(2)
        state, moved = self.scaled(state_B_S), []
        for t in range(1, num_frames):
            known = torch.cat([state.to(dtype), seen_B_T_W[:, t - 1], seen_B_T_W[:, t], rows_B_T_R[:, t - 1]], dim=1)
            moves = self.leave(F.silu(self.think(F.silu(self.enter(known)))))
            moved.append(state[:, None] + moves.unflatten(1, (RATIO, self.state_dim)).float())
            state = moved[-1][:, -1]
        low, high = self.low.float(), self.high.float()
        out: Tensor = (torch.cat(moved, dim=1) * (high - low) + high + low) / 2
        return out

    def error(self, found: Tensor, true: Tensor) -> Tensor:
        """The size of a difference as a share of the range of recordings; 0 for a number that never changed."""
        return (self.scaled(found) - self.scaled(true)).abs() / 2


class StateTrail:
    """The robot's state along chunks that are imagined: ``state_B_S`` where the next one begins, and all so far.

    Whoever has latents and actions of a chunk lets the trail `see` them, in parts of the batch, in order.
    """

    def __init__(self, head: StateHead, state_B_S: Tensor) -> None:
        self.head, self.state_B_S = head, state_B_S
        self._seen: list[Tensor] = []
        self._chunks: list[Tensor] = []

    @property
    def states_B_A_S(self) -> Tensor:
        """After each action of all chunks."""
        return torch.cat(self._chunks, dim=1)

    def see(self, rows: slice, latents_B_C_T_H_W: Tensor, actions_B_A_D: Tensor) -> None:
        device = latents_B_C_T_H_W.device
        self._seen.append(self.head(latents_B_C_T_H_W, self.state_B_S[rows].to(device), actions_B_A_D.to(device)))

    def step(self, num_actions_B: Sequence[int] | None = None) -> Tensor:
        """The state where the next chunk begins: after so many actions of each sample, by default all."""
        self._chunks.append(torch.cat(self._seen))
        self._seen = []
        states_B_A_S = self._chunks[-1]
        rows = torch.arange(len(states_B_A_S))
        last = -1 if num_actions_B is None else [number - 1 for number in num_actions_B]
        self.state_B_S = states_B_A_S[rows, last]
        return self.state_B_S
