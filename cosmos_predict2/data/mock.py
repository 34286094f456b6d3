# SPDX-License-Identifier: Apache-2.0
"""Random videos and images with the keys of real ones, to try out or to time training without any data.

The values of item i follow from (seed, i) alone, so they repeat, in any number of processes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from cosmos_predict2.actions.transforms import controller
from cosmos_predict2.data.clip_dataset import TRANSFORM_KEY
from cosmos_predict2.data.samples import frame_item, place_of, text_item
from imaginaire import random
from imaginaire.data.facts import DataFacts, known, with_defaults
from imaginaire.errors import ConfigError

NUM_ITEMS = 32768
KIND = "mock data"


class MockVideos(Dataset[dict[str, Any]]):
    """Noise in the form of video clips: ``video`` uint8 [3, num_frames, height, width]."""

    def __init__(
        self,
        num_items: int = NUM_ITEMS,
        num_frames: int = 93,
        video_size: Sequence[int] = (432, 768),
        num_tokens: int = 512,
        width: int = 1024,
        fps: float = 24.0,
        action_shape: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        _check(num_items=num_items, num_frames=num_frames, num_tokens=num_tokens, width=width)
        self.num_items = num_items
        self.num_frames = num_frames
        self.size = _size(video_size, "video_size")
        self.fps = float(fps)
        self._text = (num_tokens, width)
        self._action_shape = None if action_shape is None else tuple(action_shape)
        self._seed = seed

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        options = with_defaults(cls, arguments)
        shape = options["action_shape"]
        return DataFacts(
            kind=KIND,
            has_actions=shape is not None,
            transform=known(lambda: None if shape is None else controller(int(shape[-1]), scale=1.0)),
            read_rate=lambda: float(options["fps"]),
        )

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = random.generator(self._seed, place_of(index, len(self)), "mock video")
        height, width = self.size
        video = torch.randint(255, (3, self.num_frames, height, width), dtype=torch.uint8, generator=generator)
        item = {
            "video": video,
            **_text(*self._text, generator),
            "fps": self.fps,
            "num_frames": self.num_frames,
            **frame_item(self.size),
            "ai_caption": "placeholder",
            "dataset_name": "video_data",
            "chunk_index": 0,
            "frame_start": 0,
            "frame_end": self.num_frames,
            "n_orig_video_frames": 0,
            "__url__": "",
            "__key__": f"mock_video/{index % self.num_items:06d}",
        }
        if self._action_shape is not None:
            item["action"] = torch.randn(self._action_shape, generator=generator)
            item[TRANSFORM_KEY] = controller(self._action_shape[-1], scale=1.0).to_json()
        return item


class MockImages(Dataset[dict[str, Any]]):
    """Noise in the form of images: ``images`` float32 [3, height, width] in [-1, 1]."""

    def __init__(
        self,
        num_items: int = NUM_ITEMS,
        image_size: Sequence[int] = (432, 768),
        num_tokens: int = 512,
        width: int = 1024,
        seed: int = 0,
    ) -> None:
        _check(num_items=num_items, num_tokens=num_tokens, width=width)
        self.num_items = num_items
        self.size = _size(image_size, "image_size")
        self._text = (num_tokens, width)
        self._seed = seed

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        return DataFacts(kind=KIND, has_actions=False)

    def __len__(self) -> int:
        return self.num_items

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = random.generator(self._seed, place_of(index, len(self)), "mock image")
        height, width = self.size
        return {
            # The published mock draws from a normal distribution, which leaves the range that pixels have.
            "images": torch.rand(3, height, width, generator=generator) * 2 - 1,
            **_text(*self._text, generator),
            "fps": 1.0,
            "num_frames": 1,
            **frame_item(self.size),
            "raw_captions": "placeholder",
            "dataset_name": "image_data",
            "__url__": "",
            "__key__": f"mock_image/{index % self.num_items:06d}",
        }


def _text(num_tokens: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    embedding = torch.randn(num_tokens, width, generator=generator)
    return text_item(embedding, torch.randint(2, (num_tokens,), generator=generator))


def _size(size: Sequence[int], name: str) -> tuple[int, int]:
    if len(size) != 2 or min(size) < 1:
        raise ConfigError(f"{name}={list(size)}; it is two numbers above 0, height and width.")
    return int(size[0]), int(size[1])


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ConfigError(f"{name}={number}; it must be at least 1.")
