# SPDX-License-Identifier: Apache-2.0
"""Clips that callbacks measure beside training: the first of a loader, the same ones for any number of processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import Subset

from cosmos_predict2.conditioner import (
    ACTION_KEY,
    EXTRA_KEY,
    GIVEN_VIEW_KEY,
    IMAGE_KEY,
    NEGATIVE_TEXT_KEY,
    TEXT_KEY,
    Condition,
)
from cosmos_predict2.data.clip_dataset import ClipDataset
from cosmos_predict2.nn.dit import DiT
from cosmos_predict2.world_model.world_model import to_uint8
from imaginaire import distributed, random
from imaginaire.data import stream as data
from imaginaire.data.stream import POSITION_KEY, ResumableLoader
from imaginaire.distributed import parallel
from imaginaire.distributed.parallel import current_dims
from imaginaire.errors import DataError
from imaginaire.training.model import ImaginaireModel, evaluating


@runtime_checkable
class GivesClips(Protocol):
    """A model whose batches are clips that samples can be drawn of."""

    def clean_clips(self, batch: Mapping[str, Any]) -> tuple[Tensor | None, Tensor, Condition]:
        """Pixels (None where latents are cached), clean latents and the condition of a batch, without draws."""
        ...


@dataclass(frozen=True)
class FixedClip:
    """One sample with its condition. Pixels are kept on rank 0 only; cached latents have none."""

    position: int  # in the data
    x0_1_C_T_H_W: Tensor
    condition: Condition
    negative_text_1_S_E: Tensor | None
    fps: float
    video_1_C_F_H_W: Tensor | None  # uint8
    origin: str  # the recording that it is a part of, or its position where the data give none

    @property
    def num_given(self) -> int:
        """The number of latent frames that are conditioning frames in every view."""
        mask = self.condition.condition_mask_B_1_T_H_W
        return 0 if mask is None else int(mask[0, 0].flatten(1).amin(dim=1).sum())

    def conditions(self) -> dict[str, Tensor]:
        """The inputs of a conditioner, by their keys in a batch."""
        values = {
            TEXT_KEY: self.condition.crossattn_emb_B_S_E,
            "padding_mask": self.condition.padding_mask_B_1_H_W,
            "fps": self.condition.fps_B,
            GIVEN_VIEW_KEY: self.condition.given_view_B,
            ACTION_KEY: self.condition.action_B_A_D,
            EXTRA_KEY: self.condition.extra_B_C_T_H_W,
            IMAGE_KEY: self.condition.image_B_S_E,
            NEGATIVE_TEXT_KEY: self.negative_text_1_S_E,
        }
        return {key: value for key, value in values.items() if value is not None}

    def condition_on(self, device: torch.device) -> Condition:
        return self.condition.with_tensors(lambda value: value.to(device))


@contextmanager
def apart(trainer: Any, model: Any) -> Iterator[None]:
    """A context in which all ranks may run the model, and which leaves training as it was."""
    autocast = model.autocast(trainer.device)
    try:
        with trainer.timers("apart"), random.preserved(), evaluating(model), torch.no_grad(), autocast:
            yield
    finally:
        parallel.reshard(model)


def first_clips(loader: Any, model: Any, count: int) -> list[FixedClip]:
    """The first video clips that a pass over the loader gives to all ranks together, in order (a collective).

    ``loader`` may be a function that makes it.
    """
    # As many on every rank: those of another may all come later, behind images.
    mine = _on_all_ranks(lambda: _read(loader() if callable(loader) else loader, model, count))
    everyone = distributed.all_gather_object([clip.position for clip in mine])
    chosen = sorted({position for positions in everyone for position in positions})[:count]
    if not chosen:
        raise DataError(
            "There is no video clip to draw samples of: dataloader_val (or where there is none, dataloader_train) gives"
            " none. Add videos to it, or switch samples off: trainer.callbacks.draw_samples=null."
        )
    parts = distributed.all_gather_object([clip for clip in mine if clip.position in chosen])
    clips = {clip.position: clip for part in parts for clip in part}
    found = [clips[position] for position in chosen]
    return found if distributed.is_rank0() else [replace(clip, video_1_C_F_H_W=None) for clip in found]


def spread_clips(loader: Any, model: Any, count: int) -> list[FixedClip]:
    """The clips of a loader's data, of as many recordings as can be (a collective)."""
    dataset: Any = getattr(loader, "dataset", None)
    if isinstance(dataset, ClipDataset) and dataset.windows is not None:
        # The loader's first clips are windows of one recording; these are of as many as can be.
        chosen = Subset(dataset, dataset.windows.spread(count))
        loader = ResumableLoader(chosen, batch_size=1, shuffle=False, num_workers=0)
    return first_clips(loader, model, count)


