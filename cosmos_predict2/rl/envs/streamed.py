# SPDX-License-Identifier: Apache-2.0
"""An environment whose causal world model goes on where it stopped: a few actions cost a few frames, not a chunk."""

from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from cosmos_predict2.nn.state_head import StateTrail
from cosmos_predict2.rl.envs.first_frames import FirstFrames
from cosmos_predict2.rl.envs.scoring import Ids
from cosmos_predict2.rl.envs.world_model import WorldModelEnv
from cosmos_predict2.world_model.streaming import Stream, require_causal
from imaginaire.errors import ConfigError


class StreamedEnv(WorldModelEnv):
    """A `WorldModelEnv` that is given actions four at a time, or a multiple, and makes no frame twice.

    A chunk in pieces is the chunk at once. What does not fit is imagined as there, from the present picture: other
    numbers of actions, and environments that end apart. So does the chunk behind `get_state`, here and where the state
    is loaded: keys and values are not saved.
    """

    def __init__(self, *arguments: Any, keeps: bool = True, **options: Any) -> None:
        super().__init__(*arguments, **options)
        require_causal(self.imagination)
        if self.starts.history > 1 or self.num_noises > 1:
            raise ConfigError(
                f"starts.history={self.starts.history}, num_noises={self.num_noises}: a stream has one of each."
            )
        self.keeps = keeps  # see Stream
        self._stream: Stream | None = None
        self._streamed: Ids = numpy.zeros(0, dtype=numpy.int64)  # its environments

    def _begin(self, ids: Ids, first: FirstFrames) -> None:
        super()._begin(ids, first)
        self._stream = None

    def _imagine(self, ids: Ids, actions_E_A_D: Tensor, counts: NDArray[numpy.int64]) -> Tensor:
        count = int(counts[0])
        if count % 4 or (counts != count).any():
            self._stream = None
            return super()._imagine(ids, actions_E_A_D, counts)
        if self._stream is None or self._stream.left < count or not numpy.array_equal(ids, self._streamed):
            first, seeds = self._frames[0][self._on_device(ids)], self._book.seeds[ids] + self._book.steps[ids]
            text, keeps = self._text(ids), self.keeps
            self._stream = Stream(self.imagination, first, seeds.tolist(), self.sampling, text_B_S_E=text, keeps=keeps)
            self._streamed = ids.copy()
        actions = self.imagination.transformed(actions_E_A_D[:, :count].numpy())
        video = self._stream.advance(actions, as_float=self.hand_over == "float")
        self._frames[0, self._on_device(ids)] = video[:, :, -1:].to(self._frames.dtype)
        if self.head is not None and len(self._states):
            trail = StateTrail(self.head, self._states[0, ids])
            trail.see(slice(None), torch.cat(self._stream.latents, dim=2)[:, :, -(1 + count // 4) :], actions)
            self._states[0, ids] = trail.step().cpu()
        return video[None]

    def get_state(self) -> bytes:
        self._stream = None
        return super().get_state()

    def load_state(self, state: bytes) -> None:
        self._stream = None
        super().load_state(state)
