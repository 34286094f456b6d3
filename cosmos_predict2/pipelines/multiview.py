# SPDX-License-Identifier: Apache-2.0
"""Several cameras of one scene at inference: a text for each view, and frames of each; the videos lie side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from cosmos_predict2.data.video import media
from cosmos_predict2.data.views import stacked
from cosmos_predict2.pipelines.video2world import Video2WorldPipeline, brought_to_size, input_files
from cosmos_predict2.text.prompt_embeddings import read_constant_embedding
from imaginaire.errors import ConfigError, DataError, raised_as

EMBEDDINGS = ".pt"  # of prompts: a file of embeddings [1, V * tokens, width]


class MultiviewPipeline(Video2WorldPipeline):
    """The input is one clip with the views one after another in time, as published ones are, or a file for each view,
    ``front.mp4+left.mp4``. Lines of a prompt are the texts of the views; where there is one, it is the front camera's,
    as in training."""

    def read(self, path: str, num_frames: int, size: tuple[int, int], start: int | None = None) -> Tensor:
        num_views = self.world.net.num_views
        files = input_files(path, num_views)
        if len(files) > 1:
            read = super().read
            return stacked([read(file, num_frames, size, start) for file in files])
        frames = media.read_video(path)[0]
        if frames.shape[1] % num_views:
            raise DataError(f"{path} has {frames.shape[1]} frames, which are not {num_views} views of equal length.")
        views = frames.chunk(num_views, dim=1)
        have, first = views[0].shape[1], start or 0
        if start is None:
            first = have - num_frames
        if first < 0 or first + num_frames > have:
            raise DataError(
                f"{path} has {have} frames of each view, but {num_frames} from frame {first} on are needed."
            )
        chosen = torch.stack(views)[:, :, first : first + num_frames]
        return stacked([brought_to_size(view, size, self.config.input_crop, "input") for view in chosen])

    def encode(self, prompts: Sequence[str], embeddings: Mapping[str, Tensor] | None = None) -> Tensor:
        return torch.stack([self._texts(prompt, embeddings) for prompt in prompts])

    def _texts(self, prompt: str, embeddings: Mapping[str, Tensor] | None) -> Tensor:
        """[V * S, E]; zeros for views without a line of their own."""
        num_views, width = self.world.net.num_views, self.world.net.text_channels
        if prompt.endswith(EMBEDDINGS):
            rows = read_constant_embedding(prompt)
            if len(rows) % num_views or rows.shape[1] != width:
                raise DataError(
                    f"{prompt} has embeddings [{len(rows)}, {rows.shape[1]}], but {num_views} views take as many tokens"
                    f" each, {width} wide."
                )
            return rows.to(self.device)
        lines = prompt.split("\n")
        if len(lines) > num_views or not any(lines):
            raise ConfigError(f"The prompt has {len(lines)} lines for {num_views} views: one each, empty for none.")
        found = self.world.encode_text([line for line in lines if line], embeddings)
        texts = torch.zeros(num_views, *found.shape[1:]).to(found)
        written = [i for i, line in enumerate(lines) if line]
        front: Any = self.world.net.front
        texts[written if lines[1:] else [front]] = found
        return texts.flatten(0, 1)

    def checked_video(self, video_1_C_F_H_W: Tensor) -> Tensor:
        """One view after another, as published: a filter shrinks what it sees to one small square."""
        num_views = self.world.net.num_views
        views = rearrange(video_1_C_F_H_W, "b c f (v h) w -> b c (v f) h w", v=num_views)
        return rearrange(super().checked_video(views), "b c (v f) h w -> b c f (v h) w", v=num_views)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of Video2World, with the views side by side, [1, 3, F, H, V * W]."""
        made = super().__call__(*args, **kwargs)
        video, *rest = made if isinstance(made, tuple) else (made,)
        video = rearrange(video, "b c f (v h) w -> b c f h (v w)", v=self.world.net.num_views)
        return (video, *rest) if rest else video


def prompt_of_file(path: str, num_views: int) -> str:
    """The prompt of a .txt with a line for each view, of which empty ones have no text; any other prompt as it is."""
    if not path.endswith(".txt"):
        return path
    with raised_as(DataError, f"--prompt {path} cannot be read", OSError, UnicodeDecodeError):
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    if len(lines) != num_views or not any(lines):
        raise ConfigError(
            f"--prompt {path} has {len(lines)} lines for {num_views} views: one for each, empty for none."
        )
    return "\n".join(lines)