def stacked(clips: Sequence[FixedClip], device: torch.device) -> tuple[Tensor, Tensor, Condition]:
    """Latents, noise that follows from each clip's place in the data, and one condition."""
    x0 = torch.cat([clip.x0_1_C_T_H_W for clip in clips])
    epsilon = torch.stack(
        [torch.randn(x0.shape[1:], generator=random.generator(0, clip.position, "action_following")) for clip in clips]
    )
    conditions = [clip.condition_on(device) for clip in clips]
    condition = conditions[0]
    for other in conditions[1:]:
        condition = condition.stacked_with(other)
    return x0.to(device), epsilon.to(device, x0.dtype), condition


def takes_actions(model: ImaginaireModel) -> bool:
    return isinstance(model, GivesClips) and isinstance(model.net, DiT) and model.net.takes_actions


def clips_of_step(batch: Mapping[str, Any], model: Any, count: int) -> list[FixedClip]:
    """The first video clips, at most so many, that all ranks have in a step's batch, without pixels (a collective)."""
    dims = current_dims()

    def find() -> list[FixedClip]:
        if model.is_image_batch(batch):
            return []
        size = len(batch["fps"])
        positions = batch.get(POSITION_KEY, torch.arange(size) * dims.dp_size + dims.dp_rank)
        clips = _singly(model, {**batch, POSITION_KEY: positions})
        return [replace(clip, video_1_C_F_H_W=None) for clip in clips][:count]

    parts = distributed.all_gather_object(_on_all_ranks(find))
    return sorted((clip for part in parts for clip in part), key=lambda clip: clip.position)[:count]


def _on_all_ranks(find: Callable[[], list[FixedClip]]) -> list[FixedClip]:
    """This rank's clips, of one context-parallel rank alone. Where a rank fails all raise: none waits for it."""
    work = find if current_dims().cp_rank == 0 else list[FixedClip]
    return distributed.agreed(work, DataError, "The clips that samples are drawn of cannot be read, ")


def _read(loader: Any, model: Any, count: int) -> list[FixedClip]:
    """At least the first ``count`` clips of this rank, in whole batches."""
    dims, seen = current_dims(), 0
    found: list[FixedClip] = []
    batches = data.open_pass(loader)
    try:
        for batch in batches:
            size = len(batch["fps"])
            if POSITION_KEY not in batch:  # a loader of torch's own gives every n-th sample to a rank
                batch[POSITION_KEY] = (seen + torch.arange(size)) * dims.dp_size + dims.dp_rank
            seen += size
            if not model.is_image_batch(batch):
                found += _singly(model, data.move_to(batch, distributed.device()))
            if len(found) >= count:
                break
    finally:
        if hasattr(batches, "close"):  # ends the workers of a pass that goes no further
            batches.close()
    return found


def _singly(model: GivesClips, batch: Mapping[str, Any]) -> Iterator[FixedClip]:
    video, x0, condition = model.clean_clips(batch)
    negative, origins = batch.get(NEGATIVE_TEXT_KEY), batch.get("__key__")
    for i, position in enumerate(batch[POSITION_KEY].tolist()):

        def part(value: Tensor, i: int = i) -> Tensor:
            return value[i : i + 1].cpu().clone()

        yield FixedClip(
            position=position,
            x0_1_C_T_H_W=part(x0),
            condition=condition.with_tensors(part),
            negative_text_1_S_E=None if negative is None else part(negative),
            fps=float(batch["fps"][i]),
            video_1_C_F_H_W=None if video is None else to_uint8(part(video)),
            origin=str(position if origins is None else origins[i]),
        )
