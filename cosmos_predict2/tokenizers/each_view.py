# SPDX-License-Identifier: Apache-2.0
"""A tokenizer of clips whose views lie below each other (`data.views`): it is shown one view at a time, so that no
latent has seen two cameras."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cosmos_predict2.interfaces import VideoTokenizer


class EachView:
    """``tokenizer`` on each of ``num_views``; in all else it is that one."""

    decode_groups = None  # whole clips are decoded

    def __init__(self, tokenizer: VideoTokenizer, num_views: int) -> None:
        self.tokenizer, self.num_views = tokenizer, num_views

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # of an object in the making, such as a copy
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def encode(self, video_B_C_F_H_W: Tensor) -> Tensor:
        return self._of_each(self.tokenizer.encode, video_B_C_F_H_W)

    def decode(self, latent_B_C_T_H_W: Tensor) -> Tensor:
        return self._of_each(self.tokenizer.decode, latent_B_C_T_H_W)

    def _of_each(self, function: Callable[[Tensor], Tensor], x_B_C_T_H_W: Tensor) -> Tensor:
        return torch.cat([function(view) for view in x_B_C_T_H_W.chunk(self.num_views, dim=3)], dim=3)
