# SPDX-License-Identifier: Apache-2.0
"""Windows of clips in one size, as the data sets of clips read them: `FrameRule` and crop in one object."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor

from cosmos_predict2.data.samples import FrameRule
from cosmos_predict2.data.sizes import size_problem
from cosmos_predict2.data.video import clips
from imaginaire.errors import ConfigError, DataError, near


class Windows:
    """Reads ``num_frames`` frames of a clip, drawn when they are asked for, scaled to ``video_size`` (height, width).

    fps, stride, sampling: which frames, see `FrameRule`; draws come from NumPy's global generator, which the loader
    seeds per sample. crop: ``stretch`` scales to the size whatever the shape, as the published training does;
    ``center`` keeps the shape and cuts off what is over (generation with the run's weights then treats its input
    alike).
    """

    def __init__(
        self,
        num_frames: int,
        video_size: Sequence[int],
        *,
        fps: float | None = None,
        stride: int = 1,
        sampling: str = "random",
        crop: str = "stretch",
        decoder: str = "auto",
        num_threads: int = 1,
    ) -> None:
        if problem := size_problem("video_size", video_size) or crop_problem(crop):
            raise ConfigError(problem)
        self.rule = FrameRule(num_frames=num_frames, fps=fps, stride=stride, sampling=sampling)
        self.size = (int(video_size[0]), int(video_size[1]))
        self.crop = crop
        self._decoder = clips.choose_decoder(decoder)
        self._num_threads = num_threads

    @staticmethod
    def problems(arguments: Mapping[str, Any]) -> Iterator[str]:
        """What is wrong with these arguments of a data set, if anything; one that is absent has its default."""
        size, crop = arguments.get("video_size", (16, 16)), arguments.get("crop", "stretch")
        yield from filter(None, (size_problem("video_size", size), crop_problem(crop)))
        names = ("num_frames", "fps", "stride", "sampling")
        try:
            FrameRule(**{"num_frames": 1} | {name: arguments[name] for name in names if name in arguments})
        except ConfigError as problem:
            yield str(problem)
        try:
            clips.choose_decoder(arguments.get("decoder", "auto"))
        except ConfigError as problem:
            yield str(problem)

    def read(self, path: Path) -> tuple[Tensor, float]:
        """uint8 [3, num_frames, height, width] and the rate of these frames."""
        with clips.open_clip(path, decoder=self._decoder, num_threads=self._num_threads) as clip:
            try:
                frames = self.rule.choose(clip.num_frames, clip.fps, numpy.random.randint)
            except DataError as error:
                raise DataError(f"{path} has {error}") from error
            return clip.read(frames, self._fit), self.rule.item_fps(frames, clip.fps)

    def _fit(self, frames: Tensor) -> Tensor:
        return clips.CROPS[self.crop](frames, self.size)


def crop_problem(crop: str) -> str | None:
    return None if crop in clips.CROPS else f"There is no crop '{crop}'.{near(crop, clips.CROPS)}"
