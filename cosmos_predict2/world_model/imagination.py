# SPDX-License-Identifier: Apache-2.0
"""Imagination by a world model: first frames and chunks of actions become the frames that follow.

    imagination = Imagination(world)
    actions = imagination.transformed(raw_actions)                                       # as the network sees them
    video = imagination.generate_actions(first_frames, actions[:, :12], seeds=[0, 1])    # uint8 [B, 3, 13, H, W]
    video = imagination.rollout(first_frames, actions, seeds=[0, 1])                     # [B, 3, 1 + L, H, W]

Each sample has a seed of its own, and its result does not depend on the samples beside it. Work without an effect is
left out: frames that are not given are not encoded, a second pass for guidance is made only where it differs from the
first, and a text of zeros is not attended to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from cosmos_predict2.actions.transforms import ActionTransform
from cosmos_predict2.conditioner import ACTION_KEY, NEGATIVE_TEXT_KEY, TEXT_KEY
from cosmos_predict2.nn.action_dit import ChunkActionDiT
from cosmos_predict2.nn.state_head import StateHead, StateTrail
from cosmos_predict2.text.trained_text import with_tokens
from cosmos_predict2.tokenizers.sizes import latent_frames, pixel_frames
from cosmos_predict2.world_model.config import Video2WorldActionPipelineConfig
from cosmos_predict2.world_model.world_model import UNGUIDED, SamplingOptions, WorldModel, to_uint8
from imaginaire.errors import ConfigError, DataError, near
from imaginaire.log import tracked

LAST_CHUNKS = ("pad", "drop")


class Imagination:
    """An action-conditioned world model; its config records the transform that actions go through. ``views`` are those
    of its pictures, from top to bottom (`data.views`), ``action_keys`` the columns of its recordings that make an
    action, where they were named."""

    def __init__(
        self, world: WorldModel, views: Sequence[str] = ("",), action_keys: Sequence[str] | None = None
    ) -> None:
        if not isinstance(world.config, Video2WorldActionPipelineConfig):
            raise ConfigError("Actions need a world model configured by a Video2WorldActionPipelineConfig.")
        self.world, self.views, self.action_keys = world, tuple(views), action_keys
        self.config = world.config

    @property
    def transform(self) -> ActionTransform:
        return self.config.require_transform()

    def transformed(self, raw: ArrayLike) -> Tensor:
        """Raw actions [..., d] as the network sees them, float32."""
        return torch.from_numpy(self.transform.apply(raw)).float()

    @property
    def state_head(self) -> StateHead | None:
        """The part of the network that predicts the robot's state; None where it has none."""
        return self.world.net.state_head

    @torch.no_grad()
    def generate_actions(
        self,
        first_frames_B_C_F_H_W: Tensor,
        actions_B_A_D: Tensor,
        seeds: Sequence[int] | int,
        options: SamplingOptions = UNGUIDED,
        *,
        text_B_S_E: Tensor | None = None,
        negative_text_B_S_E: Tensor | None = None,
        as_float: bool = False,
        batch_size: int | None = None,
        frames: range | None = None,
        trail: StateTrail | None = None,
    ) -> Tensor:
        """Videos [B, 3, 1 + A, H, W] that begin with the first frames: uint8, or in [-1, 1] with ``as_float``.

        A single seed is that of one stream of noise for each batch, as published environments draw it. Of ``frames``,
        numbers that follow each other, no others are decoded than these need.
        One or five first frames, uint8 or in [-1, 1]; of five, the first four actions lie between them. Actions are as
        `transformed` gives them; a text [1, S, E] is that of all samples. ``batch_size`` are sampled together, or as
        many as fit into a GPU's memory. ``trail`` sees what the robot's state is predicted from.
        """
        num_latent = self._check(first_frames_B_C_F_H_W, actions_B_A_D, seeds)
        num_given = first_frames_B_C_F_H_W.shape[2]
        size, height, width = len(actions_B_A_D), *first_frames_B_C_F_H_W.shape[3:]
        texts = self.texts(size, text_B_S_E, negative_text_B_S_E)
        videos, finite = [], []
        step = batch_size or self.world.samples_at_once(num_latent, height, width)
        for start in range(0, size, step):
            part = slice(start, start + step)
            first, actions = first_frames_B_C_F_H_W[part], actions_B_A_D[part]
            latent = self.world.generate_latents(
                self.batch({key: text[part] for key, text in texts.items()}, actions, (height, width)),
                self.world.given_latents(first, num_latent),
                latent_frames(num_given),
                seed=seeds if isinstance(seeds, int) else [int(seed) for seed in seeds[part]],
                options=options,
                is_without_text=text_B_S_E is None and negative_text_B_S_E is None,
            )
            if trail is not None:
                trail.see(part, latent, actions.float())
            few = self.world.clips_at_once(pixel_frames(num_latent), height, width)
            for some in latent.split(few):
                video = self.world.decode(some, frames)
                finite.append(torch.isfinite(video).all())
                videos.append(video if as_float else to_uint8(video))
        if not torch.stack(finite).all():  # once: the host waits for the device here
            raise DataError("The network gave values that are not finite. Are these the weights of this model?")
        return torch.cat(videos)

    # --- many chunks

    @torch.no_grad()
    def rollout(
        self,
        first_frames_B_C_F_H_W: Tensor,
        actions_B_L_D: Tensor,
        seeds: Sequence[int],
        options: SamplingOptions = UNGUIDED,
        *,
        text_B_S_E: Tensor | None = None,
        negative_text_B_S_E: Tensor | None = None,
        float_hand_over: bool = False,
        history: int = 1,
        reference: bool = False,
        last_chunk: str = "pad",
        as_float: bool = False,
        batch_size: int | None = None,
        trail: StateTrail | None = None,
    ) -> Tensor:
        """Videos [B, 3, 1 + L, H, W] of any number of actions: each chunk begins where the last one ended.

        A chunk begins with the end of the one before, in bytes, or with ``float_hand_over`` as it was decoded. With
        ``last_chunk`` "pad" the last chunk is filled with raw actions of zeros, whose frames are cut off; "drop" leaves
        out actions that fill no chunk. The noise of a chunk is that of the seed plus the number of its first action.

        With ``history`` 2 a chunk begins with five frames in place of one, and with ``reference`` the first of the five
        is the first picture of all; the released networks were trained for neither. ``trail`` follows the
        robot's state from the first frame on, with ``history`` 1.
        """
        if trail is not None and history != 1:
            raise ConfigError(f"The robot's state is predicted from one picture, but history={history}: set it to 1.")
        chunk, given = self.config.chunk_size, pixel_frames(history)
        check_rollout(actions_B_L_D.shape[1], chunk, history, reference, last_chunk)
        if self.config.transform is not None and actions_B_L_D.shape[1] > chunk:
            check_bases(self.config.transform, chunk, history)
        starts = chunk_starts(actions_B_L_D.shape[1], chunk, given - 1, last_chunk)
        end = min(actions_B_L_D.shape[1], starts[-1] + chunk)
        actions_B_L_D = actions_B_L_D[:, :end]
        if missing := starts[-1] + chunk - end:  # raw actions of zeros, as the network sees them
            rest = self.transformed([[0.0] * actions_B_L_D.shape[2]]).to(actions_B_L_D)
            actions_B_L_D = torch.cat([actions_B_L_D, rest.expand(len(actions_B_L_D), missing, -1)], dim=1)
        frames, is_float = first_frames_B_C_F_H_W, float_hand_over or as_float
        first, videos = first_frames_B_C_F_H_W[:, :, :1], []
        # Once for all chunks: what else lies in memory then would make batches of other sizes, each captured anew.
        batch_size = batch_size or self.world.samples_at_once(latent_frames(1 + chunk), *frames.shape[3:])
        for start in tracked(starts, "rollout", unit="chunk", leave=False, is_shown=options.progress):
            clip = self.generate_actions(
                frames,
                actions_B_L_D[:, start : start + chunk],
                [int(seed) + start for seed in seeds],
                replace(options, progress=False),
                text_B_S_E=text_B_S_E,
                negative_text_B_S_E=negative_text_B_S_E,
                as_float=is_float,
                batch_size=batch_size,
                trail=trail,
            )
            if trail is not None:
                trail.step()
            videos.append(clip[:, :, given if start else 0 :])
            frames = clip[:, :, -given:]
            if not float_hand_over:
                frames = frames if frames.dtype == torch.uint8 else to_uint8(frames)
            if reference:
                frames = torch.cat([_like(first, frames), frames[:, :, 1:]], dim=2)
        video_B_C_F_H_W = torch.cat(videos, dim=2)[:, :, : 1 + end]
        return video_B_C_F_H_W if as_float or not is_float else to_uint8(video_B_C_F_H_W)

    # --- parts

    def _check(self, frames_B_C_F_H_W: Tensor, actions_B_A_D: Tensor, seeds: Sequence[int] | int) -> int:
        """Latent frames of the clip; raises for frames, actions and seeds that are not of one batch of this network."""
        if not self.world.net.takes_actions:
            raise ConfigError("This network takes no actions: give weights of an action-conditioned one.")
        frames, actions = tuple(frames_B_C_F_H_W.shape), tuple(actions_B_A_D.shape)
        num_seeds = actions[0] if isinstance(seeds, int) else len(seeds)
        if len(frames) != 5 or len(actions) != 3 or not frames[0] == actions[0] == num_seeds > 0:
            raise DataError(
                f"First frames {list(frames)}, actions {list(actions)} and {num_seeds} seeds are not of one batch."
            )
        check_actions(self.world.net, actions[1], actions[2])
        if not torch.isfinite(actions_B_A_D).all():
            raise DataError("The actions have numbers that are not finite.")
        return latent_frames(1 + actions[1])

    def texts(
        self, size: int, text_B_S_E: Tensor | None, negative_text_B_S_E: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The texts of so many samples by their keys in a batch; without one, zeros."""
        given = {TEXT_KEY: text_B_S_E, NEGATIVE_TEXT_KEY: negative_text_B_S_E}
        num_tokens = self.config.num_text_tokens
        texts = {key: with_tokens(text, num_tokens) for key, text in given.items() if text is not None}
        if text_B_S_E is None:
            # One token does: all tokens of a text of zeros are alike, so that attention gives the same for any number.
            texts[TEXT_KEY] = torch.zeros(1, 1, self.world.net.text_channels, device=self.world.device)
        return {key: self._rows(text, size) for key, text in texts.items()}

    def batch(self, texts: Mapping[str, Tensor], actions_B_A_D: Tensor, picture: tuple[int, int]) -> dict[str, Tensor]:
        """The batch that the conditioner takes, for pictures of a height and width."""
        size, device = len(actions_B_A_D), self.world.device
        fps_B = torch.full((size,), float(self.config.fps), device=device)
        padding = torch.zeros(size, 1, *picture, device=device)
        return {**texts, ACTION_KEY: actions_B_A_D.float(), "fps": fps_B, "padding_mask": padding}

    def _rows(self, text_B_S_E: Tensor, size: int) -> Tensor:
        """The text of each sample, on the device; one for all is kept once."""
        text = text_B_S_E.to(self.world.device, self.world.net.dtype)
        if text.shape[0] not in (1, size):
            raise DataError(f"There are texts for {text.shape[0]} samples, but {size} samples: one each, or one.")
        return text if text.shape[0] == size else text.expand(size, -1, -1)


def chunk_starts(num_actions: int, chunk_size: int, overlap: int = 0, last_chunk: str = "pad") -> list[int]:
    """The first action of each chunk, where successive chunks have ``overlap`` actions in common.

    The last one may reach beyond the end ("pad") or not ("drop").
    """
    step = chunk_size - overlap
    if last_chunk == "drop":
        return list(range(0, num_actions - chunk_size + 1, step))
    return [0, *range(step, num_actions - overlap, step)]


def check_rollout(num_actions: int, chunk_size: int, history: int, reference: bool, last_chunk: str) -> None:
    """Raise for a rollout that cannot be meant."""
    if last_chunk not in LAST_CHUNKS:
        raise ConfigError(f"last_chunk is '{last_chunk}'.{near(last_chunk, LAST_CHUNKS)}")
    if history < 1 or pixel_frames(history) > chunk_size:
        raise ConfigError(
            f"history={history} latent frames are {pixel_frames(max(history, 1))} frames (--num_conditional_frames),"
            f" and chunk_size={chunk_size} actions lead not beyond them: at least 1, and fewer frames than actions."
        )
    if reference and history < 2:
        raise ConfigError(
            f"reference (--keep_reference) keeps the first picture beside the last ones: history={history} must be 2"
            " (--num_conditional_frames 5)."
        )
    least = 1 if last_chunk == "pad" else chunk_size
    if num_actions < least:
        raise DataError(f"There are {num_actions} actions, but a rollout needs {least} at least (--last_chunk).")


def check_bases(transform: ActionTransform, chunk_size: int, history: int = 1) -> None:
    """Raise where a chunk behind the first would begin at no frame that actions are relative to, as in training."""
    every, overlap = transform.accumulate, pixel_frames(history) - 1
    if every is None:
        return
    if overlap if every == "window" else (chunk_size % int(every) or overlap % int(every)):
        base = "is the first frame of a chunk" if every == "window" else f"moves every {every} frames"
        raise ConfigError(
            f"The base of this model's actions {base} (accumulate), but chunks of chunk_size={chunk_size} with"
            f" history={history} (--num_conditional_frames) begin elsewhere: imagine one chunk, or with history=1."
        )


def check_actions(net: Any, num_actions: int, dim: int) -> None:
    """Raise for so many actions of so many numbers as the network does not take in one chunk."""
    if num_actions < 4 or num_actions % 4:
        raise ConfigError(f"A chunk of {num_actions} actions (chunk_size): it must be a multiple of 4, 12 for example.")
    is_chunk = isinstance(net, ChunkActionDiT)
    if dim != net.action_dim if is_chunk else num_actions * dim != net.action_inputs:
        expected = f"{net.action_dim} numbers each" if is_chunk else f"{net.action_inputs} numbers at once"
        raise DataError(f"{num_actions} actions (chunk_size) of {dim} numbers, but this network takes {expected}.")


def _like(frames: Tensor, other: Tensor) -> Tensor:
    """The frames in bytes or in [-1, 1], as the other ones are, and where they are."""
    frames = frames.to(other.device)
    if frames.dtype == other.dtype:
        return frames
    return to_uint8(frames) if other.dtype == torch.uint8 else frames.to(other.dtype) / 127.5 - 1
