# SPDX-License-Identifier: Apache-2.0
"""Features of a picture by CLIP, as Wan2.1's image to video reads them beside the text."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cosmos_predict2.text import pretrained, wan_files
from cosmos_predict2.text.qwen_vl import MEAN, STD
from imaginaire import storage
from imaginaire.checkpoint import weights
from imaginaire.errors import CheckpointError

PREFIX = "vision_model."  # of names in public folders, and in older versions of the package


class ClipImageEncoder:
    """The vision half of CLIP, from the folder ``image_encoder`` of a diffusers pipeline, or from that of Wan2.1's own
    repository."""

    def __init__(
        self, path: str, *, dtype: str | torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> None:
        if not storage.is_folder(path):
            raise CheckpointError(
                f"The image encoder's folder {path} does not exist: it is part of Wan-AI/Wan2.1-I2V-14B-480P-Diffusers."
            )
        package = pretrained.transformers()
        path = wan_files.file_in(path, wan_files.CLIP) or path
        if wan_files.is_original(path):
            config = package.CLIPVisionConfig(**wan_files.clip_settings(path))
        else:
            config = pretrained.config_of(package.CLIPVisionConfig, path)
        with torch.device("meta"):
            prefix = PREFIX if hasattr(package.CLIPVisionModel(config), "vision_model") else ""
        source = weights.renamed(encoder_weights(path), lambda name: prefix + name)
        self._model: Any = pretrained.load(
            lambda: package.CLIPVisionModel(config), source, path, dtype=pretrained.dtype_of(dtype), device=device
        )
        for name, buffer in self._model.named_buffers():
            if name.endswith("position_ids"):  # it is in no file
                buffer.copy_(torch.arange(buffer.shape[-1], device=device)[None])
        self._side = int(config.image_size)

    @torch.no_grad()
    def encode(self, picture_B_C_H_W: Tensor) -> Tensor:
        """[B, 1 + patches, width] float32 of pictures in [-1, 1], squeezed to a square: what the last block but one
        gives."""
        size = (self._side, self._side)
        square = F.interpolate(picture_B_C_H_W.float(), size=size, mode="bicubic", align_corners=False)
        mean, std = (square.new_tensor(values)[:, None, None] for values in (MEAN, STD))
        pixels = ((square / 2 + 0.5 - mean) / std).to(self._model.dtype)
        hidden: Tensor = self._model(pixel_values=pixels, output_hidden_states=True).hidden_states[-2]
        return hidden.float()

    def to(self, device: torch.device | str) -> "ClipImageEncoder":
        self._model.to(device)
        return self


def encoder_weights(path: str) -> Mapping[str, Tensor]:
    """The tensors of a folder, or of the file of Wan2.1's repository, by names without the prefix of older folders."""
    if wan_files.is_original(path):
        return wan_files.clip_tensors(path)
    return weights.renamed(
        weights.read(path), lambda name: None if name.endswith(".position_ids") else name.removeprefix(PREFIX)
    )
