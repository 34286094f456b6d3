# SPDX-License-Identifier: Apache-2.0
"""Figures of a Video2World model on clips that it was never trained on.

Its loss, at fixed noise levels with fixed noise, is compared with that of the best linear denoiser of the training
latents. Its generated clips are compared with the last conditioning frame repeated, on the pixels that move.
Conditioning frames are excluded everywhere: they cost the model nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import default_collate

from cosmos_predict2.conditioner import TEXT_KEY, Condition, Conditioner, first_frames_as_channels
from cosmos_predict2.diffusion.rectified_flow import add_noise, per_frame, rectified_flow_weight
from cosmos_predict2.evaluation.metrics.video_quality import MOVES, moves
from cosmos_predict2.interfaces import VideoTokenizer
from cosmos_predict2.tokenizers.sizes import pixel_frames
from cosmos_predict2.world_model.config import Video2WorldPipelineConfig
from cosmos_predict2.world_model.world_model import SamplingOptions, WorldModel, to_uint8
from imaginaire import random
from imaginaire.errors import ConfigError, DataError

BATCH = 32
LINEAR = {  # of a linear denoiser x0 = a x + b: over which dimensions of [B, C, T, H, W] a and b are shared
    "scalar": (0, 1, 2, 3, 4),
    "per channel": (0, 2, 3, 4),
    "per latent": (0,),
}


@dataclass(frozen=True)
class HeldOutClips:
    """Clips with their latents, and the condition under which a model generates the rest of each."""

    video_B_C_F_H_W: Tensor  # uint8
    x0_B_C_T_H_W: Tensor
    condition: Condition
    captions: list[str]
    num_given: int  # latent frames

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def shape(self) -> str:
        """Frames x height x width of each clip, in pixels."""
        return "x".join(map(str, self.video_B_C_F_H_W.shape[2:]))

    def part(self, start: int, stop: int) -> "HeldOutClips":
        chosen = slice(start, stop)
        condition = self.condition.with_tensors(lambda value: value[chosen])
        tensors = self.video_B_C_F_H_W[chosen], self.x0_B_C_T_H_W[chosen]
        return HeldOutClips(*tensors, condition, self.captions[chosen], self.num_given)


@torch.no_grad()
def read_clips(
    dataset: Any,
    tokenizer: VideoTokenizer,
    config: Video2WorldPipelineConfig,
    num: int,
    *,
    with_text: Callable[[Mapping[str, Any], int], Mapping[str, Any]] | None = None,
) -> HeldOutClips:
    """The first ``num`` items of a data set, each cut at random but always in the same way.

    ``with_text`` puts the embeddings of training into a batch of so many clips, where the data's are not those.
    There are as few conditioning frames as in training, but one at least: nothing could be compared with text alone.
    """
    num_given = max(1, config.min_num_conditional_frames)
    state = numpy.random.get_state()  # data sets draw the place of a window from it
    try:
        items = []
        for i in range(min(num, len(dataset))):
            numpy.random.seed(i)
            items.append(dataset[i])
    finally:
        numpy.random.set_state(state)
    needed = ("video",) if with_text else ("video", TEXT_KEY)
    if missing := [key for key in needed if key not in items[0]]:
        raise DataError(
            f"{type(dataset).__name__} gives no '{missing[0]}', which figures are measured on (cached latents, pictures"
            " and captions that training encodes do not do). Choose clips with embeddings: --experiment NAME --"
            " dataloader_train=folder dataloader_val=folder, each with its dataset.dataset_dir."
        )
    batch = default_collate([{k: v for k, v in item.items() if isinstance(v, Tensor | float | int)} for item in items])
    video = batch["video"][:, :, : pixel_frames(config.state_t)]
    latents = [tokenizer.encode(part.float() / 127.5 - 1) for part in video.split(BATCH)]
    x0 = torch.cat(latents).float() * config.sigma_data
    captions = [str(item.get("ai_caption", "")) for item in items]
    if with_text:
        batch = with_text({**batch, "ai_caption": captions}, len(items))
    num_pinned = num_given
    if config.shows_first_frames:
        first = video[:, :, : pixel_frames(num_given)].float() / 127.5 - 1
        parts = [first_frames_as_channels(tokenizer.encode, part, video.shape[2]) for part in first.split(BATCH)]
        batch, num_pinned = {**batch, **{key: torch.cat([part[key] for part in parts]) for key in parts[0]}}, 0
    condition = Conditioner(config.conditioner).condition(batch, is_image=False)
    condition = condition.with_conditioning_frames(x0, torch.full((len(items),), num_pinned))
    return HeldOutClips(video, x0, condition, captions, num_given)


def losses(world: WorldModel, clips: HeldOutClips, sigmas: Sequence[float]) -> list[float]:
    """The mean squared error of the velocity at each noise level, without the conditioning frames."""
    return list(_errors(lambda xt, sigma_B_1, part: world.denoiser(xt, sigma_B_1, part.condition), clips, sigmas))


def linear_losses(training: HeldOutClips, clips: HeldOutClips, sigmas: Sequence[float]) -> dict[str, list[float]]:
    """The same of the best linear denoisers x0 = a x + b, fitted by least squares to training latents.

    With mean m and variance v of the latents, a = v / (v + sigma^2) and b = (1 - a) m are best. See LINEAR for what
    shares one a and b.
    """
    if training.shape != clips.shape:
        raise ConfigError(
            f"Training clips are {training.shape}, held-out clips {clips.shape} (frames x height x width), and can only"
            " be compared at one size: make dataloader_train.dataset and dataloader_val.dataset alike, such as --"
            f" dataloader_val.dataset.video_size=[{','.join(map(str, training.video_B_C_F_H_W.shape[-2:]))}]."
        )
    found = {}
    x0 = training.x0_B_C_T_H_W[:, :, training.num_given :]
    for name, shared in LINEAR.items():
        mean, variance = x0.mean(dim=shared, keepdim=True), x0.var(dim=shared, keepdim=True, correction=0)

        def denoise(
            xt: Tensor, sigma_B_1: Tensor, part: HeldOutClips, mean: Tensor = mean, v: Tensor = variance
        ) -> Tensor:
            a = v / (v + per_frame(sigma_B_1).square())
            rest = a * xt[:, :, part.num_given :] + (1 - a) * mean
            return torch.cat([part.x0_B_C_T_H_W[:, :, : part.num_given], rest], dim=2)

        found[name] = list(_errors(denoise, clips, sigmas))
    return found


@torch.no_grad()
def _errors(denoise: Any, clips: HeldOutClips, sigmas: Sequence[float]) -> Iterator[float]:
    for number, sigma in enumerate(sigmas):
        total, count = 0.0, 0
        for start in range(0, len(clips), BATCH):
            part = clips.part(start, start + BATCH)
            x0 = part.x0_B_C_T_H_W
            generators = (random.generator(0, start + i, f"held_out/{number}") for i in range(len(part)))
            epsilon = torch.stack([torch.randn(x0.shape[1:], generator=one) for one in generators])
            sigma_B_1 = torch.full((len(part), 1), sigma)
            predicted = denoise(add_noise(x0, epsilon, sigma_B_1), sigma_B_1, part)
            weight = float(rectified_flow_weight(torch.tensor(sigma)))
            error = (predicted - x0)[:, :, part.num_given :].square() * weight
            total, count = total + float(error.double().sum()), count + error.numel()
        yield total / count


def generate(world: WorldModel, clips: HeldOutClips, *, num_steps: int) -> Tensor:
    """Videos generated from the conditioning frames and the text of each clip, without guidance: uint8."""
    videos = []
    for start in range(0, len(clips), BATCH):
        part = clips.part(start, start + BATCH)
        given = part.video_B_C_F_H_W[:, :, : pixel_frames(part.num_given)]
        text = part.condition.crossattn_emb_B_S_E
        options = SamplingOptions(num_steps=num_steps)
        videos.append(to_uint8(world.generate(given, text, seed=0, options=options)))
    return torch.cat(videos)


def repeated(clips: HeldOutClips) -> Tensor:
    """Each clip with its last conditioning frame in place of all that follow."""
    video, num = clips.video_B_C_F_H_W, pixel_frames(clips.num_given)
    rest = video[:, :, num - 1 : num].expand(-1, -1, video.shape[2] - num, -1, -1)
    return torch.cat([video[:, :, :num], rest], dim=2)


def moving_psnr(video_B_C_F_H_W: Tensor, clips: HeldOutClips) -> float:
    """PSNR to the truth in dB, over the pixels in which the truth differs from the last conditioning frame.

    All clips' pixels count alike.
    """
    squared = (video_B_C_F_H_W.float() - clips.video_B_C_F_H_W.float()).square().mean(dim=1, keepdim=True)
    return float(10 * torch.log10(255**2 / squared[_moves(clips)].double().mean()))


def movement(clips: HeldOutClips) -> list[float]:
    """The share of each clip's pixels that move."""
    share: list[float] = _moves(clips).float().mean(dim=(1, 2, 3, 4)).tolist()
    return share


def require_movement(clips: HeldOutClips) -> None:
    """Raise for clips in which nothing is to be foreseen: a standstill would be perfect."""
    if not _moves(clips).any():
        num = len(clips)
        raise DataError(
            f"Nothing moves in {'this clip' if num == 1 else f'these {num} clips'}: no colour of any pixel differs by"
            f" more than {MOVES} of 255 from the last conditioning frame, so that generated frames cannot be"
            " distinguished from a standstill. Take more clips (--num_clips) or others (--data FOLDER)."
        )


def _moves(clips: HeldOutClips) -> Tensor:
    return moves(clips.video_B_C_F_H_W, repeated(clips))
