# SPDX-License-Identifier: Apache-2.0
"""Frame rules: which frames, from where, at which rate; and the windows of recordings."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import pytest

from cosmos_predict2.data.windows import SAMPLINGS, FrameRule, action_windows
from imaginaire.errors import ConfigError, DataError


def choose_frames(
    total: int, num_frames: int, *, native_fps: float, draw: Callable[[int], int], **rule: Any
) -> list[int]:
    return FrameRule(num_frames=num_frames, **rule).choose(total, native_fps, draw)


def _draw(value: int) -> Callable[[int], int]:
    """Gives ``value``, or the last possible number."""
    return lambda n: min(value, n - 1)


def test_every_start_is_drawn_and_equally_often() -> None:
    generator = numpy.random.default_rng(0)
    starts = Counter(
        choose_frames(20, 13, native_fps=30, draw=lambda n: int(generator.integers(n)))[0] for _ in range(4000)
    )
    assert sorted(starts) == list(range(8))
    assert max(starts.values()) < 1.25 * min(starts.values())


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("total", [13, 14, 40])
def test_a_clip_just_long_enough_gives_all_its_frames(sampling: str, total: int) -> None:
    frames = choose_frames(total, 13, native_fps=30, draw=_draw(99), sampling=sampling)
    assert len(frames) == 13 and frames == sorted(frames)
    assert frames[0] >= 0 and frames[-1] < total
    if total == 13:
        assert frames == list(range(13))


def test_first_and_center_draw_nothing() -> None:
    def draw(n: int) -> int:
        raise AssertionError("drawn")

    assert choose_frames(20, 5, native_fps=30, draw=draw, sampling="first") == [0, 1, 2, 3, 4]
    assert choose_frames(20, 4, native_fps=30, draw=draw, sampling="center") == [8, 9, 10, 11]
    assert choose_frames(21, 5, native_fps=30, draw=draw, sampling="uniform") == [0, 5, 10, 15, 20]
    assert choose_frames(21, 1, native_fps=30, draw=draw, sampling="uniform") == [10]


def test_the_reference_never_draws_the_last_start() -> None:
    drawn = [choose_frames(total, 13, native_fps=30, draw=_draw(99), sampling="reference") for total in (13, 14, 16)]
    assert [frames[0] for frames in drawn] == [0, 0, 2]


def test_stride_leaves_out_frames() -> None:
    assert choose_frames(9, 3, native_fps=30, draw=_draw(99), stride=4) == [0, 4, 8]
    with pytest.raises(DataError, match="num_frames=3"):
        choose_frames(8, 3, native_fps=30, draw=_draw(0), stride=4)


@pytest.mark.parametrize(
    ("native", "wanted", "frames"),
    [
        (30, 10, [0, 3, 6, 9, 12]),
        (30, 30, [0, 1, 2, 3, 4]),
        (24, 16, [0, 2, 3, 5, 6]),  # 0, 1.5, 3, 4.5, 6: halves go up
        (10, 20, [0, 1, 1, 2, 2]),  # a slower clip's frames are repeated
        (29.97, 10, [0, 3, 6, 9, 12]),
    ],
)
def test_a_rate_takes_the_nearest_frames(native: float, wanted: float, frames: list[int]) -> None:
    assert choose_frames(100, 5, native_fps=native, draw=_draw(0), fps=wanted) == frames
    rule = FrameRule(num_frames=5, fps=wanted)
    assert rule.frames_needed(native) == frames[-1] + 1
    assert rule.choose(frames[-1] + 1, native, _draw(99)) == frames
    with pytest.raises(DataError, match=f"at fps={wanted:g} needs {frames[-1] + 1}"):
        rule.choose(frames[-1], native, _draw(0))


def test_a_sample_has_its_own_rate() -> None:
    def rate(total: int, **options: object) -> float:
        rule = FrameRule(num_frames=5, **options)  # type: ignore[arg-type]
        return rule.item_fps(rule.choose(total, 30.0, _draw(0)), 30.0)

    assert rate(50) == 30.0
    assert rate(50, stride=3) == 10.0
    assert rate(50, fps=12) == 12.0
    assert rate(41, sampling="uniform") == 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_frames=0), "num_frames=0"),
        (dict(num_frames=2.0), "num_frames=2.0"),
        (dict(num_frames=True), "num_frames=True"),
        (dict(num_frames=5, stride=0), "stride=0"),
        (dict(num_frames=5, fps=0), "fps=0"),
        (dict(num_frames=5, fps=float("nan")), "fps=nan"),
        (dict(num_frames=5, sampling="randon"), "randon"),
        (dict(num_frames=5, fps=10, stride=2), "stride"),
        (dict(num_frames=5, sampling="uniform", stride=2), "stride"),
    ],
)
def test_a_wrong_rule_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FrameRule(**arguments)  # type: ignore[arg-type]


def test_too_short_a_clip_is_reported_with_what_is_needed() -> None:
    with pytest.raises(DataError, match="num_frames=93"):
        choose_frames(50, 93, native_fps=30, draw=_draw(0))


@pytest.mark.parametrize(
    ("num_states", "num_frames", "stride", "every"), [(30, 13, 1, 1), (31, 5, 3, 2), (40, 7, 2, 5)]
)
def test_windows_are_all_that_fit(num_states: int, num_frames: int, stride: int, every: int) -> None:
    expected = []
    for start in range(0, num_states, every):
        frames = [start + k * stride for k in range(num_frames)]
        if frames[-1] < num_states:
            expected.append(frames)
    assert action_windows(num_states, num_frames, stride, every) == expected


def test_windows_of_short_recordings_and_wrong_arguments() -> None:
    assert action_windows(12, 13) == []
    assert action_windows(0, 1) == []
    assert action_windows(1, 1) == [[0]]
    with pytest.raises(ConfigError, match="stride=0"):
        action_windows(5, 2, stride=0)
