# SPDX-License-Identifier: Apache-2.0
"""Frames of clips, windows of annotations and the order of samples against golden values."""

import numpy
import pytest

from cosmos_predict2.data.clip_dataset import Windows
from cosmos_predict2.data.samples import FrameRule
from imaginaire.errors import DataError
from tests.goldens import Value

AREA = "training"
RATE = 30.0  # of consecutive frames any will do


def _draws(total: int, num_frames: int, count: int) -> list[list[int]]:
    rule = FrameRule(num_frames=num_frames, sampling="reference")
    return [rule.choose(total, RATE, numpy.random.randint) for _ in range(count)]


@pytest.mark.golden_cases("frame_selection.json", "video_dataset")
def test_the_reference_draws_are_repeated(case: Value) -> None:
    total, num_frames = case["total_frames"].use(), case["num_frames"].use()
    numpy.random.seed(case["numpy_seed"].use())
    draws: list[list[int]] = []
    if total < num_frames:
        with pytest.raises(DataError, match=f"{total} frames, but num_frames={num_frames} needs {num_frames}"):
            _draws(total, num_frames, 1)
    elif total == num_frames:  # where the reference fails, the one start that there is
        assert _draws(total, num_frames, 3) == 3 * [list(range(total))]
    else:
        draws = _draws(total, num_frames, len(case["start_frames"]))
        assert all(frames == list(range(frames[0], frames[0] + num_frames)) for frames in draws)
    case["start_frames"].compare([frames[0] for frames in draws])
    case["reference_error"].compare(None if total > num_frames else "ValueError")


@pytest.mark.golden_cases("frame_selection.json", "video_dataset")
def test_our_own_draw_reaches_every_start_and_no_other(case: Value) -> None:
    total, num_frames = case["total_frames"].use(), case["num_frames"].use()
    for start in range(total - num_frames + 1):

        def draw(count: int, start: int = start) -> int:
            assert count == total - num_frames + 1
            return start

        frames = FrameRule(num_frames=num_frames).choose(total, RATE, draw)
        assert frames == list(range(start, start + num_frames))


@pytest.mark.golden_cases("frame_selection.json", "action_windows")
def test_the_windows_of_an_annotation_match(case: Value) -> None:
    windows = windows_of(
        case["n_states"].use(),
        case["num_frames"].use(),
        case["sequence_interval"].use(),
        case["start_frame_interval"].use(),
    )
    case["count"].compare(len(windows))
    case["first"].compare(windows[0] if windows else None)
    case["last"].compare(windows[-1] if windows else None)
    case["all_starts"].compare([frames[0] for frames in windows])


def windows_of(num_states: int, num_frames: int, stride: int, every: int) -> list[list[int]]:
    """The frames of all windows of one recording."""
    try:
        windows = Windows([num_states], num_frames, stride, every, what="recording")
    except DataError:
        return []
    return [windows[i][1].tolist() for i in range(len(windows))]
