# SPDX-License-Identifier: Apache-2.0
"""Windows of recordings, of which a few are chosen for an evaluation."""

from itertools import pairwise

import pytest

from cosmos_predict2.data.clip_dataset import Windows
from imaginaire.errors import DataError


def test_no_recordings_are_an_error_of_the_data() -> None:
    with pytest.raises(DataError, match="0 recordings"):
        Windows([], 5, stride=2, what="x")


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
