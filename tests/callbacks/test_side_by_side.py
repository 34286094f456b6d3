# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch import Tensor

from cosmos_predict2.callbacks.draw_samples import GAP, HEADER, side_by_side


def clip(value: int, frames: int = 3, height: int = 4, width: int = 6) -> Tensor:
    return torch.full((3, frames, height, width), value, dtype=torch.uint8)


def test_clips_lie_under_their_names_row_by_row() -> None:
    video = side_by_side([[clip(10), clip(20)], [clip(30), clip(40)]], ["truth", "ema"], least=6)
    assert video.shape == (3, 3, HEADER + 2 * (4 + GAP), 3 * GAP + 12)
    for row, column, value in ((0, 0, 10), (0, 1, 20), (1, 0, 30), (1, 1, 40)):
        top, left = HEADER + row * (4 + GAP), GAP + column * (6 + GAP)
        assert (video[:, :, top : top + 4, left : left + 6] == value).all()
        assert (video[:, :, top + 4, left] == 255).all()
    assert (video[:, 0, :HEADER] < 128).any(), "the names are there"


def test_a_shorter_clip_holds_its_last_frame() -> None:
    moving = torch.stack([clip(value, frames=1)[:, 0] for value in (1, 2)], dim=1)
    video = side_by_side([[clip(9, frames=4), moving]], ["a", "b"], least=6)
    assert video[0, :, HEADER, -GAP - 1].tolist() == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("size", "shown"), [((48, 48), (192, 192)), ((704, 1280), (281, 512)), ((200, 300), (200, 300))]
)
def test_small_clips_are_magnified_and_large_ones_reduced(size: tuple[int, int], shown: tuple[int, int]) -> None:
    video = side_by_side([[clip(1, 1, *size)]], ["a"])
    assert video.shape[-2:] == (HEADER + GAP + shown[0], 2 * GAP + shown[1])
