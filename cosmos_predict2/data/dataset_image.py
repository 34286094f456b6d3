# SPDX-License-Identifier: Apache-2.0
"""Training pictures from a folder of images with text embeddings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from cosmos_predict2.data.samples import BadSamples, frame_item
from cosmos_predict2.data.video.clips import scaled
from cosmos_predict2.data.video.media import IMAGE_SUFFIXES, read_image
from cosmos_predict2.data.video_folder import OF_FOLDER, CaptionedFolder, list_captioned
from cosmos_predict2.tokenizers.sizes import size_problem
from imaginaire.data.facts import DataFacts
from imaginaire.errors import ConfigError
from imaginaire.findings import CheckContext, Finding, errors, refusals

FILES = ("images", IMAGE_SUFFIXES, "pictures")
IMAGE_FPS = 16.0  # what the published training writes into a picture's sample


class ImageDataset(Dataset[dict[str, Any]]):
    """One sample per picture of ``images/`` (jpg, png, webp): ``images`` float32 [3, H, W], -1 to 1.

    A picture is scaled straight to ``image_size`` (height, width). A bad one is an error that names it, or with
    ``skip_bad_samples`` replaced by the next good one; `image_name` names the picture.
    """

    def __init__(
        self,
        dataset_dir: str,
        image_size: Sequence[int],
        *,
        skip_bad_samples: bool = False,
        most_bad_samples: int = 16,
        num_tokens: int = 512,
        text_encoder: str | None = None,
    ) -> None:
        if problem := size_problem("image_size", image_size):
            raise ConfigError(problem)
        self.image_size = (int(image_size[0]), int(image_size[1]))
        self._bad = BadSamples(skip_bad_samples, most_bad_samples)
        self.folder = CaptionedFolder(
            dataset_dir, *FILES, skip_bad=skip_bad_samples, text_encoder=text_encoder, num_tokens=num_tokens
        )

    @classmethod
    def check(cls, arguments: Mapping[str, Any], context: CheckContext) -> Iterator[Finding]:
        """Findings that need no picture opened."""
        yield from errors(context.key, [size_problem("image_size", arguments.get("image_size", (16, 16)))])
        text: dict[str, Any] = {name: arguments.get(name) for name in ("text_encoder", "num_tokens")}
        yield from refusals(context.key, lambda: list_captioned(arguments.get("dataset_dir", ""), *FILES, **text))

    @classmethod
    def facts(cls, arguments: Mapping[str, Any]) -> DataFacts:
        return DataFacts(kind=OF_FOLDER, has_actions=False)

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._bad.read(index, len(self), self._item)

    def _item(self, index: int) -> dict[str, Any]:
        path = self.folder.path(index)
        text = self.folder.text(index)
        return {
            "images": scaled(read_image(path), self.image_size).clamp_(0, 1).mul_(2).sub_(1),
            "image_name": {"image_path": str(path), "t5_embedding_path": text.path},
            **text.item(),
            "fps": torch.tensor([IMAGE_FPS]),
            "num_frames": torch.tensor([1.0]),
            **frame_item(self.image_size),
        }
