# SPDX-License-Identifier: Apache-2.0
"""Pictures, sentences and states for PI0.5, and its actions, exactly as published.

Everything is float32 or integers; pictures stay uint8 until the network takes them.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from cosmos_predict2.actions.statistics import refuse_impossible
from cosmos_predict2.text import pretrained
from imaginaire.checkpoint.weight_files import below, local_file, names_at
from imaginaire.errors import CheckpointError, first_line, optional_module

log = logging.getLogger(__name__)

_EPS = 1e-6
_STATE_BINS = numpy.linspace(-1, 1, 257)[:-1]
_SENTENCEPIECE, _FAST = ("tokenizer.model", "paligemma_tokenizer.model", "spiece.model"), "tokenizer.json"
Encode = Callable[[str, bool], Sequence[int]]  # a text, and whether it begins a sequence


# --- pictures


def resize_with_pad(pictures_B_H_W_C: Tensor, height: int, width: int, fill: int = 0) -> Tensor:
    """uint8 pictures in a frame of this size: as large as fits, in the middle of ``fill``; by PIL, to the last bit."""
    if pictures_B_H_W_C.shape[1:3] == (height, width):
        return pictures_B_H_W_C
    from PIL import Image

    old_height, old_width = pictures_B_H_W_C.shape[1:3]
    ratio = max(old_width / width, old_height / height)
    new_height, new_width = int(old_height / ratio), int(old_width / ratio)
    top, left = (height - new_height) // 2, (width - new_width) // 2
    framed = pictures_B_H_W_C.new_full((len(pictures_B_H_W_C), height, width, 3), fill)
    for i, picture in enumerate(pictures_B_H_W_C.cpu().numpy()):
        resized = Image.fromarray(picture).resize((new_width, new_height), Image.Resampling.BILINEAR)
        framed[i, top : top + new_height, left : left + new_width] = torch.from_numpy(numpy.array(resized))
    return framed


def pixels(pictures_B_V_H_W_C: Tensor) -> Tensor:
    """uint8 pictures as the network takes them: [B, V, 3, H, W] in [-1, 1]."""
    return pictures_B_V_H_W_C.float().permute(0, 1, 4, 2, 3) / 127.5 - 1


def augmented(pixels_B_V_C_H_W: Tensor, generator: torch.Generator) -> Tensor:
    """Pictures as openpi clones on them, one draw of each view for a batch: the first view is cropped to .95 of its
    sides and turned by up to 5 degrees, all have another brightness, contrast and saturation."""
    views = []
    for v, view in enumerate((pixels_B_V_C_H_W / 2 + 0.5).unbind(1)):

        def draw(low: float, high: float) -> float:
            return low + (high - low) * float(torch.rand((), generator=generator))

        if v == 0:
            height, width = view.shape[-2:]
            rows, columns = int(0.95 * height), int(0.95 * width)
            top, left = (int(torch.randint(n + 1, (), generator=generator)) for n in (height - rows, width - columns))
            cropped = view[..., top : top + rows, left : left + columns]
            view = F.interpolate(cropped, (height, width), mode="bilinear", align_corners=False)
            view = _rotated(view, math.radians(draw(-5, 5)))
        view = view * draw(0.7, 1.3)
        mean_B_1_1_1 = view.mean(dim=(1, 2, 3), keepdim=True)
        view = (view - mean_B_1_1_1) * draw(0.6, 1.4) + mean_B_1_1_1
        grey_B_1_H_W = view.mean(dim=1, keepdim=True)
        views.append(grey_B_1_H_W + (view - grey_B_1_H_W) * draw(0.5, 1.5))
    return torch.stack(views, dim=1).clamp(0, 1) * 2 - 1


def _rotated(view_B_C_H_W: Tensor, angle: float) -> Tensor:
    """About the middle, black outside; places go from -1 at the first pixel to 1 at the last, as published."""
    y, x = (torch.linspace(-1, 1, size, device=view_B_C_H_W.device) for size in view_B_C_H_W.shape[-2:])
    y_H_W, x_H_W = torch.meshgrid(y, x, indexing="ij")
    cos, sin = math.cos(angle), math.sin(angle)
    grid_H_W_2 = torch.stack([x_H_W * cos - y_H_W * sin, x_H_W * sin + y_H_W * cos], dim=-1)
    grid_B_H_W_2 = grid_H_W_2.expand(len(view_B_C_H_W), -1, -1, -1).to(view_B_C_H_W)
    return F.grid_sample(view_B_C_H_W, grid_B_H_W_2, mode="bilinear", padding_mode="zeros", align_corners=False)


# --- numbers


@dataclass(frozen=True)
class Quantiles:
    """The 1 % and 99 % quantiles of each number, which are -1 and 1 to the model."""

    q01: Tensor
    q99: Tensor
    epsilon: float = _EPS  # added to their difference, as openpi does; 0: as lerobot has it

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Quantiles":
        q01, q99 = (torch.tensor(content[name], dtype=torch.float32) for name in ("q01", "q99"))
        return cls(q01, q99, float(content.get("epsilon", _EPS)))

    def normalised(self, values: Tensor) -> Tensor:
        """Not clipped; numbers beyond the statistics are left as they are."""
        values, q01, width = self._parts(values)
        scaled = 2 * (values[..., : len(q01)] - q01) / width - 1
        return torch.cat([scaled, values[..., len(q01) :]], dim=-1)

    def restored(self, values: Tensor) -> Tensor:
        values, q01, width = self._parts(values)
        scaled = 0.5 * (values[..., : len(q01)] + 1) * width + q01
        return torch.cat([scaled, values[..., len(q01) :]], dim=-1)

    def _parts(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In float32, and of as many statistics as there are numbers q01 and the width up to q99, above 0."""
        count = min(values.shape[-1], len(self.q01))
        q01, q99 = self.q01[:count].to(values.device), self.q99[:count].to(values.device)
        width = q99 - q01 + self.epsilon
        return values.float(), q01, width.where(width != 0, 1e-8)


