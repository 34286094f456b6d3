# SPDX-License-Identifier: Apache-2.0
"""One sample with actions: what it refuses, with the file that it is of."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from cosmos_predict2.actions.transforms import controller
from cosmos_predict2.data.action_conditioned.items import Windows, action_item
from imaginaire.errors import DataError


def item(video: torch.Tensor, actions: torch.Tensor) -> dict[str, Any]:
    return action_item(
        video, actions, transform=controller(3), key="episode_7", annotation="data/7.parquet", video_path="7.mp4"
    )


CLIP = torch.zeros(3, 5, 16, 16, dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(5, 3), (3, 3), (4,), (0, 3)])
def test_actions_that_do_not_fit_the_frames_are_an_error_with_the_file(shape: tuple[int, ...]) -> None:
    assert item(CLIP, torch.zeros(4, 3))["action"].shape == (4, 3)
    with pytest.raises(DataError, match=r"7\.parquet") as caught:
        item(CLIP, torch.zeros(shape))
    assert str(list(shape)) in str(caught.value)


def test_a_clip_that_is_not_of_bytes_is_an_error_with_the_file() -> None:
    with pytest.raises(DataError, match=r"data/7\.parquet"):
        item(CLIP.float(), torch.zeros(4, 3))


@pytest.mark.parametrize("every", [1, 2])
def test_chosen_windows_are_of_all_recordings_and_overlap_only_where_there_are_too_few(every: int) -> None:
    lengths = [60, 9, 10, 33, 200]
    windows = Windows(lengths, 5, stride=2, every=every, what="x")  # of 9 frames each
    apart = sum(1 + (length - 9) // every * every // (9 + (every - 1)) for length in lengths)
    assert windows.num_recordings == 5 and windows.num_apart == apart
    for num in (1, 3, 5, 12, windows.num_apart, len(windows), 9999):
        chosen = windows.spread(num)
        assert len(chosen) == len(set(chosen)) == min(num, len(windows)) and chosen == sorted(chosen)
        places = [(recording, int(frames[0])) for recording, frames in map(windows.__getitem__, chosen)]
        assert len({recording for recording, _ in places}) == min(num, 5)
        gaps = [b[1] - a[1] for a, b in pairwise(places) if a[0] == b[0]]
        assert (min(gaps, default=9) >= 9) == (num <= windows.num_apart)
