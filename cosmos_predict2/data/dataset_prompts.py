# SPDX-License-Identifier: Apache-2.0
"""Prompts without clips: what a model may be asked for where a reward judges what it makes.

A text file has a prompt a line. A JSON Lines file has an object a line, as GenEval's: ``prompt``, and if wanted
``image``, a first frame (a path beside the file, or an address), and ``action``, a row from each frame to the next.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cosmos_predict2.actions.transforms import ActionTransform
from cosmos_predict2.data.clip_dataset import TRANSFORM_KEY, crop_problem
from cosmos_predict2.data.samples import PackedStrings, frame_item, place_of
from cosmos_predict2.data.video import clips
from cosmos_predict2.data.video.media import read_image
from cosmos_predict2.tokenizers.sizes import size_problem
from imaginaire import foreign_json, storage
from imaginaire.data.facts import DataFacts, known
from imaginaire.errors import ConfigError, DataError, raised_as
from imaginaire.findings import CheckContext, Finding, errors, refusals

TRUE_FRAMES_KEY = "num_true_frames"  # of a sample: how many of its frames are true; the others only fill its clip
JSON_SUFFIXES = (".jsonl", ".json")


class PromptDataset(Dataset[dict[str, Any]]):
    """A sample per prompt, of the form of a clip's: ``ai_caption``, and ``video`` with the first frame all over, or
    black where there is none. ``num_true_frames`` is 1 or 0.

    Prompts are encoded in training (``model.config.text.encoder``). ``action_transform``: the one that the actions of
    the file have been through, which makes them an ``action`` [num_frames - 1, d] of the sample.
    """

    def __init__(
        self,
        path: str,
        num_frames: int,
        video_size: Sequence[int],
        *,
        fps: float = 16.0,
        crop: str = "center",
        action_transform: Mapping[str, Any] | None = None,
        text_encoder: str = "none",
    ) -> None:
        if problem := next(self._problems(dict(video_size=video_size, crop=crop, text_encoder=text_encoder)), None):
            raise ConfigError(problem)
        self.path = path
        self.num_frames = num_frames
        self.size = (int(video_size[0]), int(video_size[1]))
        self.fps = float(fps)
        self.crop = crop
        self.action_transform = None if action_transform is None else ActionTransform.from_dict(action_transform)
        lines = read_prompts(path)
        self.num_true_frames = int("image" in lines[0][1])
        shape = None if self.action_transform is None else (num_frames - 1, self.action_transform.dim)
        for number, line in lines:
            _check_line(f"{path}, line {number}", line, bool(self.num_true_frames), shape)
        self._lines = PackedStrings([json.dumps(line) for _, line in lines])

    @staticmethod
    def _problems(arguments: Mapping[str, Any]) -> Iterator[str]:
        size, crop = arguments.get("video_size", (16, 16)), arguments.get("crop", "center")
        yield from filter(None, (size_problem("video_size", size), crop_problem(crop)))
        if (encoder := arguments.get("text_encoder", "none")) != "none":
            yield f"text_encoder={encoder}, but prompts are encoded in training: leave it out."

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """Findings about the arguments and the file; its pictures are not opened."""
        yield from errors(context.key, cls._problems(arguments))
        yield from refusals(context.key, lambda: read_prompts(arguments.get("path", "")))

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        given = arguments.get("action_transform")
        return DataFacts(
            kind="prompts",
            has_actions=given is not None,
            transform=known(lambda: None if given is None else ActionTransform.from_dict(given)),
            num_true_frames=known(lambda: int("image" in read_prompts(arguments["path"])[0][1])),
            read_rate=lambda: float(arguments.get("fps", 16.0)),
        )

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = place_of(index, len(self))
        line = foreign_json.loads(self._lines[index])
        item = {
            "video": self._first_frame(line).expand(3, self.num_frames, *self.size).contiguous(),
            TRUE_FRAMES_KEY: self.num_true_frames,
            "ai_caption": line["prompt"].strip(),
            "video_name": {"video_path": f"{self.path}: {index}", "t5_embedding_path": ""},
            "fps": self.fps,
            "num_frames": self.num_frames,
            **frame_item(self.size),
        }
        if self.action_transform is not None:
            item["action"] = torch.tensor(line["action"], dtype=torch.float32)
            item[TRANSFORM_KEY] = self.action_transform.to_json()
        return item

    def _first_frame(self, line: Mapping[str, Any]) -> Tensor:
        """uint8 [3, 1, height, width]."""
        if not self.num_true_frames:
            return torch.zeros(3, 1, *self.size, dtype=torch.uint8)
        image = line["image"]
        is_whole = storage.is_remote(image) or os.path.isabs(image)
        place = image if is_whole else storage.join(self.path.rpartition("/")[0] or ".", image)
        return clips.CROPS[self.crop](read_image(place)[:, None], self.size)


def read_prompts(path: str) -> list[tuple[int, dict[str, Any]]]:
    """(number from 1, content) of the lines of a file that are not empty; one at least."""
    if not path or not storage.exists(path):
        raise DataError(f"path={path!r}, but prompts are lines of a text file or of JSON Lines, which is not there.")
    is_json = path.lower().endswith(JSON_SUFFIXES)
    found = []
    for number, text in enumerate(storage.read_text(path).removeprefix("\ufeff").splitlines(), 1):
        if text.strip():
            found.append((number, _parsed(f"{path}, line {number}", text) if is_json else {"prompt": text}))
    if not found:
        raise DataError(f"{path} has no prompt.")
    return found


def _parsed(place: str, text: str) -> dict[str, Any]:
    with raised_as(DataError, f"{place} is no JSON", ValueError):
        line = foreign_json.loads(text)
    if not isinstance(line, dict) or not isinstance(line.get("prompt"), str) or not line["prompt"].strip():
        raise DataError(f'{place} has no prompt; expected is {{"prompt": "...", "image": "...", "action": [[...]]}}.')
    return line


def _check_line(place: str, line: Mapping[str, Any], has_image: bool, shape: tuple[int, int] | None) -> None:
    """Raise for a line of another form than the first one's, or whose actions do not fit the clip."""
    image = line.get("image")
    if has_image != isinstance(image, str):
        raise DataError(f"{place} has {'no image' if has_image else 'an image'}, but the first line is otherwise.")
    if shape is None:
        return
    with raised_as(DataError, f"{place} has no action of {shape[0]} rows of {shape[1]} numbers", TypeError, ValueError):
        found = tuple(torch.tensor(line.get("action"), dtype=torch.float32).shape)
    if found != shape:
        raise DataError(
            f"{place} has an action {list(found)}, but a clip of {shape[0] + 1} frames needs {list(shape)}."
        )
