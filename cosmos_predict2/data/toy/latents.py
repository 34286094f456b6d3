# SPDX-License-Identifier: Apache-2.0
"""The toy world for a model that trains in minutes: windows as latents, encoded once when the data set is built.

A group's latent does not depend on where its window begins, so an episode of 24 steps costs six groups and one first
frame for each window (at steps 0, 4, 8 and 12 for windows of 13 frames), ten latents in all.

In a rollout the first frame of a later window is one that the model imagined: the last of a group, through the decoder
and the encoder again. ``handed_over`` is the share of the later windows that begin with such a picture of the truth.

Windows in which no object gets ``least_travel`` pixels far are excluded, unless the episode has no others.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cosmos_predict2.data.dataset_latents import LATENTS_KEY, PROBE_KEY, probe
from cosmos_predict2.data.toy.videos import ToyWorldVideos
from cosmos_predict2.interfaces import VideoTokenizer
from cosmos_predict2.tokenizers.sizes import latent_frames
from imaginaire.data.facts import DataFacts
from imaginaire.errors import ConfigError

GROUP = 4  # pixel frames of a latent one
_EPISODES_AT_ONCE = 32


class ToyWorldLatents(Dataset[dict[str, Any]]):
    """Items as of `ToyWorldVideos`, with ``latents`` in place of ``video``; ``world`` are its arguments.

    The window is drawn from NumPy's global generator, which the loader seeds per sample.
    """

    check = ToyWorldVideos.check

    def __init__(
        self,
        tokenizer: VideoTokenizer,
        num_frames: int = 13,
        handed_over: float = 0.0,
        least_travel: float = 0.0,
        **world: Any,
    ) -> None:
        self.videos = ToyWorldVideos(num_frames=num_frames, start=0, **world)
        if num_frames < GROUP + 1 or num_frames % GROUP != 1:
            raise ConfigError(f"num_frames={num_frames}: latents are of 1 + {GROUP}k frames, 5 at least.")
        if not 0 <= handed_over <= 1:
            raise ConfigError(f"handed_over={handed_over}, but it is a share, from 0 to 1.")
        self.num_frames = num_frames
        self._size = (self.videos.episodes.size,) * 2
        self.handed_over = handed_over
        self._num_windows = (self.videos.episodes.states.shape[1] - num_frames) // GROUP + 1
        travel = self.videos.episodes.travel(num_frames - 1)[:, ::GROUP]
        self._moves = travel >= least_travel
        self._probe = probe(tokenizer)
        parts = [
            self._encode(tokenizer, range(i, min(i + _EPISODES_AT_ONCE, len(self))))
            for i in range(0, len(self), _EPISODES_AT_ONCE)
        ]
        # [N, 1 or 2, windows, C, h, w] (true first frames; those handed over, if any are) and [N, C, groups, h, w]
        self._firsts, self._groups = (torch.cat(part) for part in zip(*parts, strict=True))

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        # Without a rate, so that its runs imagine at that of the model's config, as they always did.
        return replace(ToyWorldVideos.facts(arguments), read_rate=lambda: None)

    def __len__(self) -> int:
        return len(self.videos)

    def __getitem__(self, index: int) -> dict[str, Any]:
        chosen = numpy.flatnonzero(self._moves[index]) if self._moves[index].any() else range(self._num_windows)
        window = int(chosen[numpy.random.randint(len(chosen))])
        again = window > 0 and numpy.random.random() < self.handed_over
        start = window * GROUP
        item = self.videos.described(index, start + numpy.arange(self.num_frames), self._size, self.videos.fps)
        first = self._firsts[index, int(again), window]
        groups = self._groups[index, :, window : window + latent_frames(self.num_frames) - 1]
        latents = torch.cat([first[:, None], groups], dim=1).float()
        return {LATENTS_KEY: latents, PROBE_KEY: self._probe, **item}

    def _encode(self, tokenizer: VideoTokenizer, episodes: range) -> tuple[Tensor, Tensor]:
        last = (self._num_windows - 1) * GROUP + self.num_frames
        rendered = numpy.stack([self.videos.episodes.render(i, 0, last) for i in episodes])
        video_B_C_F_H_W = torch.from_numpy(rendered).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
        whole_B_C_T_H_W = tokenizer.encode(video_B_C_F_H_W)
        starts = [i * GROUP for i in range(self._num_windows)]
        frames = [video_B_C_F_H_W[:, :, starts]]
        if self.handed_over:
            frames.append(tokenizer.decode(whole_B_C_T_H_W)[:, :, starts].clamp(-1, 1))
        firsts = torch.stack([self._encoded_alone(tokenizer, pictures) for pictures in frames], dim=1)
        return firsts.half(), whole_B_C_T_H_W[:, :, 1:].half()  # far finer than the tokenizer's own error

    @staticmethod
    def _encoded_alone(tokenizer: VideoTokenizer, frames_B_C_N_H_W: Tensor) -> Tensor:
        """Each frame encoded as the first of a clip: [B, N, C, h, w]."""
        size, _, count, _, _ = frames_B_C_N_H_W.shape
        single = frames_B_C_N_H_W.transpose(1, 2).flatten(0, 1)[:, :, None]
        return tokenizer.encode(single)[:, :, 0].unflatten(0, (size, count))
