# SPDX-License-Identifier: Apache-2.0
"""Frames of a causal world model that leave as soon as they are made, before the next actions are known.

    stream = Stream(imagination, first_frames, seeds=[0], options=SamplingOptions(num_steps=1))
    frames = stream.advance(actions[:, :4])      # uint8 [B, 3, 4, H, W]
    frames = stream.advance(actions[:, 4:12])    # the rest of a chunk

A latent frame attends, at each of the sampler's steps, to those before it as they were at that step. So it is what
sampling the whole chunk at once gives, and nothing is computed twice: keys and values are kept for each step. A chunk
ends with the actions that the network was trained on (``left``); the next stream begins at the last picture, encoded.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cosmos_predict2.diffusion.solvers import sample
from cosmos_predict2.nn.blocks import FrameMemory
from cosmos_predict2.tokenizers.sizes import latent_frames, pixel_frames
from cosmos_predict2.world_model.imagination import Imagination
from cosmos_predict2.world_model.options import SamplingOptions
from cosmos_predict2.world_model.world_model import initial_noise, to_uint8
from imaginaire.errors import ConfigError, DataError


class Stream:
    """One chunk from first pictures [B, 3, 1, H, W]. Without ``keeps`` all frames are made anew each time: slower, the
    same, and for comparison."""

    @torch.no_grad()
    def __init__(
        self,
        imagination: Imagination,
        first_frames_B_C_1_H_W: Tensor,
        seeds: Sequence[int],
        options: SamplingOptions,
        *,
        text_B_S_E: Tensor | None = None,
        keeps: bool = True,
    ) -> None:
        require_causal(imagination)
        if options.use_cuda_graphs:
            raise ConfigError("use_cuda_graphs: a stream's passes grow, and no graph fits them. Leave it out.")
        self.imagination, self.options, self.keeps = imagination, options, keeps
        size, _, _, *picture = first_frames_B_C_1_H_W.shape
        self.texts, self.is_without_text = imagination.texts(size, text_B_S_E), text_B_S_E is None
        self.picture = (picture[0], picture[1])
        num_latent = latent_frames(1 + imagination.config.chunk_size)
        self.given_B_C_T_H_W = given = imagination.world.given_latents(first_frames_B_C_1_H_W, num_latent)
        self.noise_B_C_T_H_W = initial_noise(tuple(given.shape), [int(seed) for seed in seeds]).to(given)
        self.actions_B_A_D = torch.zeros(size, 0, imagination.transform.dim)
        self.latents: list[Tensor] = []  # of all frames so far
        self.memories = [FrameMemory() for _ in range(options.num_steps)]

    @property
    def left(self) -> int:
        """Actions that the chunk still has room for."""
        return self.imagination.config.chunk_size - self.actions_B_A_D.shape[1]

    @torch.no_grad()
    def advance(self, actions_B_A_D: Tensor, *, as_float: bool = False) -> Tensor:
        """The pictures [B, 3, A, H, W] that these actions lead to, four or a multiple; uint8, or in [-1, 1]."""
        count, done = actions_B_A_D.shape[1], self.actions_B_A_D.shape[1]
        if count < 1 or count % 4 or count > self.left:
            raise DataError(f"{count} actions: a latent frame takes 4, and the chunk has room for {self.left}.")
        self.actions_B_A_D = torch.cat([self.actions_B_A_D, actions_B_A_D.float().cpu()], dim=1)
        world, total = self.imagination.world, latent_frames(1 + done + count)
        if not self.keeps:
            self.latents, self.memories = [], [FrameMemory() for _ in self.memories]
        self.latents.append(self._latents(sum(part.shape[2] for part in self.latents), total))
        video = world.decode(torch.cat(self.latents, dim=2), range(pixel_frames(total) - count, pixel_frames(total)))
        if not torch.isfinite(video).all():
            raise DataError("The network gave values that are not finite. Are these the weights of this model?")
        return video if as_float else to_uint8(video)

    def _latents(self, first: int, total: int) -> Tensor:
        """Latent frames ``first`` to ``total`` behind those in memory."""
        world, net = self.imagination.world, self.imagination.world.net
        batch = self.imagination.batch(self.texts, self.actions_B_A_D.to(world.device), self.picture)
        condition = world.conditioner.condition(batch, is_image=False)
        num_B = torch.ones(len(self.given_B_C_T_H_W), device=world.device)
        condition = condition.with_conditioning_frames(self.given_B_C_T_H_W, num_B).frames(first, total)
        condition = replace(condition, is_without_text=self.is_without_text)
        memories = iter(self.memories)
        try:
            net.memory = self.memories[0]  # positions are those behind it
            path = world.sampling_path(condition, None, self.noise_B_C_T_H_W[:, :, first:total], self.options)

            def denoise(x_B_C_T_H_W: Tensor, t_B: Tensor) -> Tensor:
                net.memory = next(memories)
                return path.denoise(x_B_C_T_H_W, t_B)

            return path.finish(sample(denoise, path.start_B_C_T_H_W, path.sigmas, path.stepper))
        finally:
            net.memory = None


def require_causal(imagination: Imagination) -> None:
    """Raise for a world model that cannot make one frame before the next."""
    if not imagination.world.net.causal:
        raise ConfigError(
            "This world model makes whole chunks. Distil a causal student of it: python -m scripts.train --"
            " experiment=tiny_student_causal, or objective.causal=True of your own."
        )