def quantiles_of(content: Mapping[str, Any], file: str) -> tuple[Quantiles, Quantiles]:
    """The quantiles of states and of actions."""
    try:
        for name in ("state", "actions"):
            refuse_impossible(content[name], f"{file}: {name}", CheckpointError)
        return Quantiles.of(content["state"]), Quantiles.of(content["actions"])
    except CheckpointError:
        raise
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{file} has no norm_stats.state and norm_stats.actions with q01 and q99: {error!r}"
        ) from error


# --- words


def prompt_text(task: str, state_S: Tensor | None) -> str:
    """The sentence that is encoded; ``state_S`` is normalised, or None where the model was trained without it."""
    text = task.strip().replace("_", " ").replace("\n", " ")
    if state_S is None:
        return text
    bins = numpy.digitize(state_S.cpu().numpy(), _STATE_BINS) - 1
    return f"Task: {text}, State: {' '.join(map(str, bins))};\nAction: "


def prompt_ids(encode: Encode, task: str, state_S: Tensor | None) -> list[int]:
    """Without a state, the end of the line is encoded by itself, as published."""
    ids = list(encode(prompt_text(task, state_S), True))
    return ids if state_S is not None else [*ids, *encode("\n", False)]


def prompt_tokens(encode: Encode, task: str, state_S: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
    """Ids and mask [L]."""
    ids = prompt_ids(encode, task, state_S)
    if len(ids) > length:
        log.warning("a prompt of %d tokens is cut to max_token_len=%d: %s", len(ids), length, task)
        ids = ids[:length]
    padded = torch.zeros(length, dtype=torch.long)
    padded[: len(ids)] = torch.tensor(ids)
    return padded, torch.arange(length) < len(ids)


def tokenizer_of(folder: str) -> Encode:
    """The tokenizer that lies beside the weights: sentencepiece's file, or transformers' one."""
    names = names_at(folder)
    for name in _SENTENCEPIECE:
        if name in names:
            return _sentencepiece(str(local_file(below(folder, name))))
    if _FAST not in names:
        raise CheckpointError(
            f"{folder} has no tokenizer ({', '.join([*_SENTENCEPIECE, _FAST])}). PI0.5 has PaliGemma's: copy"
            " tokenizer.model of google/paligemma-3b-pt-224 there, or openpi's paligemma_tokenizer.model."
        )
    file = local_file(below(folder, _FAST))
    try:
        tokenizer = pretrained.transformers().PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<bos>")
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"{folder}/{_FAST} is damaged, or no tokenizer: {first_line(error)}.") from error

    def encode(text: str, begins: bool) -> Sequence[int]:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        return [tokenizer.bos_token_id, *ids] if begins else ids

    return encode


def _sentencepiece(file: str) -> Encode:
    sentencepiece = optional_module("sentencepiece", "weights")
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=file)
    except (RuntimeError, OSError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged, or no tokenizer of SentencePiece: {first_line(error)}.") from error
    return lambda text, begins: processor.encode(text, add_bos=begins)
