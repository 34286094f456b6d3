# SPDX-License-Identifier: Apache-2.0
"""One training sample with actions, the same for every source of robot data."""

from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

# Label of the frame rate in every sample with actions: published action-conditioned weights know no other, whatever
# rate the robot was recorded at.
ACTION_FPS = 4.0


def action_item(
    video: Tensor,
    actions: Tensor | NDArray[Any],
    *,
    key: str,
    annotation: str,
    fps: float = ACTION_FPS,
    embedding: tuple[Tensor, Tensor] | None = None,
    caption: str = "",
    video_path: str = "",
    embedding_path: str = "",
    num_tokens: int = 512,
    text_width: int = 1024,
) -> dict[str, Any]:
    """The sample of a clip uint8 [3, F, H, W] and its F - 1 scaled actions [F - 1, d].

    ``embedding`` is the text's [num_tokens, text_width] with its mask; without one the text is zeros that are all seen
    (mask of ones), which is what action-conditioned weights are trained and run with. All tensors are on the CPU.
    """
    _, num_frames, height, width = video.shape
    action = torch.as_tensor(numpy.asarray(actions), dtype=torch.float32)
    assert video.dtype == torch.uint8, video.dtype
    assert action.ndim == 2 and len(action) == num_frames - 1, (tuple(action.shape), num_frames)
    text, mask = no_text(num_tokens, text_width) if embedding is None else embedding
    return {
        "video": video,
        "action": action,
        "t5_text_embeddings": text,
        "t5_text_mask": mask,
        "fps": float(fps),
        "image_size": torch.tensor([height, width, height, width]),
        "num_frames": num_frames,
        "padding_mask": torch.zeros(1, height, width),
        "ai_caption": caption,
        "annotation_file": annotation,
        "__key__": key,
        "video_name": {"video_path": video_path, "t5_embedding_path": embedding_path},
    }


def no_text(num_tokens: int = 512, width: int = 1024) -> tuple[Tensor, Tensor]:
    """The embedding float32 [num_tokens, width] of "no text" and its mask int64 [num_tokens]."""
    return torch.zeros(num_tokens, width), torch.ones(num_tokens, dtype=torch.int64)
