# SPDX-License-Identifier: Apache-2.0
"""Common parts of judges that ask a Qwen-VL: place and precision, weights, wording, and clips in batches."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.rl.interfaces import Clips
from cosmos_predict2.rl.rewards.verifiable import _video
from cosmos_predict2.text import pretrained
from cosmos_predict2.text.qwen_vl import VideoQuestion
from imaginaire.errors import ConfigError

log = logging.getLogger(__name__)


def place_and_dtype(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Those that are named, else a GPU in bfloat16 where there is one, else the CPU in float32."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = pretrained.dtype_of(dtype or ("bfloat16" if place.type == "cuda" else "float32"))
    assert chosen is not None
    return place, chosen


def loaded(
    make: Callable[[], Any],
    source: Mapping[str, Tensor],
    path: str,
    place: tuple[torch.device, torch.dtype],
    allow_missing: Sequence[str] = (),
) -> Any:
    """The network that ``make`` builds, with these weights; ``place`` is of `place_and_dtype`."""
    device, dtype = place
    network: Any = pretrained.load(make, source, path, allow_missing=allow_missing, dtype=dtype, device=device)
    # Their tables are in no file, and must not be rounded to the weights' dtype.
    text, vision = network.model.language_model, network.model.visual
    text.rotary_emb = type(text.rotary_emb)(text.config).to(device)
    vision.rotary_pos_emb = type(vision.rotary_pos_emb)(vision.config).to(device)
    return network


def wording(key: str, path: str, own: str, parts: Sequence[str] = ()) -> str:
    """The text of the file that the argument ``key`` names, with each of ``parts`` in it once; without one ``own``."""
    if not path:
        log.warning("%s is not set: a judge reads our wording, and its scores differ from the published ones", key)
        return own
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{key} {path} cannot be read: {error}. Give the file of the published wording.") from error
    if lost := [part for part in parts if text.count(part) != 1]:
        raise ConfigError(f"{key} {path}: expected {lost[0]} in it once.")
    return text


def in_batches(
    clips: Clips,
    question_of: Callable[[Tensor, float, str], VideoQuestion],
    judged: Callable[[Sequence[VideoQuestion]], Tensor],
    clips_at_once: int,
) -> Tensor:
    """[B, N]: what ``judged`` gives for each clip; those whose questions have one form are judged together.

    ``question_of`` makes the question of a video [3, F, H, W], its frame rate and its prompt.
    """
    pairs = zip(_video(clips), clips.prompts, strict=True)
    questions = [question_of(video, clips.fps, prompt) for video, prompt in pairs]
    alike: dict[Any, list[int]] = {}
    for k, question in enumerate(questions):
        alike.setdefault(question.form(), []).append(k)
    found: dict[int, Tensor] = {}
    for group in alike.values():
        for start in range(0, len(group), clips_at_once):
            rows = group[start : start + clips_at_once]
            found |= zip(rows, judged([questions[k] for k in rows]), strict=True)
    return torch.stack([found[k] for k in range(len(questions))])
