# SPDX-License-Identifier: Apache-2.0
"""Pictures as the towers of OpenVLA see them: brought to size as uint8 by PIL, and normalised later, on the device.

What is brought to size is what records hold: it takes a quarter of the memory of what the towers compute with.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from imaginaire.errors import CheckpointError, near

CONFIG = "preprocessor_config.json"
STRATEGIES = ("resize-naive", "letterbox", "resize-crop")
CROP_AREA = 0.9
Picture = NDArray[numpy.uint8]


def center_crop(picture: Picture, size: int, area: float = CROP_AREA) -> Picture:
    """The middle of a picture [H, W, 3], ``area`` of it, at size x size."""
    from PIL import Image

    height, width = picture.shape[:2]
    rows, columns = int(height * math.sqrt(area)), int(width * math.sqrt(area))
    top, left = (height - rows) // 2, (width - columns) // 2
    cropped = Image.fromarray(picture[top : top + rows, left : left + columns])
    return numpy.asarray(cropped.resize((size, size), Image.Resampling.BILINEAR))


@dataclass(frozen=True)
class Resize:
    """How a tower's pictures are brought to size."""

    strategy: str
    size: int
    interpolation: str
    fill: tuple[int, ...]  # of a letterbox

    def __call__(self, picture: Picture) -> Picture:
        from PIL import Image

        image = Image.fromarray(picture)
        resample = Image.Resampling[self.interpolation.upper()]
        if self.strategy == "letterbox":
            image = self._boxed(image)
        if self.strategy == "resize-naive":
            return numpy.asarray(image.resize((self.size, self.size), resample))
        width, height = image.size
        shorter = min(width, height)
        sides = tuple(int(self.size * side / shorter) for side in (width, height))
        image = image.resize((sides[0], sides[1]), resample)
        left, top = (round((side - self.size) / 2) for side in sides)
        return numpy.asarray(image.crop((left, top, left + self.size, top + self.size)))

    def _boxed(self, image: Any) -> Any:
        from PIL import Image

        longest = max(image.size)
        left, top = (int((longest - side) / 2) for side in image.size)
        boxed = Image.new("RGB", (image.width + 2 * left, image.height + 2 * top), self.fill)
        boxed.paste(image, (left, top))
        return boxed


@dataclass(frozen=True)
class Preprocessor:
    """Of a checkpoint's preprocessor_config.json; one entry for each tower."""

    resizes: tuple[Resize, ...]
    means: tuple[tuple[float, ...], ...]
    stds: tuple[tuple[float, ...], ...]
    crops: bool = False  # to the middle beforehand, as policies are evaluated that were trained on random crops

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str, crops: bool = False) -> "Preprocessor":
        try:
            strategy, means, stds = config["image_resize_strategy"], config["means"], config["stds"]
            sizes, interpolations = config["input_sizes"], config["interpolations"]
        except KeyError as error:
            raise CheckpointError(
                f"{source} has no {error}, which says how pictures are brought to size. Copy the published file there."
            ) from None
        if strategy not in STRATEGIES:
            raise CheckpointError(f"{source}: image_resize_strategy is '{strategy}'.{near(strategy, STRATEGIES)}")
        fill = tuple(int(255 * value) for value in means[-1])  # one frame for all towers, as published: of the last
        resizes = tuple(Resize(strategy, size[-1], name, fill) for size, name in zip(sizes, interpolations))
        return cls(resizes, tuple(map(tuple, means)), tuple(map(tuple, stds)), crops)

    @property
    def kinds(self) -> tuple[Resize, ...]:
        """Resizes that differ; towers mostly share one."""
        return tuple(dict.fromkeys(self.resizes))

    def resized(self, views_E_V_H_W_C: Tensor) -> Tensor:
        """uint8 pictures [E, V, H, W, 3] as [E, V, kinds, 3, size, size], still uint8."""
        flat = views_E_V_H_W_C.flatten(0, 1).cpu().numpy()
        if self.crops:
            flat = numpy.stack([center_crop(picture, self.resizes[0].size) for picture in flat])
        of_kinds = numpy.stack([numpy.stack([resize(picture) for picture in flat]) for resize in self.kinds], axis=1)
        pictures = torch.from_numpy(of_kinds).permute(0, 1, 4, 2, 3).contiguous()
        return pictures.unflatten(0, views_E_V_H_W_C.shape[:2])

    def normalized(self, resized_E_V_R_C_H_W: Tensor) -> Tensor:
        """What the towers see, float32 [E, V * towers * 3, size, size]: of each view the channels of each tower."""
        scaled = resized_E_V_R_C_H_W.float() / 255
        towers = []
        for resize, mean, std in zip(self.resizes, self.means, self.stds):
            of_tower = scaled[:, :, self.kinds.index(resize)]
            mean_3_1_1, std_3_1_1 = (of_tower.new_tensor(value)[:, None, None] for value in (mean, std))
            towers.append((of_tower - mean_3_1_1) / std_3_1_1)
        return torch.stack(towers, dim=2).flatten(1, 3)
